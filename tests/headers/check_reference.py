#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds the API reference with doxygen and fails on any warning. Exits with 77 where doxygen is not installed."""
import argparse
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

WRONG = """/// @file
namespace moe {
/// \\ref no_such_name
/// @param wrong there is no such parameter
int documented(int right);
}
"""


def warnings(doxyfile: str, output: pathlib.Path) -> list[str]:
    """What doxygen reports for this configuration, given on its standard input."""
    output.mkdir(parents=True, exist_ok=True)
    run = subprocess.run(["doxygen", "-"], input=doxyfile + f'\nOUTPUT_DIRECTORY = "{output}"\n', capture_output=True, text=True,
                         check=False)
    lines = [line for line in run.stderr.splitlines() if line.strip()]
    return lines + ([f"doxygen exits with {run.returncode}"] if run.returncode else [])


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--doxyfile", required=True, type=pathlib.Path)
    parser.add_argument("--output", required=True, type=pathlib.Path)
    arguments = parser.parse_args()
    if shutil.which("doxygen") is None:
        print("skipped: doxygen is not installed; scripts/setup installs it")
        return 77
    doxyfile = arguments.doxyfile.read_text()
    problems = warnings(doxyfile, arguments.output)

    index = (arguments.output / "html" / "annotated.html").read_text()
    for name in ("ModularKernel", "ExpertPlacement", "LowLatency", "HopperW4A16", "OneDnn", "Fp8Block", "GroupedTopK", "Balancer"):
        if not re.search(rf">{name}<", index):
            problems.append(f"the reference has no class {name}")
    if re.search(r">detail<", index):
        problems.append("the reference shows a namespace detail")

    with tempfile.TemporaryDirectory() as folder:  # the same configuration sees mistakes
        (pathlib.Path(folder) / "wrong.hpp").write_text(WRONG)
        seen = "\n".join(warnings(doxyfile + f'\nINPUT = "{folder}"\n', pathlib.Path(folder) / "reference"))
        for part in ("no_such_name", "wrong"):
            if not re.search(rf"warning: .*'?{part}'?", seen):
                problems.append(f"a mistake in a comment ({part}) gives no warning: {seen}")

    for problem in problems:
        print(f"FAILED: {problem}")
    print(f"{len(problems)} problems; the reference is {arguments.output / 'html' / 'index.html'}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
