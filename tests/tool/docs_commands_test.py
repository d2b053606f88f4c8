#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the commands that README.md and docs/*.md show for a built tree, as a reader would type them, and demands exit code 0. Indented
code of these pages is shell. Commands that build or install are run elsewhere, as ELSEWHERE says: scripts/test --all runs
as_printed.py."""
import os
import pathlib
import subprocess
import sys
import tempfile

from page_commands import commands
from tool import ENVIRONMENT, TOOL

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
BUILD = pathlib.Path(TOOL).resolve().parent.parent
# What a command starts with, and what runs it.
ELSEWHERE = {
    "scripts/": "CI itself (scripts/test, scripts/setup); as_printed.py (scripts/run); scripts/gpu by hand",
    "cmake --preset host": "CI: the build",
    "cmake --preset release": "as_printed.py",
    "cmake --build --preset": "CI: the build",
    "g++ -std=c++20 -fsyntax-only": "the build compiles the same files",
    "cc experts.c": "install.package (docs_blocks.py), as_printed.py",
    "pip install ./python": "as_printed.py",
    "build/host/tests/fuzz/<name>_fuzz": "fuzz.*",
    "mpirun -n 4 build/gpu/examples/example_expert_parallel_cuda": "example.expert_parallel_cuda.np4, with GPUs",
    "mpirun -n 4 build/gpu/examples/example_deepseek_block_cuda": "example.deepseek_block_cuda.np4, with GPUs",
    "mpirun -n 4 build/gpu/examples/example_data_parallel_decode_cuda": "example.data_parallel_decode_cuda.np4, with GPUs",
}


def run(command: str, folder: str) -> str | None:
    """The problem with a command, run by a shell in a folder that holds the source tree's tests/ and this build as build/host."""
    done = subprocess.run(["bash", "-ec", command], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)
    return None if done.returncode == 0 else f"exit code {done.returncode}: {done.stdout[-1000:]}{done.stderr[-2000:]}"


def main() -> int:
    failed, ran, unused = 0, 0, set(ELSEWHERE)
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for command in commands(page):
            elsewhere = {start for start in ELSEWHERE if command.startswith(start)}
            unused -= elsewhere
            if elsewhere:
                continue
            with tempfile.TemporaryDirectory(prefix="moe-docs-") as folder:
                os.symlink(ROOT / "tests", f"{folder}/tests")
                os.mkdir(f"{folder}/build")
                os.symlink(BUILD, f"{folder}/build/host")
                problem = run(command, folder)
            ran += 1
            if problem:
                failed += 1
                print(f"FAILED: {page.relative_to(ROOT)}: {command}\n{problem}")
    for start in sorted(unused):
        print(f"FAILED: no page has a command that starts with {start}")
    print(f"{ran} commands, {failed} failed")
    return 1 if failed or unused or not ran else 0


if __name__ == "__main__":
    sys.exit(main())
