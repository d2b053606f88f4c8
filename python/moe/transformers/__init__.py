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

import torch
from torch import library as torch_library
from transformers.integrations import finegrained_fp8
from transformers.integrations import moe as integration

from . import _layer, _mxfp4
from ._activation import Activation, recognise
from ._layer import FallbackWarning

NAME = "moe"


def _run(module: torch.nn.Module, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, read: Any, fallback: Any) -> torch.Tensor:
    layer = _layer.layer_of(module, read, ids.shape[-1])
    if layer.reason is not None:
        return fallback(module, hidden, ids, weights)
    if torch.is_grad_enabled() and (hidden.requires_grad or weights.requires_grad or layer.needs_gradients(module)):
        if layer.freed:  # nothing to fall back to: the operator computes, and refuses the backward pass, also to the biases
            hidden = hidden if hidden.requires_grad else hidden.detach().requires_grad_()
            return torch.ops.moe.transformers_experts(hidden, ids, weights, layer.key)
        _layer._warn(module, _layer.GRADIENTS)
        return fallback(module, hidden, ids, weights)
    if layer.frees:
        layer.release(module)
    if getattr(module, "_is_expert_parallel", layer.sharded):  # experts of other ranks have ids past the last local one
        ids = torch.where(ids >= module.num_experts, -1, ids)
    if layer.normalises:
        return layer.forward_normalised(hidden, ids, weights, module.post_expert_norm)  # type: ignore[arg-type]
    return layer.forward(hidden, ids, weights)


@torch_library.custom_op("moe::transformers_experts", mutates_args=())
def _operator(hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, module: int) -> torch.Tensor:
    found = _layer.modules[module]
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


def _compiled(module: torch.nn.Module, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, fallback: Any) -> torch.Tensor:
    """While torch.compile traces: the operator, or the fallback's own code with the same warning as without torch.compile. A module that
    has not run before runs outside the graph."""
    layer = getattr(module, "_moe_layer", None)
    if layer is None or layer.key is None:
        return _outside(module, hidden, ids, weights)
    if layer.reason is not None:
        _layer.warn_while_tracing(type(module).__qualname__, layer.reason)
        return fallback(module, hidden, ids, weights)
    if torch.is_grad_enabled() and (hidden.requires_grad or weights.requires_grad or layer.needs_gradients(module)):
        if layer.freed:
            return _outside(module, hidden, ids, weights)
        _layer.warn_while_tracing(type(module).__qualname__, _layer.GRADIENTS)
        return fallback(module, hidden, ids, weights)
    return torch.ops.moe.transformers_experts(hidden, ids, weights, layer.key)


@torch.compiler.disable
def _outside(module: torch.nn.Module, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return _forward_of(module)(module, hidden, ids, weights)


def experts_forward(self: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor,
                    top_k_weights: torch.Tensor) -> torch.Tensor:  # fmt: skip
    """hidden_states [T, H], top_k_index [T, k], top_k_weights [T, k] -> [T, H]: the function behind the name "moe"."""
    fallback = integration.ALL_EXPERTS_FUNCTIONS["grouped_mm"]
    if torch.compiler.is_compiling():
        return _compiled(self, hidden_states, top_k_index, top_k_weights, fallback)
    return _run(self, hidden_states, top_k_index, top_k_weights, _layer.read_experts, fallback)


def fp8_experts_forward(self: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor,
                        top_k_weights: torch.Tensor) -> torch.Tensor:  # fmt: skip
    """The same for `FP8Experts`."""
    fallback = finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS["grouped_mm"]
    if torch.compiler.is_compiling():
        return _compiled(self, hidden_states, top_k_index, top_k_weights, fallback)
    self.__dict__.setdefault("_moe_dtype", hidden_states.dtype)
    return _run(self, hidden_states, top_k_index, top_k_weights, _layer.read_fp8_experts, fallback)


def run_mxfp4(self: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor,
              top_k_weights: torch.Tensor) -> torch.Tensor:  # fmt: skip
    """The same for gpt-oss' experts in mxfp4, which transformers dispatches by no interface."""
    if torch.compiler.is_compiling():
        return _compiled(self, hidden_states, top_k_index, top_k_weights, _mxfp4.dequantized_forward)
    self.__dict__.setdefault("_moe_dtype", hidden_states.dtype)
    return _run(self, hidden_states, top_k_index, top_k_weights, _mxfp4.read, _mxfp4.dequantized_forward)


def why_not(module: torch.nn.Module) -> str | None:
    """Why an experts module that has run under "moe" runs on transformers' own implementation; None: it runs on the library."""
    layer = module.__dict__.get("_moe_layer")
    if layer is None:
        return "it has not run yet"
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
        _layer.MAX_ROWS = int(max_rows)
    if keep_codes is not None:
        _layer.KEEP_CODES = bool(keep_codes)


def register() -> None:
    integration.ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS.register(NAME, fp8_experts_forward)
    _mxfp4.install(NAME)


register()

__all__ = ["Activation", "FallbackWarning", "configure", "experts_forward", "fp8_experts_forward", "recognise", "register", "why_not"]
