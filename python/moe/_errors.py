# SPDX-License-Identifier: Apache-2.0
# python/moe/_errors.py: the exceptions of the package, one class for each status of the library.
"""Every exception is a `moe.Error`, and a `ValueError`, `TimeoutError` or `MemoryError` where one of these says the same. The text is the
library's own: what was wrong, the value, and what was expected."""

from __future__ import annotations

import builtins
import operator

import numpy
import tvm_ffi

from . import _tvm_version  # noqa: F401 - refuses a version that lacks what follows


class Error(RuntimeError):
    """Base of all exceptions of the library. `code` is the library's name of the status, such as "E_ARG"."""

    code: str = "E_INTERNAL"


class ConfigError(Error, ValueError):
    """An impossible combination of configuration values, or an unknown name."""

    code = "E_CONFIG"


class ArgumentError(Error, ValueError):
    """A bad argument: dtype, device, shape, stride, range."""

    code = "E_ARG"


class UnsupportedError(Error):
    """Legal, but this build, device, backend or experts cannot do it."""

    code = "E_UNSUPPORTED"


class CapacityError(Error, ValueError):
    """Rows or bytes exceed a declared maximum."""

    code = "E_CAPACITY"


class StateError(Error):
    """A closed runner or group, a busy runner, an id that was used before."""

    code = "E_STATE"


class TimeoutError(Error, builtins.TimeoutError):
    """Another rank did not arrive within the deadline."""

    code = "E_TIMEOUT"


class PeerError(Error):
    """Another rank is dead, or refused this call."""

    code = "E_PEER"


class MismatchError(Error, ValueError):
    """Ranks disagree about a value that must be the same, or a library has another version than its header."""

    code = "E_MISMATCH"


class CudaError(Error):
    """A CUDA or NCCL call failed."""

    code = "E_CUDA"


class OutOfMemoryError(Error, MemoryError):
    """The host is out of memory."""

    code = "E_MEMORY"


class InternalError(Error):
    """A broken invariant of the library."""

    code = "E_INTERNAL"


ALL = (ConfigError, ArgumentError, UnsupportedError, CapacityError, StateError, TimeoutError, PeerError, MismatchError, CudaError,
       OutOfMemoryError, InternalError)  # fmt: skip


def whole_number(name: str, value: object) -> int:
    """The value as an int of at most 64 bits. ArgumentError, which names the argument, for anything else."""
    try:
        whole = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ArgumentError(f"E_ARG: {name}: is {value!r} of type {type(value).__name__}, expected a whole number") from None
    if not -(2**63) <= whole < 2**63:
        raise ArgumentError(f"E_ARG: {name}: {whole} is out of range [-2^63, 2^63)")
    return whole


def number(name: str, value: object) -> float:
    """The same of a real number, as a float."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ArgumentError(f"E_ARG: {name}: is {value!r} of type {type(value).__name__}, expected a number") from None


def named(name: str, value: object) -> str:
    """The same of a value that is a name."""
    if not isinstance(value, str):
        raise ArgumentError(f"E_ARG: {name}: is of type {type(value).__name__}, expected a name")
    return value


def flag(name: str, value: object) -> int:
    """The same of True or False; whole numbers are taken too."""
    if isinstance(value, (bool, numpy.bool_)):
        return int(value)
    if not hasattr(value, "__index__"):
        raise ArgumentError(f"E_ARG: {name}: is {value!r} of type {type(value).__name__}, expected True or False")
    return whole_number(name, value)


def milliseconds(timeout: object) -> int:
    """Of a deadline in seconds."""
    seconds = number("timeout", timeout)
    if not 0 <= seconds <= 1e6:
        raise ArgumentError(f"E_ARG: timeout: {seconds} is out of range [0, 1e6] seconds")
    return int(seconds * 1000)


# The extension raises the kind "moe.MOE_<code>".
for _class in ALL:
    tvm_ffi.register_error("moe.MOE_" + _class.code, _class)
