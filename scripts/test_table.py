#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One table from ctest's JUnit file: what passed, failed and was skipped, and why. The cases that a program which passed left out have rows
of their own, one for each reason: those that GoogleTest skipped, those that a script names in lines "skipped: ..." or "skipped, ...".

    test_table.py JUNIT_FILE [CONFIGURE_LOG]

With the log of CMake, each thing that it left out has a row, too."""
import collections
import pathlib
import re
import sys
import xml.etree.ElementTree as xml


def skipped_cases(output: str) -> dict[str, list[str]]:
    """reason -> the cases that GoogleTest skipped for it"""
    reasons = collections.defaultdict(list)
    # GoogleTest prints "file:line: Skipped", the message, an empty line, then "[  SKIPPED ] Suite.Case (0 ms)".
    for message, case in re.findall(r": Skipped\n(.*?)\n+\[  SKIPPED \] (\S+?)(?:,| \()", output, re.DOTALL):
        reasons[" ".join(message.split())].append(case)
    return reasons


def left_out(output: str) -> dict[str, list[str]]:
    """reason -> the cases that a script left out for it, named before the tool's message; empty names where there is none"""
    reasons = collections.defaultdict(list)
    for case, reason in re.findall(r"^skipped[:,][ \t]*(?:(.*?): (?=moe: E_))?(.*)", output, re.MULTILINE):
        reasons[reason].append(case)
    return reasons


def unbuilt(log: str) -> list[tuple[str, str, str]]:
    """A row for each thing that CMake left out, "moe: no NCCL, the test multigpu.x is left out", and its reason."""
    return [("not there", "", line) for line in re.findall(r"^-- moe: (.*\bleft out\b.*)", log, re.MULTILINE)]


def table(root: xml.Element) -> tuple[list[tuple[str, str, str]], str]:
    """The rows (outcome, test, why) and the last line."""
    counts = collections.Counter()
    rows = []
    for case in root.iter("testcase"):
        name, output = case.get("name"), case.findtext("system-out") or ""
        reasons = skipped_cases(output)
        failure = case.find("failure")
        if "Unable to find executable" in output:
            rows.append(("FAILED", name, "not built"))
            counts["failed"] += 1
        elif case.find("skipped") is not None or case.get("status") in ("notrun", "disabled"):
            said = re.search(r"^skipped[:,]\s*(.*)", output, re.MULTILINE)
            why = "; ".join(reasons) or (said.group(1) if said else "") or case.find("skipped").get("message", "no reason was given")
            rows.append(("skipped", name, why))
            counts["skipped"] += 1
        elif failure is not None or case.get("status") == "fail":
            cases = re.findall(r"^\[  FAILED  \] (\S+?),? \(", output, re.MULTILINE)
            rows.append(("FAILED", name, ", ".join(cases[:5]) or (failure.get("message", "") if failure is not None else "")))
            counts["failed"] += 1
        else:
            passed = len(re.findall(r"^\[       OK \]", output, re.MULTILINE))
            rows.append(("passed", name, f"{passed} cases" if passed else ""))
            counts["passed"] += 1
            # In a GoogleTest program such a line is of a rank that skipped every case: those are counted.
            for why, cases in (reasons if "[==========]" in output else left_out(output)).items():
                named = f" ({cases[0]}{', …' if len(cases) > 1 else ''})" if cases[0] else ""
                rows.append(("skipped", f"  {len(cases)} of its cases", why + named))
                counts["cases"] += len(cases)
    return rows, (f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped; "
                  f"{counts['cases']} cases skipped in programs that passed")


def main() -> int:
    rows, last = table(xml.parse(pathlib.Path(sys.argv[1])).getroot())
    missing = unbuilt(pathlib.Path(sys.argv[2]).read_text()) if len(sys.argv) > 2 else []
    width = max([len(name) for _, name, _ in rows], default=0)
    print("\n" + "\n".join(f"{outcome:9}  {name:{width}}  {why}".rstrip() for outcome, name, why in rows + missing))
    print("\n" + last + (f"; {len(missing)} lines of what this build left out" if missing else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
