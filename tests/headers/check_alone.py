#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compiles every .hpp as a translation unit of its own, included twice, with warnings as errors. What takes most of the time is not the
header but what all of them reach, so that is precompiled; only a header that includes it anyway, at any depth, gets it ahead."""
import argparse
import concurrent.futures
import functools
import os
import pathlib
import re
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "compile_fail"))
from check import flags_for

# The first that a header reaches whole; a longer one comes first.
PRECOMPILED = (("moe/runner/declaration.hpp", "moe/io/checkpoint_quantization.hpp"), ("moe/runner/declaration.hpp",),
               ("moe/io/checkpoint_quantization.hpp",), ("moe/modular_kernel.hpp",), ("moe/core/array.hpp", "moe/io/json.hpp"),
               ("moe/io/json.hpp",), ("moe/routing/row/row_router.hpp",), ("moe/core/array.hpp",), ("moe/core/types.hpp",))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compiler", required=True)
    parser.add_argument("--front", choices=("g++", "clang"), default="g++")
    parser.add_argument("--flags", required=True, help="file with one compiler argument a line")
    parser.add_argument("--include", required=True, type=pathlib.Path)
    parser.add_argument("--without", action="append", default=[], help="a header that is not here; what reaches it is left out")
    options = parser.parse_args()
    clang = options.front == "clang"
    flags = flags_for(options.front, [line for line in pathlib.Path(options.flags).read_text().splitlines() if line])
    headers = sorted(path.relative_to(options.include).as_posix() for path in options.include.rglob("*.hpp"))

    @functools.cache
    def reached(header: str) -> frozenset[str]:
        path = options.include / header
        names = re.findall(r'^#include ["<](.+)[">]', path.read_text(), re.MULTILINE) if path.exists() else []
        return frozenset(names).union(*map(reached, names))

    headers = [header for header in headers if not reached(header) & set(options.without)]

    def check(header: str) -> tuple[str, str]:
        ahead = next((folder / f"{i}.hpp{'.pch' if clang else ''}" for i, names in enumerate(PRECOMPILED)
                      if reached(header).issuperset(names)), None)
        done = subprocess.run([options.compiler, *flags, *(["-include-pch" if clang else "-include", ahead] if ahead else []),
                               "-fsyntax-only", "-x", "c++", "-"], text=True,
                              capture_output=True, input=f"#include <{header}>\n#include <{header}>\n")
        return header, done.stderr if done.returncode != 0 else ""

    failed = 0
    with tempfile.TemporaryDirectory() as temporary, concurrent.futures.ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        folder = pathlib.Path(temporary)
        for i, names in enumerate(PRECOMPILED):
            source = folder / f"{i}.hpp"
            source.write_text("".join(f"#include <{name}>\n" for name in names))
            subprocess.run([options.compiler, *flags, "-x", "c++-header", source, "-o", f"{source}.{'pch' if clang else 'gch'}"],
                           check=True)
        for header, message in pool.map(check, headers):
            if message:
                failed += 1
                print(f"FAILED: {header}\n{message[:4000]}")
    print(f"{len(headers)} headers, {failed} do not compile alone")
    return 1 if failed or not headers else 0


if __name__ == "__main__":
    sys.exit(main())
