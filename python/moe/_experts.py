# SPDX-License-Identifier: Apache-2.0
# python/moe/_experts.py: moe.experts, which keeps a runner for each set of weight arrays that it has seen.
from __future__ import annotations

import threading
import weakref
from typing import Any

from . import _arrays
from ._runner import FLOAT32, IDS, Runner, _current_device, _forward_routed, _is_compiling, _Tensor, sharing_runner, torch
from ._types import Array, ArrayT

#: Longer inputs run in pieces of this many rows.
MAX_ROWS = 8192
_LEAST_ROWS = 64
#: Of a runner that packs the weights: a larger one beside it would hold another copy of them, so it is never followed by one.
PACKED_ROWS = 4096


class _Entry:
    """Runners over one set of arrays. A larger runner is added beside the smaller ones, which a captured CUDA graph may use; one that
    packs the weights is large from its first call. All are destroyed with the arrays, or when these were moved or written in place."""

    def __init__(self, arrays: list[Any], key: tuple, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.packs = False  # whether its runners pack the weights; known when one was made
        self.runners: list[Runner] = []
        self.state = _state(arrays)
        self.references = [weakref.ref(array, lambda _: _forget(key)) for array in arrays]

    def runner(self, rows: int, arrays: list[Any]) -> Runner:
        """The runner for so many rows, made if there is none."""
        state = _state(arrays)
        if state != self.state:  # other memory, or written in place since
            self.runners.clear()
            self.state = state
        if self.runners and (rows <= self.runners[-1].max_tokens or not self._may_grow()):
            return self.runners[-1]
        runner = self.make(rows, arrays)
        if runner.weights_packed and runner.max_tokens < PACKED_ROWS:  # nothing has used it yet
            self.packs = True
            runner.close()
            runner = self.make(rows, arrays)
        self.runners.append(runner)
        return runner

    def make(self, rows: int, arrays: list[Any]) -> Runner:
        least = PACKED_ROWS if self.packs else _LEAST_ROWS
        capacity = min(max(least, 1 << max(rows - 1, 0).bit_length()), MAX_ROWS)
        return sharing_runner(scope="experts", max_tokens=capacity, keep_weights=False, **self.settings_with(arrays))

    def settings_with(self, arrays: list[Any]) -> dict[str, Any]:
        given = iter(arrays)
        return {name: next(given) if value is _ARRAY else value for name, value in self.settings.items()}

    def _may_grow(self) -> bool:
        last = self.runners[-1]
        if last.weights_packed or last.max_tokens >= MAX_ROWS:
            return False
        return torch is None or not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


class _Known:
    """The last call with some w13 that took torch tensors alone: what must be the same for its runner to serve the next one."""

    __slots__ = ("call", "device", "others", "rows", "runner", "topk", "w2", "w13")

    def __init__(self, runner: Runner, topk: int, call: tuple, arrays: list[Any]) -> None:
        self.runner, self.topk, self.call = runner, topk, call
        self.rows = runner.max_tokens
        self.device = runner._device if runner._guard else None  # that must be the current one; None: there is no other
        self.w13, self.w2, *others = [(array.data_ptr(), array._version) for array in arrays]
        self.others = others

    def same_others(self, *arrays: Any) -> bool:
        return self.others == [(array.data_ptr(), array._version) for array in arrays if array is not None]


_ARRAY = object()
_cache: dict[tuple, _Entry] = {}
_known: dict[int, _Known] = {}  # by id(w13)
_lock = threading.Lock()
_TENSOR = torch.Tensor if torch is not None else None
_empty_like = torch.empty_like if torch is not None else None
_grad_enabled = torch.is_grad_enabled if torch is not None else None


def _forget(key: tuple) -> None:
    _cache.pop(key, None)
    _known.pop(key[0], None)


def _state(arrays: list[Any]) -> tuple:
    """Where the arrays lie and, where the framework counts it, how often they were written."""
    state: list[int] = []
    for array in arrays:
        if isinstance(array, _Tensor):
            state += (array.data_ptr(), -1 if array.is_inference() else array._version)
        elif (interface := getattr(array, "__array_interface__", None)) is not None:  # numpy makes it anew each time it is asked for
            state.append(interface["data"][0])
    return tuple(state)


def _counts_writes(arrays: list[Any]) -> bool:
    return torch is not None and all(isinstance(array, torch.Tensor) and not array.is_inference() for array in arrays)


def clear_cache() -> None:
    """Frees the runners that `experts` keeps. CUDA graphs that were captured with them must not be replayed after this."""
    with _lock:
        _cache.clear()
        _known.clear()


def experts(
    hidden: ArrayT,
    topk_ids: Array,
    topk_weights: Array,
    w13: Array,
    w2: Array,
    activation: str = "silu",
    *,
    alpha: float = 1.702,
    beta: float = 1.0,
    limit: float | None = None,
    situ_gate: float = 4.0,
    situ_up: float = 25.0,
    w13_bias: Array | None = None,
    w2_bias: Array | None = None,
    w13_scale: Array | None = None,
    w2_scale: Array | None = None,
    quantization: str | None = None,
    weight_on_input: bool = False,
    output: ArrayT | None = None,
) -> ArrayT:
    """The experts of one MoE layer on one device: sum over j of topk_weights[:, j] * FFN_{topk_ids[:, j]}(hidden).

    Args:
        hidden: [M, H], float32, bfloat16 or float16 (torch, numpy, JAX, CuPy, or anything with DLPack).
        topk_ids: [M, k], experts of [0, E), each at most once in a row; -1: none. int32 and int64 are taken as they are.
        topk_weights: [M, k]. float32 is taken as it is.
        w13: [E, 2I, H], gate rows first, then up rows; [E, I, H] for an ungated activation.
        w2: [E, H, I].
        activation, alpha, beta, limit, situ_gate, situ_up, biases, scales, quantization, weight_on_input: as for `Runner`.
        output: [M, H] to write to; None: a new array.

    Returns:
        [M, H], of hidden's framework, dtype and device.

    The runner behind it is kept as long as the weight arrays live, so pass the same objects again. A call with more rows than any
    before makes a larger one, up to 8192 rows; one that packs the weights is made once, for 4096 rows (8192 if the first call has more).
    Longer inputs run in pieces. While a CUDA graph is captured no runner is made: call with as many rows before. torch counts writes to a
    tensor: weights written in place are noticed. Other frameworks do not: there a runner that would have to pack the weights is not kept.

    On a GPU the runners behind all weights share one workspace: calls on several streams wait for each other. CUDA graphs that were
    captured with them must not be replayed at the same time; for that make a `Runner` of each one's own.

    With torch hidden and topk_weights that need a gradient are refused. Weights may be parameters: they get no gradient. While
    torch.compile traces a call without `output`, it is the operator `moe::experts`.
    """
    compiling = _is_compiling is not None and _is_compiling()
    if compiling and output is None and isinstance(hidden, _Tensor):
        return torch.ops.moe.experts(
            hidden, topk_ids, topk_weights, w13, w2, activation, alpha=alpha, beta=beta, limit=limit or 0.0, w13_bias=w13_bias,
            w2_bias=w2_bias, w13_scale=w13_scale, w2_scale=w2_scale, quantization=quantization, weight_on_input=weight_on_input,
            situ_gate=situ_gate, situ_up=situ_up,
        )  # fmt: skip
    call = (id(w2), id(w13_bias), id(w2_bias), id(w13_scale), id(w2_scale), activation, alpha, beta, limit, situ_gate, situ_up,
            quantization, weight_on_input)  # fmt: skip
    if hidden.__class__ is _TENSOR and topk_ids.__class__ is _TENSOR and topk_weights.__class__ is _TENSOR and not compiling:
        # The weights of the last call, neither moved nor written since, and arrays that need no conversion: straight into the library.
        known = _known.get(id(w13))
        if known is not None and known.call == (hidden.dtype, *call):
            shape, chosen = hidden.shape, topk_ids.shape
            if (
                len(shape) == 2 and shape[0] <= known.rows and len(chosen) == 2 and chosen[1] == known.topk
                and topk_ids.dtype in IDS and topk_weights.dtype is FLOAT32
                and not ((hidden.requires_grad or topk_weights.requires_grad) and _grad_enabled())  # type: ignore[attr-defined]
                and known.w13 == (w13.data_ptr(), w13._version)  # type: ignore[attr-defined]
                and known.w2 == (w2.data_ptr(), w2._version)  # type: ignore[attr-defined]
                and (known.device is None or known.device == _current_device())
                and (not known.others or known.same_others(w13_bias, w2_bias, w13_scale, w2_scale))
            ):  # fmt: skip
                if output is None:
                    output = _empty_like(hidden)
                runner = known.runner
                runner._last_stream = _forward_routed(runner._handle, hidden, topk_ids, topk_weights, output, -1)
                return output
    arrays = [a for a in (w13, w2, w13_bias, w2_bias, w13_scale, w2_scale) if a is not None]
    for name, array in (("hidden", hidden), ("topk_ids", topk_ids)):  # the runner checks the rest of the call
        _arrays.check(name, array, 2)
    topk = topk_ids.shape[1]
    key = (id(w13), topk, hidden.dtype, *call)
    entry = _cache.get(key)
    if entry is None:
        settings = {}
        for name, given in (("w13", w13), ("w2", w2), ("w13_bias", w13_bias), ("w2_bias", w2_bias), ("w13_scale", w13_scale),
                            ("w2_scale", w2_scale)):  # fmt: skip
            if given is not None or name in ("w13", "w2"):
                _arrays.framework(given, name)  # an ArgumentError for an argument that is not an array
                settings[name] = _ARRAY
        settings.update(topk=int(topk), activation=activation, alpha=alpha, beta=beta, limit=limit, situ_gate=situ_gate, situ_up=situ_up,
                        quantization=quantization, dtype=_arrays.dtype_name(hidden), weight_on_input=weight_on_input)  # fmt: skip
        entry = _Entry(arrays, key, settings)
    with _lock:
        _known.pop(id(w13), None)  # it would keep a runner alive whose weights have changed
        runner = entry.runner(int(hidden.shape[0]), arrays)
        counts_writes = _counts_writes(arrays)
        if not runner.weights_packed or counts_writes:
            _cache[key] = entry
        if counts_writes:
            _known[id(w13)] = _Known(runner, int(topk), (hidden.dtype, *call), arrays)
    return runner.forward_routed(hidden, topk_ids, topk_weights, output)
