# SPDX-License-Identifier: Apache-2.0
# python/moe/transformers/_layer.py: the runner behind one experts module of a transformers model.
from __future__ import annotations

import ctypes
import dataclasses
import sys
import threading
import warnings
import weakref
from typing import Any, Callable

import torch
import torch.nn.functional as F

from .. import _errors
from .._runner import Runner, sharing_runner
from ._activation import Activation, recognise

#: Longer inputs run in pieces of this many rows; `configure` sets it.
MAX_ROWS = 4096
#: Whether a module keeps the 4-bit codes that its runner has packed; `configure` sets it.
KEEP_CODES = False
_LEAST_ROWS = 64
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}

#: Modules by key, for the custom operator that torch.compile sees.
modules: weakref.WeakValueDictionary[int, torch.nn.Module] = weakref.WeakValueDictionary()


#: Held while weights are read, laid out or freed and runners are made: two threads may run one model.
_making = threading.RLock()

#: Why a call that needs gradients falls back.
GRADIENTS = "gradients are on, and the library has none: call the model under torch.no_grad()"

#: Why a module under fully_shard falls back whose weights the library would copy: torch counts no writes of its gathers.
GATHERED = "fully_shard gathers its weights anew for each forward, and the library would keep a copy of older ones"


class FallbackWarning(UserWarning):
    """A module runs on transformers' own implementation; the text says why."""


@dataclasses.dataclass
class Weights:
    """What a module gives to a runner. `source`: the names of the module's tensors that they come from; a change of one makes a new
    runner. `frees`: those of them that nothing needs once a runner has packed them, so that the module gives their memory back.
    `biases`: reads the other arrays again from a module whose codes are freed."""

    arrays: dict[str, torch.Tensor]
    settings: dict[str, Any]
    source: tuple[str, ...]
    packs: bool  # the runner, or this adapter, copies the weights into another layout
    frees: tuple[str, ...] = ()
    biases: Callable[[Any], dict[str, torch.Tensor]] | None = None
    normalises: bool = False  # each expert's output goes through post_expert_norm before it is weighted


class Unsupported(Exception):
    """The module cannot run on the library; the text says why."""


def freed(what: str) -> _errors.StateError:
    """The error of what needs codes that are freed."""
    return _errors.StateError(
        f"E_STATE: {what}: the codes of these mxfp4 experts were freed when their runner had packed them; do this before the first "
        "forward, or call moe.transformers.configure(keep_codes=True) before it, which keeps both"
    )


