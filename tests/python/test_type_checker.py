# SPDX-License-Identifier: Apache-2.0
# tests/python/test_type_checker.py: mypy on a user's program: right calls have the types that they state, wrong ones are errors.
import importlib.metadata
import os
import pathlib
import subprocess
import sys

import pytest

try:
    importlib.metadata.version("mypy")  # pip writes it last: without it an installation was interrupted
except importlib.metadata.PackageNotFoundError:
    pytest.skip("mypy is not installed", allow_module_level=True)
PROGRAM = pathlib.Path(__file__).resolve().with_name("typed_program.py")
PACKAGE = pathlib.Path(__file__).resolve().parents[2] / "python"


def test_a_users_program():
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", f"--cache-dir={os.devnull}", PROGRAM]
    done = subprocess.run(command, env={**os.environ, "MYPYPATH": str(PACKAGE)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
