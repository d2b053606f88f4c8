#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every tracked Python file parses, and every name in it is defined and used: a mistake in a test that needs GPUs is seen without one.
Skipped (77) where scripts/setup could not install ruff, whose rules F and E9 these are."""
import argparse
import pathlib
import subprocess
import sys


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", required=True, type=pathlib.Path)
    parser.add_argument("--ruff", required=True, type=pathlib.Path)
    options = parser.parse_args()
    if not options.ruff.exists():
        print(f"skipped: no {options.ruff}; scripts/setup installs it")
        return 77
    listed = subprocess.run(["git", "-C", options.root, "ls-files", "-z", "*.py"], capture_output=True, text=True, check=False)
    names = [name for name in listed.stdout.split("\0") if name and (options.root / name).exists()]
    if listed.returncode != 0:  # no checkout: an unpacked archive
        names = [str(path.relative_to(options.root)) for folder in ("python", "tests", "bench", "examples", "scripts")
                 for path in (options.root / folder).rglob("*.py")]
    assert names, f"no Python file in {options.root}"
    done = subprocess.run([options.ruff.absolute(), "check", "--isolated", "--no-cache", "--quiet", "--select", "F,E9", *names],
                          cwd=options.root, check=False)
    print(f"{len(names)} files")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
