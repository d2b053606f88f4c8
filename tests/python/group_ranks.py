# SPDX-License-Identifier: Apache-2.0
# tests/python/group_ranks.py: one rank of a group, started by test_groups.py: every backend beside the definition; bad input of one rank.
"""group_ranks.py mpi, by mpirun; or group_ranks.py nccl RANK SIZE FILE, where rank 0 writes the group's id into FILE."""
import ctypes
import ctypes.util
import os
import pathlib
import sys
import time

import numpy as np

BACKENDS = ("all_to_all_v", "low_latency", "high_throughput")
EXPERTS = 9  # 2 ranks: they do not divide


class World:
    """MPI_COMM_WORLD as mpi4py would give it, for a machine without mpi4py."""

    def __init__(self) -> None:
        self.mpi = ctypes.CDLL("libmpi.so.40", mode=ctypes.RTLD_GLOBAL)
        provided = ctypes.c_int()
        assert self.mpi.MPI_Init_thread(None, None, 3, ctypes.byref(provided)) == 0

    def py2f(self) -> int:
        self.mpi.MPI_Comm_c2f.argtypes = [ctypes.c_void_p]
        return self.mpi.MPI_Comm_c2f(ctypes.addressof(ctypes.c_char.in_dll(self.mpi, "ompi_mpi_comm_world")))

    def end(self) -> None:
        self.mpi.MPI_Finalize()


def share(rank: int, size: int) -> slice:
    """The experts of a rank in a linear placement."""
    first = EXPERTS // size * rank + min(rank, EXPERTS % size)
    return slice(first, first + EXPERTS // size + (rank < EXPERTS % size))


def check(group, to_device, to_host, bound: float) -> None:
    import moe
    from reference import Layer, distance

    rank, size = group.rank, group.size
    for backend in BACKENDS:
        layer = Layer(rows=1, hidden=256, intermediate=128, num_experts=EXPERTS, topk=3, seed=1)  # every rank has these weights
        mine = Layer(rows=8 + rank, hidden=256, intermediate=128, num_experts=EXPERTS, topk=3, seed=10 + rank)
        layer.ids, layer.weights = mine.ids, mine.weights
        layer.ids[0, 1] = -1
        hidden, w13, w2 = (to_device(array) for array in (mine.hidden, layer.w13, layer.w2))
        layer.hidden, layer.w13, layer.w2 = (to_host(array) for array in (hidden, w13, w2))  # as they were rounded
        expected = layer.expected()
        local = share(rank, size)
        with moe.Runner(w13[local], w2[local], topk=3, max_tokens=16, num_experts=EXPERTS, backend=backend, group=group) as runner:
            assert runner.info["backend"] == backend and runner.info["num_local_experts"] == local.stop - local.start
            ids, weights = to_device(layer.ids), to_device(layer.weights, exact=True)
            for _ in range(3):
                output = to_host(runner.forward_routed(hidden, ids, weights))
                runner.wait()
                assert distance(output, expected) < bound, (backend, distance(output, expected))
            # The last rank's ids have a dtype that is refused: it gets ArgumentError, the others PeerError, before the deadline.
            bad = layer.ids.astype(np.float32) if rank == size - 1 else layer.ids
            wanted = moe.ArgumentError if rank == size - 1 else moe.PeerError
            try:
                runner.forward_routed(hidden, to_device(bad, exact=True), weights)
                runner.wait()
            except moe.Error as error:
                assert isinstance(error, wanted), (backend, rank, repr(error))
            else:
                raise AssertionError(f"{backend}: rank {rank} was not refused")


def over_mpi() -> None:
    world = World()
    import moe

    group = moe.Group.mpi(world, timeout=100)
    check(group, lambda array, exact=False: array, lambda array: np.asarray(array), 1e-5)
    try:
        moe.Group.mpi("no communicator")
    except moe.ArgumentError as error:
        assert "communicator" in str(error)
    rank, size = group.rank, group.size
    group.close()
    again = moe.Group.mpi(timeout=100)  # MPI_COMM_WORLD
    assert (again.rank, again.size) == (rank, size)
    again.close()
    world.end()
    print(f"rank {rank} of {size}: good")


def over_nccl(rank: int, size: int, path: pathlib.Path) -> None:
    import torch

    import moe

    torch.cuda.set_device(rank)
    if rank == 0:
        path.with_suffix(".part").write_bytes(moe.Group.nccl_id())
        os.replace(path.with_suffix(".part"), path)
    limit = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < limit, "no id after 60 s"
        time.sleep(0.01)
    number = path.read_bytes()
    group = moe.Group.nccl(number, rank, size, timeout=60)
    assert (group.rank, group.size) == (rank, size)

    def to_device(array, exact=False):
        tensor = torch.from_numpy(array).cuda()
        return tensor if exact or tensor.dtype != torch.float32 else tensor.bfloat16()

    check(group, to_device, lambda tensor: tensor.float().cpu().numpy(), 1.5e-2)
    try:
        moe.Group.nccl(number, rank, size)
    except moe.StateError as error:
        assert "used it for a group before" in str(error)
    else:
        raise AssertionError("an id served for two groups")
    group.close()
    print(f"rank {rank} of {size}: good")


if __name__ == "__main__":
    if sys.argv[1] == "mpi":
        over_mpi()
    else:
        over_nccl(int(sys.argv[2]), int(sys.argv[3]), pathlib.Path(sys.argv[4]))
