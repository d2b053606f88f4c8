# SPDX-License-Identifier: Apache-2.0
# bench/compare_library.py: this library as candidates of bench/compare.py, through bench/hopper_capi.cu as a shared object.
import ctypes

import torch
from compare_layers import Candidate, Unavailable, quantize_groups, quantize_int8
from compare_table import OURS, OURS_FP8, OURS_W8A16

SCHEMES = {"bf16": 0, "fp8": 2, "int8": 4}  # of moe_hopper_create
LIMITLESS = float("inf")


class Packed(ctypes.Structure):
    """moe_hopper_packed."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("w13", "w2", "w13_scales", "w2_scales", "b13", "b2")]
    _fields_ += [("w13_group", ctypes.c_int32), ("w2_group", ctypes.c_int32)]
    _fields_ += [(name, ctypes.c_float) for name in ("alpha", "beta", "limit")]


class Library:
    """bench/hopper_capi.cu."""

    def __init__(self, path):
        lib = ctypes.CDLL(path)
        pointer = ctypes.c_void_p
        lib.moe_hopper_create.restype = lib.moe_hopper_create_packed.restype = pointer
        lib.moe_hopper_create.argtypes = [ctypes.c_int] * 5 + [pointer] * 4
        lib.moe_hopper_create_packed.argtypes = [ctypes.c_char_p] + [ctypes.c_int] * 4 + [ctypes.POINTER(Packed)]
        lib.moe_hopper_workspace_bytes.restype = ctypes.c_longlong
        lib.moe_hopper_workspace_bytes.argtypes = [pointer, ctypes.c_int]
        lib.moe_hopper_forward.argtypes = [pointer] * 3 + [ctypes.c_longlong] + [pointer] * 2 + [ctypes.c_int] + [pointer] * 3
        lib.moe_hopper_destroy.argtypes = [pointer]
        lib.moe_hopper_destroy.restype = None
        lib.moe_hopper_read.argtypes = [pointer, ctypes.c_longlong, pointer, pointer]
        self.lib = lib
        self.sink = None

    def read(self, tensor):
        """Enqueues one read of a tensor."""
        if self.sink is None:
            self.sink = torch.zeros(1, device=tensor.device, dtype=torch.int32)
        stream = torch.cuda.current_stream().cuda_stream
        if self.lib.moe_hopper_read(tensor.data_ptr(), tensor.numel() * tensor.element_size(), self.sink.data_ptr(), stream) != 0:
            raise RuntimeError("moe_hopper_read failed")


def address(tensor):
    return None if tensor is None else tensor.data_ptr()


class Ours(Candidate):
    """The layer of one scheme: of moe_hopper_create, or by its name of moe_hopper_create_packed."""

    def __init__(self, capi, name, dtype, activations, scheme=None):
        self.capi, self.name, self.dtypes, self.scheme = capi, name, (dtype,), scheme
        self._activations = activations

    def activations(self, dtype):
        return self._activations

    def prepare(self, layer):
        sizes = (layer.experts, layer.hidden, layer.inter, layer.topk)
        lib, kept = self.capi.lib, []
        if self.scheme is None:
            scales = (None, None) if layer.dtype == "bf16" else (layer.s13.data_ptr(), layer.s2.data_ptr())
            handle = lib.moe_hopper_create(SCHEMES[layer.dtype], *sizes, layer.w13.data_ptr(), layer.w2.data_ptr(), *scales)
        else:
            kept = [layer.stored_scales("w13"), layer.stored_scales("w2"), layer.b13, layer.b2]
            act = layer.activation
            weights = Packed(layer.w13.data_ptr(), layer.w2.data_ptr(), *map(address, kept), layer.group("w13"), layer.group("w2"),
                             act.alpha, act.beta, LIMITLESS if act.limit is None else act.limit)  # fmt: skip
            handle = lib.moe_hopper_create_packed(self.scheme.encode(), *sizes, ctypes.byref(weights))
        if not handle:
            raise Unavailable("the layer was refused, see above")
        return Handle(lib, handle, kept)

    def rows(self, batch):
        """Rows and scales as the dispatch delivers them: quantised before the timed region for the types that have quantised rows."""
        if self._activations == "int8":
            return quantize_int8(batch.x)
        if self._activations == "fp8" and self.scheme is not None:
            return quantize_groups(batch.x)
        return batch.x, None

    def call(self, prepared, layer, batch):
        rows, scales = self.rows(batch)
        workspace = prepared.workspace(batch.x.shape[0])
        stride = scales.shape[-1] if scales is not None and scales.ndim == 2 else 0

        def run():
            status = prepared.lib.moe_hopper_forward(
                *(prepared.handle, rows.data_ptr(), address(scales), stride, batch.ids.data_ptr(), batch.weights.data_ptr()),
                *(batch.x.shape[0], batch.out.data_ptr(), workspace.data_ptr(), torch.cuda.current_stream().cuda_stream),
            )
            if status != 0:
                raise RuntimeError("moe_hopper_forward failed, see above")
            return batch.out

        return run


class Handle:
    """A layer of the C interface and the memory that it borrows; one workspace, which grows, since its calls follow one another."""

    def __init__(self, lib, handle, kept):
        self.lib, self.handle, self.kept, self.memory = lib, handle, kept, {}

    def workspace(self, tokens):
        """Poisoned, 1024-byte aligned."""
        if tokens not in self.memory:
            size = self.lib.moe_hopper_workspace_bytes(self.handle, tokens) + 1024
            memory = torch.full((size,), 255, device="cuda", dtype=torch.uint8)
            self.memory = {tokens: memory[(-memory.data_ptr()) % 1024 :]}
        return self.memory[tokens]

    def close(self):
        if self.handle:
            self.lib.moe_hopper_destroy(self.handle)
        self.handle = None


def candidates(library, dtype):
    """This library's layers for one element type of the weights."""
    if dtype in SCHEMES:
        found = [Ours(library, OURS, dtype, dtype)]
        if dtype == "int8":
            found.append(Ours(library, OURS_W8A16, dtype, "bf16", "int8"))
        return found
    found = [Ours(library, OURS, dtype, "bf16", dtype)]
    if dtype.startswith(("mxfp4", "int4")):
        found.append(Ours(library, OURS_FP8, dtype, "fp8", f"{dtype}_fp8"))
    return found
