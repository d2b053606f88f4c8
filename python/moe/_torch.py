# SPDX-License-Identifier: Apache-2.0
# python/moe/_torch.py: the custom operators of torch, through which torch.compile sees the library.
"""Eager calls do not pass through these operators, whose dispatch costs more than the call itself. `Runner.forward_routed` uses
`moe::forward_routed` where torch watches what runs (`observed`), as torch.compile does, `moe.experts` uses `moe::experts`."""

from __future__ import annotations

import torch
from torch import library as torch_library

from ._experts import experts as _eager_experts
from ._runner import no_gradient, runner_of
from ._watched import unobserved


@torch_library.custom_op("moe::forward_routed", mutates_args=())
def forward_routed(hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, runner: int) -> torch.Tensor:
    with unobserved():
        return runner_of(runner).forward_routed(hidden, topk_ids, topk_weights)


@torch_library.custom_op("moe::experts", mutates_args=())
def experts(
    hidden: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    activation: str = "silu",
    alpha: float = 1.702,
    beta: float = 1.0,
    limit: float = 0.0,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    w13_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    quantization: str | None = None,
    weight_on_input: bool = False,
    situ_gate: float = 4.0,
    situ_up: float = 25.0,
) -> torch.Tensor:
    """`moe.experts`; limit 0: none."""
    with unobserved():
        return _eager_experts(
            hidden, topk_ids, topk_weights, w13, w2, activation, alpha=alpha, beta=beta, limit=limit or None, w13_bias=w13_bias,
            w2_bias=w2_bias, w13_scale=w13_scale, w2_scale=w2_scale, quantization=quantization, weight_on_input=weight_on_input,
            situ_gate=situ_gate, situ_up=situ_up,
        )  # fmt: skip


@forward_routed.register_fake
def _(hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, runner: int) -> torch.Tensor:
    return hidden.new_empty(hidden.shape)


@experts.register_fake
def _(hidden, topk_ids, topk_weights, w13, w2, *settings, **more):  # type: ignore[no-untyped-def]
    return hidden.new_empty(hidden.shape)


def _refuse_gradients(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    for name, needed in zip(("hidden", "topk_ids", "topk_weights"), ctx.needs_input_grad):
        if needed:
            raise no_gradient(name)


def _no_gradients(ctx, gradient):  # type: ignore[no-untyped-def]
    """Of parameters among the weights: eager calls give them none either."""
    return (None,) * len(ctx.needs_input_grad)


for _operator in (forward_routed, experts):
    _operator.register_autograd(_no_gradients, setup_context=_refuse_gradients)
