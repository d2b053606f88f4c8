# SPDX-License-Identifier: Apache-2.0
# python/moe/__init__.py: mixture-of-experts layers on the host and on Hopper GPUs, for torch, numpy, JAX and CuPy arrays.
"""Mixture-of-experts layers from Python.

* `experts`: the experts of a layer, in one call, on arrays as they are.
* `Runner`, `Group`: a layer with its memory, also over several ranks.
* `route`, `quantize`, `plan`: routing, weights of fewer bits, placement of experts.
* `moe.transformers`: a transformers model on this library, by `experts_implementation="moe"`.
"""

from ._errors import (
    ArgumentError,
    CapacityError,
    ConfigError,
    CudaError,
    Error,
    InternalError,
    MismatchError,
    OutOfMemoryError,
    PeerError,
    StateError,
    TimeoutError,
    UnsupportedError,
)
from ._errors import named as _named
from ._experts import clear_cache, experts
from ._ffi import library as _library
from ._host import Plan, Quantized, Routing, nvfp4_scales, plan, quantize, route
from ._runner import Group, Runner, torch as _torch_module
from ._types import Array, Communicator, RunnerInfo

if _torch_module is not None:
    from . import _torch as _torch_operators  # noqa: F401 - registers the operators

__version__: str = str(_library.version())


def has(feature: str) -> bool:
    """Whether the library was built with "cuda", "nccl", "mpi" or "onednn". It does not check for a GPU."""
    return bool(_library.has(_named("feature", feature)))


__all__ = [
    "ArgumentError", "Array", "CapacityError", "Communicator", "ConfigError", "CudaError", "Error", "Group", "InternalError",
    "MismatchError", "OutOfMemoryError", "PeerError", "Plan", "Quantized", "Routing", "Runner", "RunnerInfo", "StateError", "TimeoutError",
    "UnsupportedError", "clear_cache", "experts", "has", "nvfp4_scales", "plan", "quantize", "route",
]  # fmt: skip
