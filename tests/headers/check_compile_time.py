#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compiles one file and fails if that takes more processor time (user and system) than allowed; the fastest of up to three attempts
counts. Fails, too, if the file reaches a header that it must do without: a bound on time needs slack, a list of headers does not."""
import argparse
import os
import re
import resource
import subprocess
import sys
import tempfile


def seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def reaches(header: str, files: list[str]) -> bool:
    """`header` is a name of the C++ library ("thread") or a path in an include folder ("moe/quantization/config.hpp")."""
    end = re.compile(("/" if "/" in header else r"/c\+\+/[^/]+/") + re.escape(header) + "$")
    return any(end.search(file) for file in files)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compiler", required=True)
    parser.add_argument("--flags", required=True, help="file with one compiler argument a line")
    parser.add_argument("--seconds", required=True, type=float)
    parser.add_argument("--argument", action="append", default=[], help="one more argument of the compiler")
    parser.add_argument("--without", action="append", default=[], help="a header that the file must not reach")
    parser.add_argument("source")
    options = parser.parse_args()
    compiler = [options.compiler, f"@{options.flags}", *options.argument]
    if options.without:
        listed = subprocess.run([*compiler, "-M", options.source], stdout=subprocess.PIPE, text=True)
        if listed.returncode != 0:
            return 1
        files = [os.path.normpath(word) for word in listed.stdout.split()]
        reached = [header for header in options.without if reaches(header, files)]
        if not reaches("string", files):
            print(f"{options.source}: no header of the C++ library is listed")
            return 1
        if reached:
            print(f"{options.source}: reaches {', '.join(reached)}; the compiler's option -H shows by which way")
            return 1
    best = float("inf")
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(3):
            before = seconds()
            done = subprocess.run([*compiler, "-O2", "-c", options.source, "-o", os.path.join(folder, "out.o")])
            if done.returncode != 0:
                return 1
            best = min(best, seconds() - before)
            if best <= options.seconds:
                break
    print(f"{options.source}: {best:.2f} s of processor time, at most {options.seconds}")
    return 0 if best <= options.seconds else 1


if __name__ == "__main__":
    sys.exit(main())
