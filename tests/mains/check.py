#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the program of tests/mains/cases.cpp (its command is the arguments) with several filters and compares the exit codes."""
import subprocess
import sys

command = sys.argv[1:]
ranks = int(command[command.index("-n") + 1]) if "-n" in command else 1
CASES = (  # filter, exit code of one rank, of two
    ("Skips.*", 77, 77),
    ("Skips.One", 77, 77),
    ("Skips.*:Passes.*", 0, 0),
    ("Passes.*", 0, 0),
    ("Fails.*", 1, 1),
    ("Skips.*:Fails.*", 1, 1),
    ("SkipsOnRank0.*", 77, 0),
    ("Skips.*:FailsOnRank1.*", 0, 1),
    ("None.*", 1, 1),
)
failures = 0
for names, alone, together in CASES:
    want = alone if ranks == 1 else together
    run = subprocess.run([*command, f"--gtest_filter={names}"], capture_output=True, text=True, check=False)
    if run.returncode != want or (want == 77 and "skipped: all" not in run.stdout):
        failures += 1
        print(f"FAILED: {names} on {ranks} ranks: exit code {run.returncode}, expected {want}\n{run.stdout}{run.stderr}")
print(f"{len(CASES)} filters, {failures} failures")
sys.exit(1 if failures else 0)
