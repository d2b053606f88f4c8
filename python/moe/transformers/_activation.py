# SPDX-License-Identifier: Apache-2.0
# python/moe/transformers/_activation.py: which activation of the library a transformers module computes, found by evaluating it.
"""A module's function between its two products is arbitrary Python. It is evaluated on a grid of values; an activation of the library is
chosen only if it gives the same numbers everywhere on the grid, so that no model runs with another model's activation."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Callable, Iterator

import torch
import torch.nn.functional as F

_FAR = 1.0e4  # beyond every limit of a model
_LIMIT_FREE = 5.0e3


@dataclasses.dataclass(frozen=True)
class Activation:
    """Arguments of `moe.Runner`, and how the module orders the rows of its first product."""

    kind: str
    alpha: float = 1.702
    beta: float = 1.0
    limit: float | None = None
    situ_gate: float = 4.0
    situ_up: float = 25.0
    interleaved: bool = False


def _evaluate(kind: str, c: Activation, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The formulas of include/moe/activation/activation.hpp."""
    limit = math.inf if c.limit is None else c.limit
    clamped = up.clamp(-limit, limit)
    if kind == "silu":
        return F.silu(gate) * up
    if kind == "gelu":
        return F.gelu(gate) * up
    if kind == "gelu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    if kind == "swigluoai_halves":
        g = gate.clamp(max=limit)
        return (clamped + c.beta) * g * torch.sigmoid(c.alpha * g)
    if kind == "silu_clamped":
        return F.silu(gate.clamp(max=limit)) * clamped
    if kind == "swiglu_step":
        return F.silu(gate).clamp(max=limit) * clamped
    if kind == "situ":
        return c.situ_gate * torch.tanh(gate / c.situ_gate) * torch.sigmoid(gate) * c.situ_up * torch.tanh(up / c.situ_up)
    return {"silu_no_mul": F.silu, "gelu_no_mul": F.gelu, "gelu_tanh_no_mul": lambda x: F.gelu(x, approximate="tanh"),
            "relu2_no_mul": lambda x: F.relu(x).square(), "relu_no_mul": F.relu}[kind](gate)  # fmt: skip


def _numbers(module: torch.nn.Module) -> list[float]:
    """Numbers that the module, its activation and its configuration hold: what a constant found by evaluation must be."""
    found = []
    for holder in (module, getattr(module, "act_fn", None), getattr(module, "config", None)):
        for value in vars(holder).values() if hasattr(holder, "__dict__") else ():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                found.append(float(value))
    return found


def _gated_candidates(f: Callable[[float, float], float], snap: Callable[[float], float]) -> Iterator[Activation]:
    yield Activation("silu")
    yield Activation("gelu")
    yield Activation("gelu_tanh")
    silu_1 = 1.0 / (1.0 + math.exp(-1.0))
    with_far_up = f(1.0, _FAR)
    if 0 < with_far_up / silu_1 < _LIMIT_FREE:
        yield Activation("silu_clamped", limit=snap(with_far_up / silu_1))
    if 0 < f(_FAR, 1.0) < _LIMIT_FREE:
        yield Activation("swiglu_step", limit=snap(f(_FAR, 1.0)))
    offset, mirrored = f(1.0, 0.0), f(-1.0, 0.0)
    if offset > 0 > mirrored:
        alpha = snap(-math.log(-mirrored / offset))
        sigma = 1.0 / (1.0 + math.exp(-alpha))
        beta = snap(offset / sigma)
        limit = with_far_up / sigma - beta
        yield Activation("swigluoai_halves", alpha, beta, snap(limit) if 0 < limit < _LIMIT_FREE else None)
    bound, slope = f(_FAR, _FAR), f(_FAR, 1.0)
    if 0 < slope < bound < _LIMIT_FREE:
        up = snap(1.0 / math.atanh(slope / bound))
        yield Activation("situ", situ_gate=snap(bound / up), situ_up=up)


def recognise(module: torch.nn.Module, has_gate: bool, is_concatenated: bool, device: Any) -> Activation | None:
    """The activation that `module._apply_gate` (or, without a gate, `module.act_fn`) computes; None: none of the library's."""

    def call(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if not has_gate:
            return module.act_fn(gate[None])[0]
        joined = torch.cat((gate, up)) if is_concatenated else torch.stack((gate, up), dim=-1).flatten()
        return module._apply_gate(joined[None])[0]

    def f(gate: float, up: float) -> float:
        answer = call(torch.full((4,), gate, device=device), torch.full((4,), up, device=device))
        return float(answer[0])

    known = _numbers(module)

    def snap(value: float) -> float:
        near = [x for x in known if abs(x - value) <= 1e-3 * abs(value)]
        return min(near, key=lambda x: abs(x - value)) if near else float(f"{value:.5g}")

    with torch.no_grad():
        if has_gate:
            candidates = list(_gated_candidates(f, snap))
        else:
            candidates = [Activation(k) for k in ("silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul", "relu2_no_mul", "relu_no_mul")]
        for candidate in candidates:
            gate, up = _grid(candidate, device)
            got, expected = call(gate, up), _evaluate(candidate.kind, candidate, gate, up)
            if got.shape == expected.shape and torch.allclose(got.float(), expected, rtol=2e-5, atol=2e-6):
                return dataclasses.replace(candidate, interleaved=has_gate and not is_concatenated)
    return None


def _grid(candidate: Activation, device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Every pair of values around zero, around the limit and far away."""
    values = [x / 4 for x in range(-32, 33)] + [-300.0, -40.0, -15.0, 15.0, 40.0, 300.0]
    for edge in (candidate.limit, candidate.situ_gate, candidate.situ_up):
        if edge is not None:
            values += [s * edge * x for s in (-1, 1) for x in (0.5, 0.99, 1.01, 1.5)]
    line = torch.tensor(values, dtype=torch.float32, device=device)
    gate, up = torch.meshgrid(line, line, indexing="ij")
    return gate.reshape(-1), up.reshape(-1)
