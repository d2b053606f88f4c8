# SPDX-License-Identifier: Apache-2.0
# tests/python/test_docs.py: runs every Python block of docs/python.md as a program of its own.
import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest

import moe

TEXT = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "python.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def test_there_are_blocks():
    assert len(BLOCKS) >= 4


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_block(block, tmp_path):
    if not moe.has("onednn"):
        pytest.skip("libmoe was built without oneDNN, so that no experts run on the host")
    needs = re.match(r"# needs: (.*)", block)
    for name in needs.group(1).split(", ") if needs else ():
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    done = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
