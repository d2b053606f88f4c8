#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks a program that compiles and must not link: the linker names each symbol of the lines '// undefined: <symbol>' in the file."""
import argparse
import pathlib
import re
import subprocess
import sys
import tempfile


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compiler", required=True)
    parser.add_argument("--flags", required=True, help="file with one compiler argument a line")
    parser.add_argument("--optimise", nargs="+", default=["-O0", "-O2"])
    parser.add_argument("file", type=pathlib.Path)
    options = parser.parse_args()

    expected = re.findall(r"//\s*undefined:\s*(.+)", options.file.read_text())
    flags = [line for line in pathlib.Path(options.flags).read_text().splitlines() if line]
    problems = [] if expected else [f"{options.file}: no line '// undefined: <symbol>'"]
    for level in options.optimise:
        with tempfile.TemporaryDirectory() as folder:
            compiled = f"{folder}/program.o"
            subprocess.run([options.compiler, *flags, level, "-c", str(options.file), "-o", compiled], check=True)
            linked = subprocess.run([options.compiler, *flags, level, compiled, "-o", f"{folder}/program"], capture_output=True, text=True)
        if linked.returncode == 0:
            problems.append(f"{level}: it links, and must not")
        problems += [f"{level}: the linker does not name {symbol}" for symbol in expected
                     if f"undefined reference to `{symbol}'" not in linked.stderr]
    for problem in problems:
        print(f"FAILED: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
