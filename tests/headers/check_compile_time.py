#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compiles one file and fails if that takes more processor time (user and system) than allowed; the fastest attempt counts. Processor time
grows, to twice and more, where other programs use the machine. So where three attempts take longer than allowed, the bound grows by what
a reference file takes longer there than on a quiet machine, and there are five attempts more. Fails, too, if the file reaches a header that
it must do without."""
import argparse
import os
import re
import resource
import statistics
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
    parser.add_argument("--reference", required=True, help="a file without headers of this library")
    parser.add_argument("--reference-seconds", required=True, type=float, help="what it takes on a quiet machine")
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
    best, bound, references = float("inf"), options.seconds, []
    with tempfile.TemporaryDirectory() as folder:

        def compile_time(source: str) -> float:
            before = seconds()
            subprocess.run([*compiler, "-O2", "-c", source, "-o", os.path.join(folder, "out.o")], check=True)
            return seconds() - before

        for attempt in range(8):
            best = min(best, compile_time(options.source))
            if best <= options.seconds:
                break
            references.append(compile_time(options.reference))
            bound = options.seconds * max(1, statistics.median(references) / options.reference_seconds)
            if attempt >= 2 and best <= bound:
                break
    slower = f"; the machine is {bound / options.seconds:.2f} times slower than a quiet one" if references else ""
    print(f"{options.source}: {best:.2f} s of processor time, at most {bound:.2f}{slower}")
    return 0 if best <= bound else 1


if __name__ == "__main__":
    sys.exit(main())