class Layer:
    """Runners of one experts module, by the experts per token of a call, made at the first one. One that is too small is followed by a
    larger one and stays, since a captured CUDA graph may use it. One that packs the weights serves every number of experts per token: a
    second one would hold another copy. A copy of the module has no runners, but for one whose codes are freed: it shares the original's.
    `key` and `reason`, which torch.compile reads, stay with the module."""

    def __init__(self, module: torch.nn.Module, weights: Weights | None, reason: str | None, scope: Any = None,
                 sharded: bool = True) -> None:  # fmt: skip
        self.key: int | None = id(module)  # in `modules`; None: of a copy that has not run
        self.weights = weights
        self.source = () if weights is None else weights.source
        self.sharded = sharded
        self.scope = scope  # of the model: its layers run one after the other, and share a workspace
        self.reason = reason
        self.runners: dict[int, list[Runner]] = {}
        self.dtype = None if weights is None else weights.settings["torch_dtype"]
        self.device = None if weights is None else weights.arrays["w13"].device
        self.packed_topk: int | None = None  # experts per token of the runner that has packed the weights
        self.frees: tuple[str, ...] = ()  # what release() will free
        self.freed: tuple[str, ...] = ()  # what it has freed
        self.shared = False  # with a copy of the module
        self.normalises = weights is not None and weights.normalises
        self.observe(module)

    def observe(self, module: torch.nn.Module) -> None:
        self.state = _state(module, self.source)
        self.held = [getattr(module, name).detach() for name in self.source]  # no other tensor can have their addresses

    def __deepcopy__(self, memo: dict) -> Layer | None:
        if not self.freed:
            return None  # a copied module makes its own
        other = Layer.__new__(Layer)
        other.__dict__.update(self.__dict__, key=None, state=None, held=[])
        other.shared = self.shared = True
        return other

    def __reduce__(self) -> tuple:
        if self.freed:
            raise freed("pickle")
        return (_nothing, ())

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """In hidden's dtype. ids [M, k] of the module's experts, or -1."""
        given, topk = hidden, ids.shape[-1]
        if hidden.dtype is not self.dtype:
            hidden = hidden.to(self.dtype)
        hidden, ids, weights = hidden.contiguous(), ids.contiguous(), weights.contiguous()
        width = topk if self.packed_topk is None else self.packed_topk
        runner = self.runner(hidden.shape[0], width)
        if topk == width:
            with runner._turn:
                output = runner.forward_routed(hidden, ids, weights)
            return output if output.dtype is given.dtype else output.to(given.dtype)
        total: torch.Tensor | None = None
        for first in range(0, max(topk, 1), width):  # as many as the runner takes at a time, -1 in the places that are left
            ids_part, weights_part = ids[:, first : first + width], weights[:, first : first + width]
            missing = width - ids_part.shape[1]
            with runner._turn:
                output = runner.forward_routed(hidden, F.pad(ids_part, (0, missing), value=-1).contiguous(),
                                               F.pad(weights_part, (0, missing)).contiguous())  # fmt: skip
            total = output if total is None else total.float() + output
        assert total is not None
        return total.to(given.dtype)

    def forward_normalised(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, norm: torch.nn.Module) -> torch.Tensor:
        """As forward(), with the outputs of the experts normalised one by one: each choice is a row of its own, with weight 1, and the
        weighted sum is torch's."""
        rows, topk = ids.shape
        alone = torch.ones(rows * topk, 1, device=hidden.device)
        outputs = self.forward(hidden.repeat_interleave(topk, 0), ids.reshape(-1, 1), alone)
        return (norm(outputs).view(rows, topk, hidden.shape[-1]).float() * weights.float()[..., None]).sum(1).to(hidden.dtype)

    def width(self, topk: int) -> int:
        """Experts per token in a runner's calls for calls of the module with so many."""
        return 1 if self.normalises else topk

    def runner(self, rows: int, topk: int) -> Runner:
        last = self.last_runner(rows, topk)
        if last is not None:
            return last
        with _making:
            return self.last_runner(rows, topk) or self.another_runner(rows, topk)

    def last_runner(self, rows: int, topk: int) -> Runner | None:
        """The one that was made last, if it takes so many rows or is not to be followed by a larger one."""
        runners = self.runners.get(topk)
        last = runners[-1] if runners else None
        if last is not None and (rows <= last.max_tokens or last.max_tokens >= MAX_ROWS or last.weights_packed or _capturing(last)):
            return last
        return None

    def another_runner(self, rows: int, topk: int) -> Runner:
        assert self.weights is not None
        settings = {key: value for key, value in self.weights.settings.items() if key != "torch_dtype"}
        capacity = MAX_ROWS if self.weights.packs else min(max(_LEAST_ROWS, 1 << max(rows - 1, 0).bit_length()), MAX_ROWS)
        runner = sharing_runner(**self.weights.arrays, scope=self.scope, topk=topk, max_tokens=capacity, keep_weights=True, **settings)
        if runner.weights_packed and not self.weights.packs:  # learnt now: it will not be made twice
            self.weights.packs = True
            if capacity < MAX_ROWS:
                runner.close()
                return self.another_runner(rows, topk)
        self.runners.setdefault(topk, []).append(runner)
        if runner.weights_packed:
            self.packed_topk = topk
            self.frees = () if KEEP_CODES else self.weights.frees
        return runner

    def release(self, module: torch.nn.Module) -> None:
        """Frees the tensors that the runner has packed: shape and dtype stay, on the meta device."""
        assert self.weights is not None and self.device is not None
        if self.freed:
            return  # another thread did
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return  # a later call frees them: nothing may be freed during a capture
        self.freed, self.frees = self.frees, ()
        for name in self.freed:
            shape = torch.empty_like(getattr(module, name), device="meta")
            setattr(module, name, torch.nn.Parameter(shape, requires_grad=False))
        self.weights.arrays = {name: array for name, array in self.weights.arrays.items() if name.endswith("_bias")}
        self.observe(module)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # the runner of the next layer takes its memory from the driver, not from torch

    def after_change(self, module: torch.nn.Module) -> Layer | None:
        """Of a module whose codes are freed and whose tensors have changed, or of a copy of one: the layer that goes on. None: the module
        has codes again."""
        assert self.weights is not None and self.weights.biases is not None
        missing = [name for name in self.freed if getattr(module, name).is_meta]
        if not missing:
            return None
        if len(missing) < len(self.freed):
            raise freed(f"{', '.join(missing)} beside new {', '.join(name for name in self.freed if name not in missing)}")
        for name, array in self.weights.biases(module).items():
            held = self.weights.arrays[name]
            if torch.equal(held, array):
                continue
            if self.shared:
                raise freed(f"{name} other than that of the copy of the module which shares the runner")
            held.copy_(array)  # the runner reads it in each call
        self.key = id(module)
        modules[self.key] = module
        self.observe(module)
        return self

    def changed(self, module: torch.nn.Module) -> bool:
        """Whether the module has other weights than those that were read: replaced, moved, or written in place."""
        return _state(module, self.source) != self.state

    def serves(self, module: torch.nn.Module, topk: int) -> bool:
        """Whether a call of so many experts per token needs nothing new: no other weights, no runner."""
        if self.changed(module):
            return False
        return self.reason is not None or self.width(topk) in self.runners or self.packed_topk is not None

    def needs_gradients(self, module: torch.nn.Module) -> bool:
        norm = list(module.post_expert_norm.parameters()) if self.normalises else []  # type: ignore[operator, union-attr]
        return any([tensor.requires_grad for tensor in (*[getattr(module, name) for name in self.source], *norm)])


