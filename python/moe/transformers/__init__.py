# SPDX-License-Identifier: Apache-2.0
# python/moe/transformers/__init__.py: registers the experts implementation "moe" with transformers.
"""`import moe.transformers`, then `AutoModelForCausalLM.from_pretrained(path, experts_implementation="moe")`.

The experts of every family whose experts class uses transformers' experts interface run on this library, on the host and on GPUs:
weights in float32, bfloat16 and float16, fp8 in blocks of 128 x 128 (FineGrainedFP8Config), and gpt-oss in mxfp4. A module that the
library cannot take runs on transformers' own implementation, and one `FallbackWarning` for its class says why.

Weights are used where they lie. Where a module stores them transposed they are laid out once and the module's parameters become views of
the new memory; interleaved gate and up rows (gpt-oss) are copied once. mxfp4 codes that a runner packs, as on a GPU, are freed after it.
"""

from __future__ import annotations

from typing import Any

from .._transformers_version import check as _check_versions

_check_versions()

import torch
from torch import library as torch_library
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes
from transformers.integrations import finegrained_fp8
from transformers.integrations import moe as integration

from .._errors import ArgumentError, flag, whole_number
from .._watched import observed, transformed, unobserved
from . import _layer, _mxfp4
from ._activation import Activation, recognise
from ._layer import FallbackWarning

NAME = "moe"


def _needs_gradients(layer: _layer.Layer, module: torch.nn.Module, hidden: torch.Tensor, weights: torch.Tensor) -> bool:
    """Whether a call must give gradients, or tangents of forward-mode AD."""
    if torch.is_grad_enabled() and (hidden.requires_grad or weights.requires_grad or layer.needs_gradients(module)):
        return True
    return forward_ad._current_level >= 0


def _unread_needs_gradients(module: torch.nn.Module, hidden: torch.Tensor, weights: torch.Tensor) -> bool:
    """The same of a module whose weights were not read yet."""
    if not torch.is_grad_enabled():
        return forward_ad._current_level >= 0
    return hidden.requires_grad or weights.requires_grad or any([parameter.requires_grad for parameter in module.parameters()])


def _run(module: torch.nn.Module, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, read: Any, fallback: Any) -> torch.Tensor:
    layer = _layer.layer_of(module, read, ids.shape[-1])
    if layer.reason is not None:
        return fallback(module, hidden, ids, weights)
    if _needs_gradients(layer, module, hidden, weights):
        if layer.freed:  # nothing to fall back to: the operator computes, and refuses the backward pass, also to the biases
            hidden = hidden if hidden.requires_grad else hidden.detach().requires_grad_()
            return torch.ops.moe.transformers_experts(hidden, ids, weights, layer.key)
        _layer._warn(module, _layer.GRADIENTS)
        return fallback(module, hidden, ids, weights)
    if layer.frees:
        with _layer._making:
            layer.release(module)
    if getattr(module, "_is_expert_parallel", layer.sharded):  # experts of other ranks have ids past the last local one
        ids = torch.where(ids >= module.num_experts, -1, ids)
    if layer.normalises:
        return layer.forward_normalised(hidden, ids, weights, module.post_expert_norm)  # type: ignore[arg-type]
    return layer.forward(hidden, ids, weights)


@torch_library.custom_op("moe::transformers_experts", mutates_args=())
def _operator(hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, module: int) -> torch.Tensor:
    found = _layer.modules[module]
    with unobserved():
        return _forward_of(found)(found, hidden, topk_ids, topk_weights)


@_operator.register_fake
def _(hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, module: int) -> torch.Tensor:
    return torch.empty_like(hidden)


def _refuse_backward(ctx: Any, gradient: torch.Tensor) -> None:
    raise _layer.freed("a gradient")


_operator.register_autograd(_refuse_backward)


def _forward_of(module: torch.nn.Module) -> Any:
    if isinstance(module, _mxfp4.Mxfp4Experts):
        return run_mxfp4
    return fp8_experts_forward if isinstance(module, finegrained_fp8.FP8Experts) else experts_forward


def _watched(module: torch.nn.Module, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, read: Any,
             fallback: Any) -> torch.Tensor:  # fmt: skip
    """While torch watches what runs, as torch.compile does: the operator, or the fallback's own code with the same warning as in other
    calls. Of a module that torch.compile traces and that has not run before, the operator, which reads the weights when it runs; a graph
    of the next call has what the library cannot take."""
    if not torch.compiler.is_compiling():
        module.__dict__.setdefault("_moe_dtype", hidden.dtype)
        with unobserved(), _disable_current_modes(), temporarily_clear_interpreter_stack():
            _layer.layer_of(module, read, int(ids.shape[-1]))
    layer = getattr(module, "_moe_layer", None)
    if layer is None:
        if _unread_needs_gradients(module, hidden, weights):
            _layer.warn_while_tracing(type(module).__qualname__, _layer.GRADIENTS)
            return fallback(module, hidden, ids, weights)
        _layer.register_while_tracing(id(module))
        return torch.ops.moe.transformers_experts(hidden, ids, weights, module._moe_key.value)  # type: ignore[union-attr]
    if layer.key is None:  # of a copy whose runner is the original's
        return _outside(module, hidden, ids, weights)
    if layer.reason is not None:
        _layer.warn_while_tracing(type(module).__qualname__, layer.reason)
        return fallback(module, hidden, ids, weights)
    if _needs_gradients(layer, module, hidden, weights):
        if layer.freed:
            return _outside(module, hidden, ids, weights)
        _layer.warn_while_tracing(type(module).__qualname__, _layer.GRADIENTS)
        return fallback(module, hidden, ids, weights)
    return torch.ops.moe.transformers_experts(hidden, ids, weights, layer.key)


