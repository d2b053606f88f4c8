# SPDX-License-Identifier: Apache-2.0
# tests/python/test_type_checker.py: mypy on a user's program: right calls have the types that they state, wrong ones are errors.
import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("mypy", reason="mypy is not installed")
PROGRAM = pathlib.Path(__file__).resolve().with_name("typed_program.py")
PACKAGE = pathlib.Path(__file__).resolve().parents[2] / "python"


def test_a_users_program():
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", f"--cache-dir={os.devnull}", PROGRAM]
    done = subprocess.run(command, env={**os.environ, "MYPYPATH": str(PACKAGE)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
