#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes libraries with the names and the symbols that a program takes from cuBLAS; each of their functions aborts. On a machine without a
GPU nothing calls cuBLAS, and the relocations of the real one (700 MB) cost 70 ms at every start: most of a short run of the tool."""
import argparse
import collections
import pathlib
import re
import subprocess
import sys


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nm", required=True)
    parser.add_argument("--cxx", required=True)
    parser.add_argument("--output", required=True, type=pathlib.Path, help="the folder for the libraries")
    parser.add_argument("program")
    options = parser.parse_args()
    taken = subprocess.run([options.nm, "-D", "--undefined-only", options.program], capture_output=True, text=True, check=True).stdout
    libraries = collections.defaultdict(list)
    for name, library in re.findall(r" (\w+)@+(libcublas\w*\.so\.\d+)$", taken, re.M):
        libraries[library].append(name)
    options.output.mkdir(parents=True, exist_ok=True)
    for library, names in libraries.items():
        source, versions = options.output / f"{library}.cpp", options.output / f"{library}.map"
        source.write_text("#include <cstdlib>\n" + "".join(f'extern "C" void {name}() {{ std::abort(); }}\n' for name in names))
        versions.write_text(f"{library} {{ global: *; }};\n")
        subprocess.run([options.cxx, "-shared", "-fPIC", f"-Wl,-soname,{library},--version-script={versions}", source, "-o",
                        options.output / library], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
