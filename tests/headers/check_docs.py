#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the documents: README's example is examples/readme.cpp, every link and every docs/errors.md#slug in the code has a target."""
import argparse
import pathlib
import re
import sys


def anchors(document: pathlib.Path) -> set[str]:
    found = set()
    fenced = False
    for line in document.read_text().splitlines():
        if line.startswith("```"):
            fenced = not fenced
        heading = re.match(r"#+ (.+)", line)
        if heading and not fenced:
            slug = re.sub(r"[^\w\- ]", "", heading.group(1).strip().lower()).replace(" ", "-")
            found.add(slug)
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", required=True, type=pathlib.Path)
    root = parser.parse_args().root
    problems = []

    blocks = re.findall(r"```cpp\n(.*?)```", (root / "README.md").read_text(), re.S)
    example = (root / "examples" / "readme.cpp").read_text()
    if blocks[:1] != [example]:
        problems.append("README.md: its first C++ block differs from examples/readme.cpp")

    slugs = anchors(root / "docs" / "errors.md")
    for path in sorted([*root.glob("include/**/*.hpp"), *root.glob("include/**/*.cuh")]):
        for slug in re.findall(r"docs/errors\.md#([\w-]+)", path.read_text()):
            if slug not in slugs:
                problems.append(f"{path.relative_to(root)}: docs/errors.md has no heading #{slug}")

    for document in [root / "README.md", root / "CHANGELOG.md", *sorted((root / "docs").glob("*.md")), root / "tests/data/README.md"]:
        text = re.sub(r"```.*?```", "", document.read_text(), flags=re.S)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, slug = target.partition("#")
            file = document.parent / name if name else document
            if not file.exists():
                problems.append(f"{document.relative_to(root)}: no such file: {target}")
            elif slug and slug not in anchors(file):
                problems.append(f"{document.relative_to(root)}: no such heading: {target}")

    for problem in problems:
        print(f"FAILED: {problem}")
    print(f"{len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
