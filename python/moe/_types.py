# SPDX-License-Identifier: Apache-2.0
# python/moe/_types.py: the types of the package's arguments and answers.
from __future__ import annotations

from typing import Any, Protocol, Sequence, TypedDict, TypeVar, runtime_checkable


@runtime_checkable
class Array(Protocol):
    """An array of torch, numpy, JAX, CuPy, or any other with DLPack's two methods."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> Any: ...
    def __dlpack__(self, *, stream: Any = ...) -> Any: ...
    def __dlpack_device__(self) -> tuple[Any, int]: ...


#: An array whose type the answer has, too.
ArrayT = TypeVar("ArrayT", bound=Array)


@runtime_checkable
class Communicator(Protocol):
    """A communicator of MPI: one of mpi4py, or any object with its method py2f()."""

    def py2f(self) -> int: ...


class RunnerInfo(TypedDict):
    """What `Runner.info` says. bytes and window_bytes: memory of the runner, and of its part of a window."""

    device_type: int
    device_id: int
    rank: int
    size: int
    num_local_experts: int
    weights_packed: bool
    bytes: int
    window_bytes: int
    dtype: str
    quantization: str
    backend: str
    experts: str
