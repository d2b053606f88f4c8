# SPDX-License-Identifier: Apache-2.0
# python/moe/_arrays.py: arrays of torch, numpy, JAX and CuPy: what they are, new ones of the same framework, their current stream.
"""All arrays reach the library by DLPack, without a copy. What differs between frameworks stands here."""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any, Sequence

import numpy
import tvm_ffi

from . import _watched
from ._errors import ArgumentError, Error, UnsupportedError
from ._ffi import library

#: DLPack's code and bits of the element types that numpy knows only through ml_dtypes and cannot export.
_EXTENSION_DTYPES = {"bfloat16": (4, 16), "float8_e4m3fn": (10, 8), "float8_e8m0fnu": (14, 8)}
#: Stands for the stream that torch has made current for the array's device; the extension's calls say which it was.
CURRENT_STREAM = -1
#: dtypes of expert ids that an int32 holds. The library takes int32 and int64, and refuses what is left.
NARROW_IDS = ("int8", "uint8", "int16", "uint16")
NDARRAY = numpy.ndarray
_DENSE = "expected a dense tensor with memory on the host or a GPU"
_FLOAT32, _FLOAT16, _INT32, _INT64 = (numpy.dtype(name) for name in ("float32", "float16", "int32", "int64"))


@functools.lru_cache(maxsize=256)  # numpy composes a dtype's name anew each time, in 2 us
def _name(dtype: Any) -> str:
    return str(dtype).rpartition(".")[2]


@functools.lru_cache(maxsize=256)
def _extension_of(dtype: Any) -> tuple[int, int] | tuple[()] | None:
    """Of a numpy dtype: None if numpy exports it, DLPack's code and bits if the extension does, () if none can."""
    if dtype.name in _EXTENSION_DTYPES:
        return _EXTENSION_DTYPES[dtype.name]
    return None if dtype.kind in "biuf" and dtype.isnative and dtype.itemsize <= 8 else ()


def framework(array: Any, name: str = "array") -> str:
    """ "torch", "numpy", "jax", "cupy", or "dlpack" for any other object with `__dlpack__`. name: of the argument, for errors."""
    root = type(array).__module__.partition(".")[0]
    if root in ("torch", "numpy", "cupy"):
        return root
    if root in ("jax", "jaxlib"):
        return "jax"
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return "torch"
    if hasattr(array, "__dlpack__"):
        return "dlpack"
    raise ArgumentError(
        f"E_ARG: {name}: is of type {type(array).__name__}, expected an array (torch, numpy, JAX, CuPy or any with __dlpack__)"
    )


def check(name: str, array: Any, *dimensions: int) -> None:
    """ArgumentError, which names the argument, if `array` is not an array, is a numpy array of objects or complex numbers, or has another
    number of dimensions than these. UnsupportedError for what JAX or torch traces, which has no values."""
    kind = framework(array, name)
    if kind == "jax" and isinstance(array, sys.modules["jax"].core.Tracer):
        raise UnsupportedError(f"E_UNSUPPORTED: {name}: is traced by JAX (jit, vmap, grad), and the library needs its values: call outside")
    if kind == "torch" and _watched.is_traced(array):
        by = "traced or transformed by torch (jit.trace, make_fx, torch.func, forward-mode AD)"
        raise UnsupportedError(f"E_UNSUPPORTED: {name}: is {by}, and the library needs its values: call outside")
    if kind == "numpy" and array.dtype.kind in "cOSUMm":
        raise ArgumentError(f"E_ARG: {name}: dtype is {array.dtype}, expected real numbers")
    count = getattr(array, "ndim", None)
    count = len(array.shape) if count is None else count
    if count not in dimensions:
        raise ArgumentError(f"E_ARG: {name}: {count} dimensions {tuple(array.shape)}, expected {' or '.join(map(str, dimensions))}")


def go_as_they_are(hidden: Any, ids: Any, weights: Any, output: Any) -> bool:
    """Whether these are arrays of numpy for which `check`, `cast`, `export` and `export_output` have nothing to do; output may be None."""
    if not (NDARRAY is hidden.__class__ is ids.__class__ is weights.__class__ and hidden.ndim == ids.ndim == weights.ndim == 2):
        return False
    dtype, of_ids = hidden.dtype, ids.dtype
    if not ((dtype is _FLOAT32 or dtype is _FLOAT16) and (of_ids is _INT32 or of_ids is _INT64) and weights.dtype is _FLOAT32):
        return False
    if output is not None and not (output.__class__ is NDARRAY and output.dtype is dtype and output.flags.writeable):
        return False
    return hidden.flags.writeable and ids.flags.writeable and weights.flags.writeable  # numpy exports read-only ones by another call


def real(name: str, array: Any) -> Any:
    """The tensor of torch, unless its numbers are complex."""
    if array.dtype.is_complex:
        raise ArgumentError(f"E_ARG: {name}: dtype is {_name(array.dtype)}, expected real numbers")
    return array


def explained(error: Exception, **tensors: Any) -> Exception:
    """What an exception of a call becomes: itself if it is the library's; of torch, which refuses to hand a tensor over, an ArgumentError
    that names the tensor and what it is."""
    if isinstance(error, Error):
        return error
    for name, tensor in tensors.items():
        if tensor is not None and framework(tensor) == "torch":
            what = _no_memory(tensor)
            if what:
                return ArgumentError(f"E_ARG: {name}: is {what}, {_DENSE}")
    return error


