# SPDX-License-Identifier: Apache-2.0
# tests/tool/expectations.py: what a test expects: each failure is printed and counted, and the test goes on.
import sys

failures = 0


def expect(ok, what):
    global failures
    if not ok:
        failures += 1
        print(f"FAILED: {what}")


def finish():
    """Prints the number of failures and ends the program: exit code 1 if there are any."""
    print(f"{failures} failed")
    sys.exit(1 if failures else 0)
