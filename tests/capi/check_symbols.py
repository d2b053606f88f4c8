#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks with nm that libmoe, or a library of moe/c/export.hpp, exports the functions of moe.h and nothing else, and needs symbols of the C
and C++ runtimes, MPI, CUDA and NCCL only."""
import argparse
import pathlib
import re
import subprocess
import sys

# The C library and libstdc++ (versioned symbols), the loader's and compiler's own, and the libraries that libmoe is a caller of.
FOREIGN = re.compile(r"@(GLIBC|GLIBCXX|CXXABI|GCC|libcudart)_?[\w.]*|^(_ITM_\w+|__gmon_start__|__cxa_finalize|__tls_get_addr)|"
                     r"^(MPI_\w+|ompi_\w+|nccl\w+|pnccl\w+|cuda\w+|__cuda\w+|cu[A-Z]\w+|cublas\w+)(@|$)")


def symbols(nm: str, library: str, *flags: str) -> list[tuple[str, str]]:
    listing = subprocess.run([nm, "-D", *flags, library], capture_output=True, text=True, check=True).stdout
    return [(fields[-2], fields[-1]) for line in listing.splitlines() if len(fields := line.split()) >= 2]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nm", required=True)
    parser.add_argument("--header", required=True, type=pathlib.Path)
    parser.add_argument("shared_object")
    options = parser.parse_args()
    declared = set(re.findall(r"^MOE_API [\w *]+?(moe_\w+)\(", options.header.read_text(), re.M))
    exported = {name for _, name in symbols(options.nm, options.shared_object, "--defined-only")}
    problems = [f"not exported: {name}" for name in sorted(declared - exported)]
    problems += [f"exported, but not declared in moe.h: {name}" for name in sorted(exported - declared)]
    needed = symbols(options.nm, options.shared_object, "--undefined-only")
    problems += [f"needs {name}" for _, name in needed if not FOREIGN.search(name)]
    for problem in problems:
        print(f"FAILED: {problem}")
    print(f"{len(exported)} exported, {len(needed)} needed, {len(problems)} problems")
    return 1 if problems or len(declared) < 20 or not needed else 0


if __name__ == "__main__":
    sys.exit(main())
