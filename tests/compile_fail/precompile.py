#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Precompiles a header with the flags of the compile_fail programs: HEADER to HEADER.gch, with what it depends on in HEADER.d."""
import argparse
import pathlib
import subprocess
import sys

parser = argparse.ArgumentParser()
parser.add_argument("--compiler", required=True)
parser.add_argument("--flags", required=True, help="file with one compiler argument a line")
parser.add_argument("header")
options = parser.parse_args()
flags = [line for line in pathlib.Path(options.flags).read_text().splitlines() if line]
output = ["-x", "c++-header", options.header, "-o", f"{options.header}.gch", "-MD", "-MF", f"{options.header}.d"]
sys.exit(subprocess.run([options.compiler, *flags, *output], check=False).returncode)
