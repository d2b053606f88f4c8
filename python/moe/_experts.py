# SPDX-License-Identifier: Apache-2.0
# python/moe/_experts.py: moe.experts, which keeps a runner for each set of weight arrays that it has seen.
from __future__ import annotations

import threading
import weakref
from ctypes import addressof
from ctypes import c_char as _one_byte
from typing import Any, Sequence

from . import _arrays
from ._errors import ArgumentError, ConfigError
from ._runner import (
    FLOAT32,
    IDS,
    Runner,
    _current_device,
    _forward_routed,
    _Tensor,
    as_operator,
    sharing_runner,
    torch,
    will_be_written,
)
from ._types import Array, ArrayT
from ._watched import observed, transformed

#: Longer inputs run in pieces of this many rows.
MAX_ROWS = 8192
_LEAST_ROWS = 64
#: Experts of a token; the library's bound.
MOST_TOPK = 32
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
    """The last call with some w13 whose arrays were all torch's or all numpy's: what must be the same for its runner to serve the next."""

    __slots__ = ("alone", "call", "device", "hidden", "kind", "others", "runner", "size", "topk", "weights")

    def __init__(self, runner: Runner, topk: int, kind: type, call: tuple, weights: list[Any], others: list[Any]) -> None:
        self.runner, self.topk, self.kind, self.call = runner, topk, kind, call
        self.hidden = int(weights[1].shape[1])
        self.size = runner.max_tokens * self.hidden
        self.device = runner._device if runner._guard else None  # that must be the current one; None: there is no other
        self.weights = _state(weights)
        self.others = _others(others)
        self.alone = all(array is None for array in others)

    def same_others(self, *arrays: Any) -> bool:
        return self.others == _others(arrays)


def _others(arrays: Sequence[Any]) -> tuple:
    """Of biases and scales, each of which may be None: which they are and their state."""
    return [id(array) for array in arrays], _state([array for array in arrays if array is not None])


_ARRAY = object()
_cache: dict[tuple, _Entry] = {}
_known: dict[int, _Known] = {}  # by id(w13)
_lock = threading.Lock()
_TENSOR = torch.Tensor if torch is not None else None
_NDARRAY = _arrays.NDARRAY
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
        elif array.__class__ is _NDARRAY or hasattr(array, "__array_interface__"):
            state.append(_address(array))
    return tuple(state)


def _address(array: Any) -> int:
    """Of numpy's data. __array_interface__ is made anew each time, in 1 us; a buffer takes a quarter, of one writable piece of memory."""
    try:
        return addressof(_one_byte.from_buffer(array))
    except (TypeError, ValueError):
        return array.__array_interface__["data"][0]


def _kind(arrays: list[Any]) -> type | None:
    """torch.Tensor if torch counts the writes to all arrays, numpy.ndarray if they are numpy's, None for others."""
    if torch is not None and all(isinstance(array, torch.Tensor) and not array.is_inference() for array in arrays):
        return _TENSOR
    return _NDARRAY if all(array.__class__ is _NDARRAY for array in arrays) else None


def clear_cache() -> None:
    """Frees the runners that `experts` keeps. CUDA graphs that were captured with them must not be replayed after this."""
    with _lock:
        _cache.clear()
        _known.clear()


