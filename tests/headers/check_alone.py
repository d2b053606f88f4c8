#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compiles every .hpp as a translation unit of its own, included twice, with warnings as errors. What takes most of the time is not the
header but what all of them reach, so that is precompiled; only a header that includes it anyway, at any depth, gets it ahead. With
--group N, N headers at most make a translation unit, of which only the first shows that it includes what it needs."""
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

# What many headers reach and takes long to read: a header gets the largest of these that it reaches whole.
PRECOMPILED = (
    ("string_view",), ("string_view", "cuda_fp8.h"), ("cuda/std/bit", "math.h"), ("moe/core/error.hpp",),
    ("moe/core/types.hpp", "moe/core/error.hpp"), ("moe/core/types.hpp", "cuda/std/mdspan"),
    ("moe/core/array.hpp", "moe/core/error.hpp"), ("moe/core/buffer.hpp",), ("moe/core/tokens.hpp", "moe/parallel/placement.hpp"),
    ("moe/core/host_pool.hpp", "moe/routing/row/expert_capacity.hpp"), ("moe/runner/declaration.hpp",),
    ("moe/quantization/format/shape.hpp", "moe/quantization/format/block_weights.hpp"), ("moe/core/error.hpp", "nlohmann/json.hpp"),
    ("moe/io/checkpoint_quantization.hpp",), ("moe/io/scaled_matrix.hpp",))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compiler", required=True)
    parser.add_argument("--front", choices=("g++", "clang"), default="g++")
    parser.add_argument("--flags", required=True, help="file with one compiler argument a line")
    parser.add_argument("--include", required=True, type=pathlib.Path)
    parser.add_argument("--group", type=int, default=1)
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

    def whole(names: tuple[str, ...]) -> frozenset[str]:
        return frozenset(names).union(*map(reached, names))

    failed = 0
    with tempfile.TemporaryDirectory() as temporary, concurrent.futures.ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        def precompile(number: int, names: tuple[str, ...]) -> list:
            """The arguments that use it. It has what it instantiates too: else every header on top would instantiate that again."""
            source = pathlib.Path(temporary) / f"{number}.hpp"
            source.write_text("".join(f"#include <{name}>\n" for name in names))
            output = f"{source}.{'pch' if clang else 'gch'}"
            subprocess.run([options.compiler, *flags, *(["-fpch-instantiate-templates"] if clang else []), "-x", "c++-header", source,
                            "-o", output], check=True)
            return ["-include-pch", output] if clang else ["-include", source]

        def ahead_of(header: str) -> tuple[str, ...]:
            return next((names for names in built if reached(header).issuperset(names)), ())

        def check(together: list[str]) -> tuple[str, str]:
            names = ahead_of(together[0])
            ahead = built[names].result() if names else []
            done = subprocess.run([options.compiler, *flags, *ahead, "-fsyntax-only", "-x", "c++", "-"], text=True, capture_output=True,
                                  input="".join(f"#include <{header}>\n#include <{header}>\n" for header in together))
            return ", ".join(together), done.stderr if done.returncode != 0 else ""

        here = [names for names in PRECOMPILED if not whole(names) & set(options.without)]
        built = {names: pool.submit(precompile, number, names)  # the largest first, to be found first
                 for number, names in enumerate(sorted(here, key=lambda names: len(whole(names)), reverse=True))}
        units: list[list[str]] = []
        for header in sorted(headers, key=ahead_of):  # those of a unit get the same headers ahead
            if not units or len(units[-1]) == options.group or ahead_of(units[-1][0]) != ahead_of(header):
                units.append([])
            units[-1].append(header)
        for together, message in pool.map(check, units):
            if message:
                failed += 1
                print(f"FAILED: {together}\n{message[:4000]}")
    print(f"{len(headers)} headers in {len(units)} translation units, {failed} do not compile")
    return 1 if failed or not headers else 0


if __name__ == "__main__":
    sys.exit(main())
