# SPDX-License-Identifier: Apache-2.0
# tests/python/test_groups.py: groups of several ranks over MPI and NCCL, each rank a process (group_ranks.py).
import ctypes
import pathlib
import shutil
import sys

import pytest

import moe

from processes import finish, start

PROGRAM = str(pathlib.Path(__file__).with_name("group_ranks.py"))
SECONDS = 240


def test_ranks_over_mpi():
    if not moe.has("mpi") or not moe.has("onednn"):
        pytest.skip("libmoe was built without MPI or oneDNN")
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed")
    try:
        ctypes.CDLL("libmpi.so.40")
    except OSError:
        pytest.skip("the MPI of this machine is no Open MPI, whose symbols group_ranks.py uses")
    command = ("mpirun", "--oversubscribe", "--bind-to", "none", "-n", 2, sys.executable, PROGRAM, "mpi")
    output = finish([start(*command)], SECONDS)
    assert output.count(": good") == 2, output


@pytest.mark.parametrize("size", [1, 2])
def test_ranks_over_nccl(size, tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not moe.has("nccl") or torch.cuda.device_count() < size:
        pytest.skip(f"needs a libmoe with NCCL and {size} GPUs")
    ranks = [start(sys.executable, PROGRAM, "nccl", rank, size, tmp_path / "id") for rank in range(size)]
    assert finish(ranks, SECONDS).count(": good") == size


def test_arguments_of_a_group():
    with pytest.raises(moe.ArgumentError, match="id: 5 bytes, expected 128"):
        moe.Group.nccl(b"12345", 0, 1)
    with pytest.raises(moe.ArgumentError, match="rank: 2 of size 2"):
        moe.Group.nccl(bytes(128), 2, 2)
    with pytest.raises(moe.ArgumentError, match="timeout: -1.0 is out of range"):
        moe.Group.nccl(bytes(128), 0, 1, timeout=-1)
    with pytest.raises(moe.ArgumentError, match="communicator.*int"):
        moe.Group.mpi(3)
    if moe.has("mpi"):
        with pytest.raises(moe.StateError, match="MPI_Init_thread"):
            moe.Group.mpi(type("World", (), {"py2f": lambda self: 0})())
    else:
        with pytest.raises(moe.UnsupportedError, match="without MPI"):
            moe.Group.mpi(type("World", (), {"py2f": lambda self: 0})())
