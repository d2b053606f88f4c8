#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Precompiles a header with the flags of the compile_fail programs: HEADER to HEADER.gch, for clang to HEADER.pch, with what it depends on
in a .d beside it."""
import argparse
import pathlib
import subprocess
import sys

from check import flags_for

parser = argparse.ArgumentParser()
parser.add_argument("--compiler", required=True)
parser.add_argument("--front", choices=("g++", "clang"), default="g++")
parser.add_argument("--flags", required=True, help="file with one compiler argument a line")
parser.add_argument("header")
options = parser.parse_args()
flags = flags_for(options.front, [line for line in pathlib.Path(options.flags).read_text().splitlines() if line])
output = f"{options.header}.gch" if options.front == "g++" else f"{options.header}.pch"
command = [options.compiler, *flags, "-x", "c++-header", options.header, "-o", output, "-MD", "-MF", f"{output}.d", "-MT", output]
sys.exit(subprocess.run(command, check=False).returncode)
