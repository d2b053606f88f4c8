#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every tracked C++ and CUDA source is formatted as the pinned clang-format formats it. Skipped (77) where scripts/setup could not install
it; another version is refused, since versions differ in what they make of a line."""
import argparse
import pathlib
import re
import subprocess
import sys

SUFFIXES = {".hpp", ".cuh", ".inl", ".cpp", ".cu", ".h"}


def sources(root: pathlib.Path) -> list[str]:
    listed = subprocess.run(["git", "-C", root, "ls-files", "-z"], capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        names = [name for name in listed.stdout.split("\0") if name and (root / name).exists()]
    else:  # no checkout: an unpacked archive
        names = [str(path.relative_to(root)) for folder in ("include", "tests", "bench", "examples") for path in (root / folder).rglob("*")]
    return sorted(name for name in names if pathlib.Path(name).suffix in SUFFIXES)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", required=True, type=pathlib.Path)
    parser.add_argument("--clang-format", required=True, type=pathlib.Path)
    options = parser.parse_args()
    pinned = re.search(r"^clang_format=(\S+)", (options.root / "scripts/setup").read_text(), re.MULTILINE).group(1)
    if not options.clang_format.exists():
        print(f"skipped: no {options.clang_format}; scripts/setup installs clang-format {pinned}")
        return 77
    version = subprocess.run([options.clang_format, "--version"], capture_output=True, text=True, check=True).stdout.split()
    if pinned not in version:
        print(f"FAILED: {options.clang_format} is not version {pinned}: {' '.join(version)}")
        return 1
    names = sources(options.root)
    wrong = set()
    for start in range(0, len(names), 50):
        done = subprocess.run([options.clang_format, "--dry-run", *names[start:start + 50]], cwd=options.root, capture_output=True,
                              text=True, check=True)
        wrong |= set(re.findall(r"^(\S+?):\d+:\d+: warning: code should be clang-formatted", done.stderr, re.MULTILINE))
    for name in sorted(wrong):
        print(f"FAILED: {name}: run {options.clang_format} -i on it")
    print(f"{len(names)} files, {len(wrong)} are formatted differently")
    return 1 if wrong or not names else 0


if __name__ == "__main__":
    sys.exit(main())
