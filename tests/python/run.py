#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# tests/python/run.py: runs one test file by pytest; exits with 77, and says why, if all of its cases were skipped.
import sys

import pytest


class Outcome:
    def __init__(self) -> None:
        self.ran = 0
        self.reasons: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.ran += report.when == "call" and not report.skipped
        self._skip(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._skip(report)

    def _skip(self, report: object) -> None:
        if report.skipped:
            self.reasons.add(report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr))


outcome = Outcome()
code = pytest.main(["-q", "-rs", "-p", "no:cacheprovider", *sys.argv[1:]], plugins=[outcome])
if outcome.ran == 0 and outcome.reasons and code in (0, 5):
    print("skipped:", "; ".join(sorted(outcome.reasons)))
    sys.exit(77)
sys.exit(int(code))
