#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compiles every .hpp as a translation unit of its own, included twice, with warnings as errors."""
import argparse
import concurrent.futures
import os
import pathlib
import subprocess
import sys


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compiler", required=True)
    parser.add_argument("--flags", required=True, help="file with one compiler argument a line")
    parser.add_argument("--include", required=True, type=pathlib.Path)
    options = parser.parse_args()
    flags = [line for line in pathlib.Path(options.flags).read_text().splitlines() if line]
    headers = sorted(path.relative_to(options.include).as_posix() for path in options.include.rglob("*.hpp"))

    def check(header: str) -> tuple[str, str]:
        done = subprocess.run([options.compiler, *flags, "-fsyntax-only", "-x", "c++", "-"], text=True, capture_output=True,
                              input=f"#include <{header}>\n#include <{header}>\n")
        return header, done.stderr if done.returncode != 0 else ""

    failed = 0
    with concurrent.futures.ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        for header, message in pool.map(check, headers):
            if message:
                failed += 1
                print(f"FAILED: {header}\n{message[:4000]}")
    print(f"{len(headers)} headers, {failed} do not compile alone")
    return 1 if failed or not headers else 0


if __name__ == "__main__":
    sys.exit(main())
