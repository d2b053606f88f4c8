#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the documents: README's example is examples/readme.cpp, blocks that name a file are that file, every link has a target, and docs/errors.md has exactly the codes of
core/error.hpp and the rules of the code, each with a program of tests/compile_fail that breaks it."""
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

    # A block of a document that names its file, "<!-- path -->" on the line before, is that file.
    for document in sorted((root / "docs").rglob("*.md")):
        for name, block in re.findall(r"<!-- (\S+) -->\n```\w+\n(.*?)```", document.read_text(), re.S):
            if not (root / name).is_file() or block != (root / name).read_text():
                problems.append(f"{document.relative_to(root)}: the block of {name} differs from that file")

    errors = (root / "docs" / "errors.md").read_text()
    codes = re.findall(r"^\s+\w+,\s+///< (E_\w+)", (root / "include/moe/core/error.hpp").read_text(), re.M)
    if not codes or codes != re.findall(r"^\| `(E_\w+)` \|", errors, re.M):
        problems.append("docs/errors.md: its table of codes differs from core/error.hpp")
    rules = set(re.findall(r"^### (.+)", errors, re.M))
    expected = [text for path in root.glob("tests/compile_fail/*.cpp") for text in re.findall(r"// expect: (.+)", path.read_text())]
    tested = set()
    for path in sorted([*root.glob("include/**/*.hpp"), *root.glob("include/**/*.cuh")]):
        text = re.sub(r'"\s*\n\s*"', "", path.read_text())  # literals of several lines
        for literal, slug in re.findall(r'"([^"\n]*docs/errors\.md#([\w-]+)[^"\n]*)"', text):
            if slug not in rules:
                problems.append(f"{path.relative_to(root)}: docs/errors.md has no heading #{slug}")
            if any(part in literal or literal in part for part in expected):
                tested.add(slug)
    problems += [f"docs/errors.md: no test in tests/compile_fail breaks the rule {slug}" for slug in sorted(rules - tested)]

    for document in [root / "README.md", root / "CHANGELOG.md", *sorted((root / "docs").rglob("*.md")), root / "tests/data/README.md"]:
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
