#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds the API reference with doxygen. Fails on any warning, and on a declaration of the C interface without a comment: a struct, a
member, an enum, one of its values, a function, a type or a macro. Exits with 77 where doxygen is not installed."""
import argparse
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree

C_INTERFACE = ("moe/moe.h", "moe/c/dlpack.h")  # below include/

WRONG = """/// @file
namespace moe {
/// \\ref no_such_name
/// @param wrong there is no such parameter
int documented(int right);
}
"""

# What is documented has "described" in its name, everything else must be found.
WRONG_C = """/** @file
 * A header. */
#define BARE_MACRO 1
#define DESCRIBED_MACRO 2 /**< A macro. */
typedef struct bare_struct { int bare_member; } bare_struct;
/** A struct. */
typedef struct described_struct {
  int described_member; /**< A member. */
  /* not for the reference */
  int bare_member_beside;
} described_struct;
typedef enum { bare_value, described_value /**< A value. */ } bare_enum;
typedef struct bare_opaque* bare_type;
int bare_function(int x);
/* not for the reference */
int bare_function_2(int x);
/** A function. */
int described_function(int x);
"""


def warnings(doxyfile: str, output: pathlib.Path) -> list[str]:
    """What doxygen reports for this configuration, given on its standard input."""
    output.mkdir(parents=True, exist_ok=True)
    run = subprocess.run(["doxygen", "-"], input=doxyfile + f'\nOUTPUT_DIRECTORY = "{output}"\n', capture_output=True, text=True,
                         check=False)
    lines = [line for line in run.stderr.splitlines() if line.strip()]
    return lines + ([f"doxygen exits with {run.returncode}"] if run.returncode else [])


def undocumented(doxyfile: str, headers: list[pathlib.Path], output: pathlib.Path) -> list[str]:
    """The names that these headers declare without a comment for the reference. Include guards need none."""
    inputs = " ".join(f'"{header}"' for header in headers)
    problems = warnings(doxyfile + f"\nINPUT = {inputs}\nGENERATE_HTML = NO\nGENERATE_XML = YES\n", output)
    if problems:
        return problems
    described = {}  # a typedef and its struct have one name and one comment
    for page in (output / "xml").glob("*.xml"):
        if page.name == "index.xml" or page.name == "Doxyfile.xml":
            continue
        for element in xml.etree.ElementTree.parse(page).iter():
            if element.tag == "compounddef":
                name = element.findtext("compoundname")
                if element.get("kind") not in ("struct", "union", "file"):
                    continue
                owner = "" if element.get("kind") == "file" else f"{name}::"
            elif element.tag in ("memberdef", "enumvalue"):
                name = owner + (element.findtext("name") or "an enum without a name")
            else:
                continue
            text = "".join(part for tag in ("briefdescription", "detaileddescription") for part in element.find(tag).itertext())
            described[name] = described.get(name, False) or bool(text.strip())
    return sorted(name for name, found in described.items() if not found and not name.endswith("_H_"))


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

        found = re.search(r'^INPUT\s*=\s*"(.*)/moe"$', doxyfile, re.MULTILINE)
        headers = [pathlib.Path(found.group(1)) / name for name in C_INTERFACE]
        problems += [f"no comment for the reference: {name}" for name in undocumented(doxyfile, headers, pathlib.Path(folder) / "c")]
        (pathlib.Path(folder) / "wrong.h").write_text(WRONG_C)
        missing = undocumented(doxyfile, [pathlib.Path(folder) / "wrong.h"], pathlib.Path(folder) / "wrong_c")
        expected = ["BARE_MACRO", "bare_enum", "bare_function", "bare_function_2", "bare_struct", "bare_struct::bare_member", "bare_type",
                    "bare_value", "described_struct::bare_member_beside"]
        if missing != expected:
            problems.append(f"of declarations without a comment are found {missing}, expected {expected}")

    for problem in problems:
        print(f"FAILED: {problem}")
    print(f"{len(problems)} problems; the reference is {arguments.output / 'html' / 'index.html'}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
