# SPDX-License-Identifier: Apache-2.0
# python/moe/_ffi.py: loads the extension and names its functions.
from __future__ import annotations

import pathlib

import tvm_ffi

from . import _errors

_PATH = pathlib.Path(__file__).parent / "lib" / "libmoe_python.so"
if not _PATH.exists():
    raise ImportError(f"moe: {_PATH} is missing; install the package with `pip install ./python`, from a checkout of the library")
library = tvm_ffi.load_module(str(_PATH))

#: Version of the C interface that the extension was compiled for; libmoe must have the same.
ABI_VERSION = library.abi_version()
if ABI_VERSION < 0:
    raise ImportError(f"moe: libmoe has version {-ABI_VERSION} of the C interface, another than the extension; install the package again")

forward_routed = library.forward_routed
forward = library.forward

__all__ = ["ABI_VERSION", "forward", "forward_routed", "library"]
assert _errors.ALL