def _no_memory(tensor: Any) -> str:
    """What makes a tensor of torch one that has no plain memory; empty for one that has."""
    import torch

    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout is not torch.strided:
        return f"of layout {_name(tensor.layout)}"
    if tensor.is_quantized:
        return f"a quantised tensor of torch, {_name(tensor.dtype)}"
    if tensor.device.type not in ("cpu", "cuda"):
        return f"on {tensor.device}"
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"of type {type(tensor).__name__}"
    return ""


def _is_read_only(array: Any) -> bool:
    """What an object says by DLPack 1.0; False where it exports only older capsules."""
    try:
        capsule = array.__dlpack__(max_version=(1, 0))
    except TypeError:
        return False
    name = b"dltensor_versioned"
    if not ctypes.pythonapi.PyCapsule_IsValid(ctypes.py_object(capsule), name):
        return False
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    # DLManagedTensorVersioned: two numbers of 32 bits, two pointers, then the flags, whose first bit says read-only.
    return bool(ctypes.c_uint64.from_address(pointer(capsule, name) + 8 + 2 * ctypes.sizeof(ctypes.c_void_p)).value & 1)


def export(array: Any, name: str = "array") -> Any:
    """The array as an argument of the extension. Inputs of the library are never written, so read-only ones are accepted."""
    kind = framework(array, name)
    if kind == "torch":
        what = _no_memory(array)
        if what and type(array).__module__.partition(".")[0] == "torch":
            raise ArgumentError(f"E_ARG: {name}: is {what}, {_DENSE}")
        if array.is_neg():  # DLPack does not say so
            raise ArgumentError(f"E_ARG: {name}: is a view with the opposite sign of its memory, expected a plain tensor (resolve_neg())")
        return array.detach() if array.requires_grad else array
    if kind == "numpy":
        extension = _extension_of(array.dtype)
        if extension == ():
            expected = "expected real numbers of at most 64 bits in this machine's byte order"
            raise ArgumentError(f"E_ARG: {name}: dtype is {array.dtype}, {expected}")
        if extension is not None:
            return library.reinterpret(export(array.view(numpy.uint16 if extension[1] == 16 else numpy.uint8), name), *extension)
        if not array.flags.writeable:
            return tvm_ffi.from_dlpack(array.__dlpack__(max_version=(1, 0)))
        return array
    if kind == "jax":
        array.block_until_ready()
    if kind == "jax" or kind == "dlpack":
        return tvm_ffi.from_dlpack(array)
    return array


def export_output(array: Any, name: str = "output") -> Any:
    """As `export`, of an array that the library writes to: ArgumentError for one that must not be written."""
    kind = framework(array, name)
    if kind == "jax":
        raise ArgumentError(f"E_ARG: {name}: is an array of JAX, which never change; leave it out and take the array that the call returns")
    if (kind == "numpy" and not array.flags.writeable) or (kind == "dlpack" and _is_read_only(array)):
        raise ArgumentError(f"E_ARG: {name}: is read-only, expected an array that can be written to")
    return export(array, name)


def stream(kind: str) -> tuple[int, Any]:
    """The stream on which a call with an array of that framework runs, the one that is current there, and what keeps it alive."""
    if kind == "cupy":
        import cupy

        current = cupy.cuda.get_current_stream()
        return int(current.ptr), current
    if kind == "torch":
        return CURRENT_STREAM, None
    # JAX has no current stream: its arrays are waited for before, and the answer after. Others are ready on the default one, by DLPack.
    return 0, None


def dtype_name(array: Any) -> str:
    """ "float32", "bfloat16", ...: the same names in every framework."""
    return _name(array.dtype)


def empty(like: Any, shape: Sequence[int], dtype: str | None = None) -> Any:
    """An uninitialised array of the framework and device of `like`; dtype: of `like` unless named."""
    kind = framework(like)
    if kind == "torch":
        import torch

        return torch.empty(tuple(shape), dtype=like.dtype if dtype is None else getattr(torch, dtype), device=like.device)
    if kind == "cupy":
        import cupy

        return cupy.empty(tuple(shape), dtype=like.dtype if dtype is None else dtype)
    if kind == "jax" and next(iter(like.devices())).platform != "cpu":
        import jax
        import jax.numpy

        with jax.default_device(next(iter(like.devices()))):
            return jax.numpy.empty(tuple(shape), dtype=like.dtype if dtype is None else dtype).block_until_ready()
    if kind == "dlpack" and like.__dlpack_device__()[0] != 1:
        raise ArgumentError(f"E_ARG: {type(like).__name__} on a device: an output array of this framework must be given")
    return numpy.empty(tuple(shape), dtype=like.dtype if dtype is None and kind != "dlpack" else (dtype or dtype_name(like)))


def cast(array: Any, dtype: str) -> Any:
    """The array with that dtype: itself if it has it already."""
    if dtype_name(array) == dtype:
        return array
    if framework(array) == "torch":
        import torch

        return array.detach().to(getattr(torch, dtype))
    return array.astype(dtype)


def finish(array: Any, like: Any) -> Any:
    """A new array, now written, as one of the framework of `like`. JAX does not order its work after the stream, so
    this waits for the stream first."""
    if framework(like) != "jax":
        return array
    import jax

    device = next(iter(like.devices()))
    if device.platform == "cpu":
        return jax.device_put(array, device)
    library.stream_wait(device.local_hardware_id, 0, 0)
    return array