def _operator(hidden: Any, topk_ids: Any, topk_weights: Any, w13: Any, w2: Any, activation: str, output: Any, settings: dict) -> Any:
    """The call as `moe::experts`."""
    return as_operator(lambda: torch.ops.moe.experts(hidden, topk_ids, topk_weights, w13, w2, activation, **settings), output,
                       hidden=hidden, topk_weights=topk_weights, w13=w13, w2=w2, w13_bias=settings["w13_bias"],
                       w2_bias=settings["w2_bias"])  # fmt: skip


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
    torch.compile traces a call, or anything else of torch watches it, it is the operator `moe::experts`.
    """
    watched = _TENSOR is not None and isinstance(hidden, _TENSOR) and observed()
    known = _known.get(id(w13))
    if known is not None and known.kind is hidden.__class__ is topk_ids.__class__ is topk_weights.__class__ and not watched:
        # The weights of the last call, neither moved nor, where that is counted, written since.
        if known.call == (hidden.dtype, id(w2), activation, alpha, beta, limit, situ_gate, situ_up, quantization, weight_on_input) and (
            known.alone if w13_bias is w2_bias is w13_scale is w2_scale is None
            else known.same_others(w13_bias, w2_bias, w13_scale, w2_scale)
        ):  # fmt: skip
            if known.kind is _NDARRAY:
                if (
                    hidden.ndim == topk_ids.ndim == 2 and hidden.size <= known.size and topk_ids.shape[1] == known.topk
                    and known.weights == (_address(w13), _address(w2))
                ):  # fmt: skip
                    with known.runner._turn:
                        return known.runner.forward_routed(hidden, topk_ids, topk_weights, output)
            elif (
                # Counts of elements, since a shape takes torch four times as long: the library refuses other dimensions and sizes.
                (size := hidden.numel()) <= known.size and topk_ids.numel() * known.hidden == size * known.topk
                and (size or topk_ids.shape[-1] == known.topk)
                and topk_ids.dtype in IDS and topk_weights.dtype is FLOAT32  # no conversion: straight into the library
                and not (_grad_enabled() and (hidden.requires_grad or topk_weights.requires_grad))  # type: ignore[attr-defined]
                and not (hidden.is_neg() or topk_weights.is_neg())  # type: ignore[attr-defined]
                and known.weights == (w13.data_ptr(), w13._version, w2.data_ptr(), w2._version)  # type: ignore[attr-defined]
                and (known.device is None or known.device == _current_device())
            ):  # fmt: skip
                runner = known.runner
                try:
                    if output is None:
                        output = _empty_like(hidden)
                    else:
                        will_be_written(output)
                    with runner._turn:
                        runner._last_stream = _forward_routed(runner._handle, hidden, topk_ids, topk_weights, output, -1)
                    return output
                except (RuntimeError, ValueError) as error:
                    if not transformed():
                        raise _arrays.explained(error, hidden=hidden, topk_ids=topk_ids, topk_weights=topk_weights, output=output) from None
    settings: dict[str, Any]
    if watched or (_TENSOR is not None and isinstance(hidden, _TENSOR) and transformed()):
        settings = {"alpha": alpha, "beta": beta, "limit": limit or 0.0, "w13_bias": w13_bias, "w2_bias": w2_bias, "w13_scale": w13_scale,
                    "w2_scale": w2_scale, "quantization": quantization, "weight_on_input": weight_on_input, "situ_gate": situ_gate,
                    "situ_up": situ_up}  # fmt: skip
        return _operator(hidden, topk_ids, topk_weights, w13, w2, activation, output, settings)
    others = [w13_bias, w2_bias, w13_scale, w2_scale]
    arrays = [w13, w2, *(array for array in others if array is not None)]
    for name, array in (("hidden", hidden), ("topk_ids", topk_ids)):  # the runner checks the rest of the call
        _arrays.check(name, array, 2)
    dtype = _arrays.dtype_name(hidden)
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ArgumentError(f"E_ARG: hidden: dtype is {dtype}, expected float32, bfloat16 or float16")
    topk = topk_ids.shape[1]
    call = (hidden.dtype, id(w2), activation, alpha, beta, limit, situ_gate, situ_up, quantization, weight_on_input)
    key = (id(w13), topk, *call, id(w13_bias), id(w2_bias), id(w13_scale), id(w2_scale))
    entry = _cache.get(key)
    if entry is None:
        settings = {}
        for name, given in (("w13", w13), ("w2", w2), ("w13_bias", w13_bias), ("w2_bias", w2_bias), ("w13_scale", w13_scale),
                            ("w2_scale", w2_scale)):  # fmt: skip
            if given is not None or name in ("w13", "w2"):
                _arrays.framework(given, name)  # an ArgumentError for an argument that is not an array
                settings[name] = _ARRAY
        _arrays.check("w13", w13, 3)
        most = min(int(w13.shape[0]), MOST_TOPK)
        if most and not 1 <= topk <= most:
            raise ConfigError(f"E_CONFIG: topk_ids: shape is {tuple(topk_ids.shape)}, expected 1 to {most} columns")
        settings.update(topk=int(topk), activation=activation, alpha=alpha, beta=beta, limit=limit, situ_gate=situ_gate, situ_up=situ_up,
                        quantization=quantization, dtype=dtype, weight_on_input=weight_on_input)  # fmt: skip
        entry = _Entry(arrays, key, settings)
    with _lock:
        _known.pop(id(w13), None)  # it would keep a runner alive whose weights have changed
        runner = entry.runner(int(hidden.shape[0]), arrays)
        kind = _kind(arrays)
        if kind is _TENSOR or not runner.weights_packed:  # writes to packed weights would not be noticed
            _cache[key] = entry
            if kind is not None:
                _known[id(w13)] = _Known(runner, int(topk), kind, call, [w13, w2], others)
    with runner._turn:
        return runner.forward_routed(hidden, topk_ids, topk_weights, output)