def _nothing() -> None:
    return None


def _capturing(runner: Runner) -> bool:
    return runner.info["device_type"] == 2 and torch.cuda.is_current_stream_capturing()


def _state(module: torch.nn.Module, names: tuple[str, ...]) -> list[tuple[int, int]]:
    """Where the module's tensors lie and how often they were written. The tensor objects are not compared: a rank of a tensor-parallel
    model makes the local tensor of a DTensor anew for each forward."""
    tensors = [getattr(module, name) for name in names]
    return [(tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version) for tensor in tensors]


def layer_of(module: torch.nn.Module, read: Any, topk: int) -> Layer:
    """The module's layer with a runner for calls of `topk` experts per token, made if there is none or its weights have changed since.
    read: module -> Weights, or raises Unsupported."""
    layer = module.__dict__.get("_moe_layer")
    if layer is not None and layer.serves(module, topk):
        return layer
    with _making:  # another thread may be about to read, lay out or free the same weights
        return _new_layer_of(module, read, topk)


def _new_layer_of(module: torch.nn.Module, read: Any, topk: int) -> Layer:
    layer = module.__dict__.get("_moe_layer")
    try:
        if layer is not None and layer.freed and layer.changed(module):
            layer = layer.after_change(module)
        if layer is None or layer.changed(module):
            if _offloaded(module):
                raise Unsupported("accelerate takes its weights off the device after each forward, and the library would hold on to them")
            weights = read(module)
            if _fully_sharded() and _copies(module, weights):
                raise Unsupported(GATHERED)
            layer = Layer(module, weights, None, id(getattr(module, "config", module)), _may_be_sharded(module))
        elif layer.serves(module, topk):
            return layer
        if layer.runner(1, layer.width(topk)).weights_packed and _fully_sharded():
            raise Unsupported(GATHERED)
    except (Unsupported, _errors.ConfigError, _errors.UnsupportedError, _errors.ArgumentError) as error:
        layer = Layer(module, None, str(error))
        _warn(module, layer.reason)
    module.__dict__["_moe_layer"] = layer
    modules[id(module)] = module
    return layer


def _keeps_data(parameter: torch.Tensor) -> bool:
    """Whether the module still has the memory that is assigned to this parameter in its next forward. A rank of a sharded model has
    the local tensor of a DTensor, which is made anew for each forward."""
    return type(parameter) is torch.nn.Parameter and not _fully_sharded()


def _fully_sharded() -> bool:
    """Whether a module of this process is under torch's fully_shard, which makes a class of its own for each class of such modules."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    classes = list(fsdp.FSDPModule.__subclasses__()) if fsdp is not None and hasattr(fsdp, "FSDPModule") else []
    for found in classes:
        classes += found.__subclasses__()
    return any(issubclass(found, torch.nn.Module) for found in classes)


def _copies(module: torch.nn.Module, weights: Weights) -> bool:
    own = {getattr(module, name).data_ptr() for name in weights.source}
    return any(array.data_ptr() not in own for array in weights.arrays.values())


def _offloaded(module: torch.nn.Module) -> bool:
    """Whether a hook of accelerate brings the module's weights to the device for each forward."""
    hook = getattr(module, "_hf_hook", None)
    return any(getattr(one, "offload", False) for one in getattr(hook, "hooks", (hook,)))


