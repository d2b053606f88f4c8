# SPDX-License-Identifier: Apache-2.0
# python/moe/_experts.py: moe.experts, which keeps a runner for each set of weight arrays that it has seen.
from __future__ import annotations

import threading
import weakref
from typing import Any

from . import _arrays
from ._errors import ArgumentError
from ._runner import Runner, _Tensor, torch

#: Longer inputs run in pieces of this many rows.
MAX_ROWS = 8192
_LEAST_ROWS = 64


class _Entry:
    """Runners over one set of arrays. A larger runner is added beside the smaller ones, which a captured CUDA graph may use. All are
    destroyed with the arrays, or when these were moved or written in place."""

    def __init__(self, arrays: list[Any], key: tuple, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.runners: list[Runner] = []
        self.state = _state(arrays)
        self.references = [weakref.ref(array, lambda _: _cache.pop(key, None)) for array in arrays]

    def runner(self, rows: int, arrays: list[Any]) -> Runner:
        """The runner for so many rows, made if there is none."""
        state = _state(arrays)
        if state != self.state:  # other memory, or written in place since
            self.runners.clear()
            self.state = state
        if self.runners and (rows <= self.runners[-1].max_tokens or not self._may_grow()):
            return self.runners[-1]
        capacity = min(max(_LEAST_ROWS, 1 << max(rows - 1, 0).bit_length()), MAX_ROWS)
        self.runners.append(Runner(max_tokens=capacity, keep_weights=False, **self.settings_with(arrays)))
        return self.runners[-1]

    def settings_with(self, arrays: list[Any]) -> dict[str, Any]:
        given = iter(arrays)
        return {name: next(given) if value is _ARRAY else value for name, value in self.settings.items()}

    def _may_grow(self) -> bool:
        last = self.runners[-1]
        if last.weights_packed or last.max_tokens >= MAX_ROWS:
            return False
        return torch is None or not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


_ARRAY = object()
_cache: dict[tuple, _Entry] = {}
_lock = threading.Lock()


def _state(arrays: list[Any]) -> tuple:
    """Where the arrays lie and, where the framework counts it, how often they were written."""
    state: list[int] = []
    for array in arrays:
        if isinstance(array, _Tensor):
            state += (array.data_ptr(), -1 if array.is_inference() else array._version)
        elif hasattr(array, "__array_interface__"):
            state.append(array.__array_interface__["data"][0])
    return tuple(state)


def _counts_writes(arrays: list[Any]) -> bool:
    return torch is not None and all(isinstance(array, torch.Tensor) and not array.is_inference() for array in arrays)


def clear_cache() -> None:
    """Frees the runners that `experts` keeps. CUDA graphs that were captured with them must not be replayed after this."""
    with _lock:
        _cache.clear()


def experts(
    hidden: Any,
    topk_ids: Any,
    topk_weights: Any,
    w13: Any,
    w2: Any,
    activation: str = "silu",
    *,
    alpha: float = 1.702,
    beta: float = 1.0,
    limit: float | None = None,
    w13_bias: Any = None,
    w2_bias: Any = None,
    w13_scale: Any = None,
    w2_scale: Any = None,
    quantization: str | None = None,
    weight_on_input: bool = False,
    output: Any = None,
) -> Any:
    """The experts of one MoE layer on one device: sum over j of topk_weights[:, j] * FFN_{topk_ids[:, j]}(hidden).

    Args:
        hidden: [M, H], float32, bfloat16 or float16 (torch, numpy, JAX, CuPy, or anything with DLPack).
        topk_ids: [M, k], experts of [0, E), each at most once in a row; -1: none.
        topk_weights: [M, k].
        w13: [E, 2I, H], gate rows first, then up rows; [E, I, H] for an ungated activation.
        w2: [E, H, I].
        activation, alpha, beta, limit, biases, scales, quantization, weight_on_input: as for `Runner`.
        output: [M, H] to write to; None: a new array.

    Returns:
        [M, H], of hidden's framework, dtype and device.

    The runner behind it is kept as long as the weight arrays live, so pass the same objects again. torch counts writes to a tensor:
    weights written in place are noticed. Other frameworks do not: there a runner that would have to pack the weights is not kept.
    """
    arrays = [a for a in (w13, w2, w13_bias, w2_bias, w13_scale, w2_scale) if a is not None]
    if len(getattr(topk_ids, "shape", ())) != 2 or not hasattr(hidden, "dtype"):
        for array in (hidden, topk_ids):
            _arrays.framework(array)  # an ArgumentError for what is no array
        raise ArgumentError(f"E_ARG: topk_ids: {len(topk_ids.shape)} dimensions {tuple(topk_ids.shape)}, expected 2")
    topk = topk_ids.shape[1]
    key = (id(w13), id(w2), id(w13_bias), id(w2_bias), id(w13_scale), id(w2_scale), activation, alpha, beta, limit, quantization,
           weight_on_input, topk, hidden.dtype)  # fmt: skip
    entry = _cache.get(key)
    if entry is not None:
        last = entry.runners[-1] if entry.runners else None  # none: making the last one failed
        if last is not None and hidden.shape[0] <= last.max_tokens and _state(arrays) == entry.state:
            return last.forward_routed(hidden, topk_ids, topk_weights, output)
    else:
        settings = {"w13": _ARRAY, "w2": _ARRAY}
        for name, array in (("w13_bias", w13_bias), ("w2_bias", w2_bias), ("w13_scale", w13_scale), ("w2_scale", w2_scale)):
            if array is not None:
                settings[name] = _ARRAY
        settings.update(topk=int(topk), activation=activation, alpha=alpha, beta=beta, limit=limit, quantization=quantization,
                        dtype=_arrays.dtype_name(hidden), weight_on_input=weight_on_input)  # fmt: skip
        entry = _Entry(arrays, key, settings)
    with _lock:
        runner = entry.runner(int(hidden.shape[0]), arrays)
        if not runner.weights_packed or _counts_writes(arrays):
            _cache[key] = entry
    return runner.forward_routed(hidden, topk_ids, topk_weights, output)