@torch.compiler.disable
def _outside(module: torch.nn.Module, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return _forward_of(module)(module, hidden, ids, weights)


def _own_forward(module: torch.nn.Module, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """transformers' own implementation: grouped_mm, or the class's own loop where grouped_mm refuses the weights or has no tangents."""
    eager = None if forward_ad._current_level < 0 and _layer.grouped_mm_takes(module) else _layer.eager_forward(module)
    return (eager or integration.ALL_EXPERTS_FUNCTIONS["grouped_mm"])(module, hidden, ids, weights)


def _own_fp8_forward(module: torch.nn.Module, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The same for `FP8Experts`, whose grouped_mm has no static activation scales."""
    eager = _layer.eager_forward(module) if module.activation_scheme == "static" else None
    return (eager or finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS["grouped_mm"])(module, hidden, ids, weights)


def experts_forward(self: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor,
                    top_k_weights: torch.Tensor) -> torch.Tensor:  # fmt: skip
    """hidden_states [T, H], top_k_index [T, k], top_k_weights [T, k] -> [T, H]: the function behind the name "moe"."""
    if observed() or transformed():
        return _watched(self, hidden_states, top_k_index, top_k_weights, _layer.read_experts, _own_forward)
    return _run(self, hidden_states, top_k_index, top_k_weights, _layer.read_experts, _own_forward)


def fp8_experts_forward(self: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor,
                        top_k_weights: torch.Tensor) -> torch.Tensor:  # fmt: skip
    """The same for `FP8Experts`."""
    if observed() or transformed():
        return _watched(self, hidden_states, top_k_index, top_k_weights, _layer.read_fp8_experts, _own_fp8_forward)
    self.__dict__.setdefault("_moe_dtype", hidden_states.dtype)
    return _run(self, hidden_states, top_k_index, top_k_weights, _layer.read_fp8_experts, _own_fp8_forward)


def run_mxfp4(self: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor,
              top_k_weights: torch.Tensor) -> torch.Tensor:  # fmt: skip
    """The same for gpt-oss' experts in mxfp4, which transformers dispatches by no interface."""
    if observed() or transformed():
        return _watched(self, hidden_states, top_k_index, top_k_weights, _mxfp4.read, _mxfp4.dequantized_forward)
    self.__dict__.setdefault("_moe_dtype", hidden_states.dtype)
    return _run(self, hidden_states, top_k_index, top_k_weights, _mxfp4.read, _mxfp4.dequantized_forward)


def why_not(module: torch.nn.Module) -> str | None:
    """Why an experts module that has run under "moe" runs on transformers' own implementation; None: it runs on the library."""
    if not isinstance(module, torch.nn.Module):
        raise ArgumentError(f"E_ARG: module: is of type {type(module).__name__}, expected a torch.nn.Module")
    layer = module.__dict__.get("_moe_layer")
    if layer is None:
        inside = [name for name, child in module.named_modules() if "_moe_layer" in child.__dict__]
        return f"it is no experts module, but {inside[0]} inside it is one" if inside else "it has not run yet"
    return layer.reason


def configure(max_rows: int | None = None, keep_codes: bool | None = None) -> None:
    """Before the first forward; None: as it is.

    Args:
        max_rows: most rows of one call of the library, 4096: longer inputs run in pieces of this size. Larger takes more memory for each
            layer of the model.
        keep_codes: True: gpt-oss' experts in mxfp4 keep their codes beside a runner's packed copy, in twice the memory, so that a model
            that has run can be saved, pickled, moved to another device and trained around. False, the default: they are freed.
    """
    if max_rows is not None:
        max_rows = whole_number("max_rows", max_rows)
        if max_rows < 1:
            raise ArgumentError(f"E_ARG: max_rows: is {max_rows}, expected at least 1")
        _layer.MAX_ROWS = max_rows
    if keep_codes is not None:
        _layer.KEEP_CODES = bool(flag("keep_codes", keep_codes))


def register() -> None:
    integration.ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS.register(NAME, fp8_experts_forward)
    _mxfp4.install(NAME)


register()

__all__ = ["Activation", "FallbackWarning", "configure", "experts_forward", "fp8_experts_forward", "recognise", "register", "why_not"]
