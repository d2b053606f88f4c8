# SPDX-License-Identifier: Apache-2.0
# tests/python/test_oldest_tvm_ffi.py: the same extension on the oldest apache-tvm-ffi that the package allows, which engines pin.
# scripts/setup puts it into .deps/tvm_ffi_oldest. The other tests run on the present version.
import os
import pathlib
import re
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
OLDEST = HERE.parents[1] / ".deps" / "tvm_ffi_oldest"
if not (OLDEST / "tvm_ffi").is_dir():
    pytest.skip(f"{OLDEST} is missing; run scripts/setup", allow_module_level=True)
if not os.environ.get("PYTHONPATH"):
    pytest.skip("PYTHONPATH does not name the package", allow_module_level=True)
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{OLDEST}{os.pathsep}{os.environ['PYTHONPATH']}"}


def test_it_is_the_oldest_that_the_package_allows():
    (allowed,) = set(re.findall(r"apache-tvm-ffi>=([0-9.]+),", (HERE.parents[1] / "python" / "pyproject.toml").read_text(encoding="utf-8")))
    program = "import tvm_ffi; print(tvm_ffi.__version__)"
    found = subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True, check=True).stdout.strip()
    assert found == allowed


def test_the_tests_of_the_package_on_it():
    """In one process: an import of torch takes seconds."""
    files = [HERE / name for name in ("test_extension.py", "test_numpy.py", "test_groups.py", "test_torch.py")]
    done = subprocess.run([sys.executable, HERE / "run.py", *files], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip(done.stdout.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