def _may_be_sharded(module: torch.nn.Module) -> bool:
    """False where the module has as many experts as its model: then no id is that of another rank's expert."""
    config = getattr(module, "config", None)
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return getattr(module, "num_experts", None) not in [getattr(config, name) for name in names if hasattr(config, name)]


_warned: set[tuple[str, str]] = set()


def _warn(module: torch.nn.Module, reason: str | None, stacklevel: int = 4) -> None:
    _warn_of(type(module).__qualname__, str(reason), stacklevel + 1)


def _warn_of(name: str, reason: str, stacklevel: int = 2) -> None:
    if (name, reason) not in _warned:
        _warned.add((name, reason))
        text = f"moe.transformers: {name} runs on transformers' own implementation: {reason}"
        warnings.warn(text, FallbackWarning, stacklevel=stacklevel)


@torch.compiler.assume_constant_result
def warn_while_tracing(name: str, reason: str) -> int:
    """Runs while torch.compile traces, and leaves nothing in the graph."""
    _warn_of(name, reason)
    return 0


class _Key:
    """A module's key in `modules`, where torch.compile reads it. A copy of the module has none."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.value = id(module)
        modules[self.value] = module

    def __deepcopy__(self, memo: dict) -> None:
        return None

    def __reduce__(self) -> tuple:
        return (_nothing, ())


@torch.compiler.assume_constant_result
def register_while_tracing(address: int) -> int:
    """Gives the module at this address, id(module), a key before its weights are read. Runs while torch.compile traces, which hands over
    no objects; the frame that it traces keeps the module alive."""
    module = ctypes.cast(address, ctypes.py_object).value
    key = module.__dict__.get("_moe_key")
    if key is None or modules.get(key.value) is not module:  # a shallow copy has that of the original
        module.__dict__["_moe_key"] = _Key(module)
    return 0


def grouped_mm_takes(module: torch.nn.Module) -> bool:
    """Whether transformers' grouped_mm takes the weights: torch's has no float64, and rows that are no multiple of 16 bytes it refuses.
    While torch.compile traces, transformers puts an operator of its own in its place for all but bfloat16."""
    weights = (module.gate_up_proj if getattr(module, "has_gate", True) else module.up_proj, module.down_proj)
    if torch.compiler.is_compiling() and all(weight.dtype != torch.bfloat16 for weight in weights):
        return True
    return all(weight.dtype in _DTYPES and all(extent * weight.element_size() % 16 == 0 for extent in weight.shape[1:])
               for weight in weights)  # fmt: skip


def eager_forward(module: torch.nn.Module) -> Callable[..., torch.Tensor] | None:
    """The forward of the module's class below the decorator that chooses an implementation; None for a class without the decorator."""
    decorated = forward = type(module).forward
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    return None if forward is decorated else forward


def dtype_name(dtype: torch.dtype) -> str:
    if dtype not in _DTYPES:
        raise Unsupported(f"dtype {dtype} is none of float32, bfloat16, float16")
    return _DTYPES[dtype]


def activation_of(module: torch.nn.Module, device: torch.device) -> Activation:
    has_gate, is_concatenated = getattr(module, "has_gate", True), getattr(module, "is_concatenated", True)
    try:
        found = recognise(module, has_gate, is_concatenated, device)
    except Exception as error:  # the module's own code
        raise Unsupported(f"its activation cannot be evaluated alone: {type(error).__name__}: {error}") from error
    if found is None:
        raise Unsupported("its activation is none of the library's: no formula gives the same numbers")
    return found


def activation_settings(found: Activation) -> dict[str, Any]:
    return {"activation": found.kind, "alpha": found.alpha, "beta": found.beta, "limit": found.limit, "situ_gate": found.situ_gate,
            "situ_up": found.situ_up}  # fmt: skip


