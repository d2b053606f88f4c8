#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks one program that must not compile.

The file states its demands in comment lines:
    // expect: <text>     the first error's line must contain this text (several lines: all of them)
    // errors: any        more than one error is allowed; without it exactly one "error:" line is demanded
With -DMOE_FIXED the file must compile: what fails is the mistake and nothing else.
"""
import argparse
import pathlib
import re
import subprocess
import sys


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compiler", required=True)
    parser.add_argument("--flags", required=True, help="file with one compiler argument a line")
    parser.add_argument("--archetypes", help="beside it its precompiled form, .gch, for files whose first include is archetypes.hpp")
    parser.add_argument("file", type=pathlib.Path)
    options = parser.parse_args()

    source = options.file.read_text()
    expected = [text.strip() for text in re.findall(r"//\s*expect:\s*(.+)", source)]
    if not expected:
        print(f"{options.file}: no line '// expect: <text>'")
        return 1
    any_count = re.search(r"//\s*errors:\s*any", source) is not None

    flags = [line for line in pathlib.Path(options.flags).read_text().splitlines() if line]
    first = re.search(r'^#include ["<](.+)[">]', source, re.MULTILINE)
    if options.archetypes and first and first.group(1) == "../archetypes.hpp":
        flags += ["-include", options.archetypes]
    command = [options.compiler, *flags, "-fsyntax-only", "-fdiagnostics-color=never", str(options.file)]

    broken = subprocess.run(command, capture_output=True, text=True)
    errors = [line for line in broken.stderr.splitlines() if re.search(r"\berror: ", line)]
    problems = []
    if broken.returncode == 0:
        problems.append("it compiles, and must not")
    else:
        reported = errors[0] if errors else ""
        problems += [f"the first error does not contain: {text}" for text in expected if text not in reported]
        if len(errors) != 1 and not any_count:
            problems.append(f"{len(errors)} errors, expected 1")

    fixed = subprocess.run([*command, "-DMOE_FIXED"], capture_output=True, text=True)
    if fixed.returncode != 0:
        problems.append("with -DMOE_FIXED it must compile, and does not:\n" + fixed.stderr[:4000])

    print(f"{options.file.name}: {len(errors)} error(s); first: {errors[0] if errors else '-'}")
    for problem in problems:
        print(f"FAILED: {problem}")
    if problems and broken.returncode != 0:
        print("--- the compiler's output\n" + broken.stderr[:8000])
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
