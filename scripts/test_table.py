#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One table from ctest's JUnit file: what passed, failed and was skipped, and why. A skipped case of a GoogleTest program that passed has a
row of its own."""
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


def main() -> int:
    counts = collections.Counter()
    rows = []
    for case in xml.parse(pathlib.Path(sys.argv[1])).getroot().iter("testcase"):
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
            for why, cases in reasons.items():
                rows.append(("skipped", f"  {len(cases)} of its cases", f"{why} ({cases[0]}{', …' if len(cases) > 1 else ''})"))
                counts["cases"] += len(cases)
    width = max([len(name) for _, name, _ in rows], default=0)
    print("\n" + "\n".join(f"{outcome:7}  {name:{width}}  {why}".rstrip() for outcome, name, why in rows))
    print(f"\n{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped; "
          f"{counts['cases']} cases skipped in programs that passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