def halves(rows: torch.Tensor, dim: int) -> torch.Tensor:
    """gate0, up0, gate1, up1, ... -> all gates, then all ups, along `dim`: a contiguous copy."""
    shape = list(rows.shape)
    split = rows.reshape(shape[:dim] + [shape[dim] // 2, 2] + shape[dim + 1 :])
    return split.movedim(dim + 1, dim).reshape(shape).contiguous()


def read_experts(module: torch.nn.Module) -> Weights:
    """The weights of a module that `use_experts_implementation` decorates."""
    has_gate = getattr(module, "has_gate", True)
    source = ("gate_up_proj" if has_gate else "up_proj", "down_proj")
    first, second = getattr(module, source[0]), module.down_proj
    for name, tensor in zip(source, (first, second)):
        if not isinstance(tensor, torch.Tensor) or type(tensor.data) is not torch.Tensor or tensor.dim() != 3:
            raise Unsupported(f"{name} is {type(tensor).__name__}, no plain tensor of three dimensions")
        if tensor.device.type not in ("cpu", "cuda"):
            raise Unsupported(f"{name} is on {tensor.device}")
    dtype = dtype_name(first.dtype)
    found = activation_of(module, first.device)
    w13, w2 = first.detach(), second.detach()
    packs = False
    if module.is_transposed:
        # Used as [E, 2I, H] and [E, H, I]: laid out once, and the parameters become views of it, so that no second copy stays.
        w13, w2 = w13.transpose(1, 2).contiguous(), w2.transpose(1, 2).contiguous()
        if not found.interleaved and _keeps_data(first):
            first.data = w13.transpose(1, 2)
        if _keeps_data(second):
            second.data = w2.transpose(1, 2)
    if found.interleaved:
        w13, packs = halves(w13, 1), True
    arrays = {"w13": w13, "w2": w2}
    if getattr(module, "has_bias", False):
        source += (source[0] + "_bias", "down_proj_bias")
        bias = getattr(module, source[2]).detach()
        arrays["w13_bias"] = (halves(bias, 1) if found.interleaved else bias).to(torch.float32).contiguous()
        arrays["w2_bias"] = module.down_proj_bias.detach().to(torch.float32).contiguous()
    for name in ("w13", "w2"):
        arrays[name] = arrays[name].contiguous()
    settings = {"dtype": dtype, "torch_dtype": first.dtype, **activation_settings(found)}
    return Weights(arrays, settings, source, packs, normalises=getattr(module, "has_post_expert_norm", False))


def read_fp8_experts(module: torch.nn.Module) -> Weights:
    """The weights of `FP8Experts`: blocks of 128 x 128 with float32 scales, activations quantised by groups of 128."""
    if module.activation_scheme != "dynamic":
        raise Unsupported(f'activation_scheme is "{module.activation_scheme}", expected "dynamic"')
    if module.block_size is None or tuple(module.block_size) != (128, 128):
        raise Unsupported(f"weight_block_size is {module.block_size}, expected (128, 128)")
    has_gate = getattr(module, "has_gate", True)
    prefix = "gate_up_proj" if has_gate else "up_proj"
    first, second = getattr(module, prefix), module.down_proj
    source = (prefix, "down_proj", prefix + "_scale_inv", "down_proj_scale_inv")
    scale, second_scale = getattr(module, source[2]), module.down_proj_scale_inv
    if first.dtype != torch.float8_e4m3fn:
        raise Unsupported(f"{prefix} is {first.dtype}, expected float8_e4m3fn")
    if scale.dtype != torch.float32:
        raise Unsupported(f"scales are {scale.dtype} (scale_fmt), expected float32")
    if first.device.type not in ("cpu", "cuda"):
        raise Unsupported(f"{prefix} is on {first.device}")
    if first.shape[1] % 256 != 0 and has_gate:
        raise Unsupported(f"the intermediate size {first.shape[1] // 2} is not a multiple of 128")
    found = activation_of(module, first.device)
    arrays = {"w13": first.detach(), "w2": second.detach(), "w13_scale": scale.detach(), "w2_scale": second_scale.detach()}
    arrays = {name: array.contiguous() for name, array in arrays.items()}
    dtype = torch.get_default_dtype() if module.__dict__.get("_moe_dtype") is None else module.__dict__["_moe_dtype"]
    settings = {"dtype": dtype_name(dtype), "torch_dtype": dtype, "quantization": "fp8_block128",
                **activation_settings(found)}  # fmt: skip
    return Weights(arrays, settings, source, False)
