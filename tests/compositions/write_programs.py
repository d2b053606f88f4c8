#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# tests/compositions/write_programs.py: writes the programs that `moe list compositions` names for its rows "not in this program".
"""Usage: write_programs.py --tool MOE --output FOLDER --spaces SPACE... --files FILE...

One FILE for each pair of quantization and experts that has such rows, QUANTIZATION-EXPERTS.cpp in the host space and
QUANTIZATION-EXPERTS.cu in the CUDA space: it includes what the rows say and the policies' headers of `moe list policies`, and constructs
and runs a layer for each of its rows. Ends with an error if the rows need other files than those named: then
tests/compositions/CMakeLists.txt needs them.
"""
import argparse
import json
import pathlib
import re
import subprocess
import sys

SUFFIXES = {"host": ".cpp", "cuda": ".cu"}


def listed(tool, *arguments):
    return json.loads(subprocess.run([tool, "list", *arguments, "--json"], capture_output=True, text=True, check=True).stdout)


def included(row):
    """The headers that a row names."""
    words = re.fullmatch(r"a program that includes (.+) and links the CMake targets? .+ builds it; .*", row["why"])
    if not words:
        raise ValueError(f"{row} does not name headers")
    return re.split(r", | and ", words[1])


def program(name, rows, policies):
    headers = {"tests/compositions/program.hpp"}
    calls = []
    for row in rows:
        types = {}
        for kind in ("router", "quantization", "backend", "experts"):
            policy = policies.get((kind, row[kind], "both")) or policies[kind, row[kind], row["space"]]
            types[kind] = policy["type"]
            headers.update(policy["include"].split(" and ") if kind in ("router", "quantization") else ())
        headers.update(included(row))
        calls.append((row["backend"], types))
    lines = ["// Written by tests/compositions/write_programs.py.", *(f'#include "{header}"' for header in sorted(headers)), ""]
    for backend, types in calls:
        lines += [f"void {name}_{backend}({types['backend']}::Comm& comm,",
                  f"    moe_test::Weights<{types['backend']}, {types['quantization']}> const& weights,",
                  f"    moe_test::Batch<{types['backend']}> const& batch) {{",
                  f"  moe_test::run<{types['router']}, {types['quantization']},", f"                {types['backend']},",
                  f"                {types['experts']}>(comm, weights, batch);", "}"]
    return "\n".join(lines) + "\n"


def main():
    arguments = argparse.ArgumentParser(usage=__doc__)
    arguments.add_argument("--tool", required=True)
    arguments.add_argument("--output", required=True, type=pathlib.Path)
    arguments.add_argument("--spaces", required=True, nargs="+", choices=SUFFIXES)
    arguments.add_argument("--files", required=True, nargs="+")
    options = arguments.parse_args()
    policies = {(p["kind"], p["name"], p["space"]): p for p in listed(options.tool, "policies")}
    rows = {}
    for space in options.spaces:
        for row in listed(options.tool, "compositions", "--space", space):
            if row["answer"] == "not in this program":
                rows.setdefault(f"{row['quantization']}-{row['experts']}{SUFFIXES[space]}", []).append(row)
    if sorted(rows) != sorted(options.files):
        more, less = sorted(set(rows) - set(options.files)), sorted(set(options.files) - set(rows))
        print(f"the rows need {more} too and not {less}", file=sys.stderr)
        return 1
    for file, of_file in rows.items():
        text = program(re.sub(r"\W", "_", pathlib.Path(file).stem), of_file, policies)
        path = options.output / file
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    (options.output / "written").touch()
    print(f"{sum(map(len, rows.values()))} compositions in {len(rows)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
