# SPDX-License-Identifier: Apache-2.0
# python/moe/_host.py: route, quantize and plan.
from __future__ import annotations

import importlib
from typing import Any, NamedTuple

from . import _arrays
from ._errors import ArgumentError, ConfigError, whole_number
from ._ffi import library
from ._runner import checked_router
from ._types import Array, ArrayT

#: Of `plan`; the library's bound of every size.
MOST_PHYSICAL = 1 << 24
_DTYPES = {(0, 8): "int8", (1, 8): "uint8", (2, 32): "float32", (2, 16): "float16", (4, 16): "bfloat16"}


class Routing(NamedTuple):
    """topk_ids: int32 [M, k]. topk_weights: float32 [M, k]. Arrays of the input's framework, as in the other answers below; a NamedTuple
    cannot state which one that is."""

    topk_ids: Any
    topk_weights: Any


class Quantized(NamedTuple):
    """Codes and scales of `quantize`; their shapes and dtypes are those that `Runner` takes for the scheme. scales is None for "none"."""

    codes: Any
    scales: Any


class Plan(NamedTuple):
    """physical_to_logical: int32 [L, P]. logical_to_physical: int32 [L, E, P - E + 1], padded with -1. replica_count: int32 [L, E]."""

    physical_to_logical: Any
    logical_to_physical: Any
    replica_count: Any


def route(
    logits: Array,
    topk: int,
    *,
    scoring: str = "softmax",
    order: str = "score_then_topk",
    selection: str = "topk",
    renorm: str = "none",
    renorm_eps: float = 1e-20,
    renorm_p: float = 1.0,
    routed_scaling_factor: float = 1.0,
    num_expert_group: int = 0,
    topk_group: int = 0,
    group_score: str = "max",
    logit_softcap: float = 0.0,
    sparsemixer_eps: float = 0.01,
    num_zero_experts: int = 0,
    zero_expert: str = "identity",
    degenerate: str = "uniform_first_k",
    correction_bias: Array | None = None,
    per_expert_scale: Array | None = None,
    hash_table: Array | None = None,
    token_ids: Array | None = None,
) -> Routing:
    """Chooses the experts of each token (docs/semantics/routing.md).

    Args:
        logits: [M, E], or [M, E + Z] with Z zero experts: float32, bfloat16 or float16.
        topk: k.
        scoring: "softmax", "sigmoid", "sqrtsoftplus" or "identity" of the logits.
        order: "score_then_topk" or "topk_then_score".
        selection: "topk", "hash_table" or "sparsemixer".
        renorm: of the k weights: "none", "sum", "floor" or "p_norm", with renorm_eps and renorm_p.
        routed_scaling_factor: multiplies the weights.
        num_expert_group, topk_group: the experts lie in that many groups, of which the best topk_group are searched; 0: no groups.
        group_score: of a group: "max", or "top2_sum" (DeepSeek-V3).
        logit_softcap: c of c tanh(logit / c); 0: off.
        sparsemixer_eps: of "sparsemixer".
        num_zero_experts: Z, experts behind the others that compute nothing; zero_expert: their output, "identity" (the input) or "none".
        degenerate: what a row without a finite logit gets: "uniform_first_k", or "drop", no expert.
        correction_bias: float32 [E + Z], for the choice only.
        per_expert_scale: float32 [E], multiplies the weights.
        hash_table: int64 [vocabulary, k], with token_ids int64 [M].

    Returns:
        Routing(topk_ids int32 [M, k], topk_weights float32 [M, k]), of the framework of logits.
    """
    _arrays.check("logits", logits, 2)
    topk = whole_number("topk", topk)
    num_zero_experts = whole_number("num_zero_experts", num_zero_experts)
    width = int(logits.shape[1])
    if width < 1:
        raise ArgumentError(f"E_ARG: logits: shape is {tuple(logits.shape)}, expected at least 1 column")
    if not 0 <= num_zero_experts < width:
        raise ConfigError(f"E_CONFIG: num_zero_experts: {num_zero_experts} is out of range [0, {width - 1}], logits has {width} columns")
    settings = checked_router({
        "num_experts": width - num_zero_experts, "topk": topk, "scoring": scoring, "order": order, "selection": selection,
        "renorm": renorm, "renorm_eps": renorm_eps, "renorm_p": renorm_p, "routed_scaling_factor": routed_scaling_factor,
        "num_expert_group": num_expert_group, "topk_group": topk_group, "group_score": group_score, "logit_softcap": logit_softcap,
        "sparsemixer_eps": sparsemixer_eps, "num_zero_experts": num_zero_experts, "zero_expert": zero_expert, "degenerate": degenerate,
    })  # fmt: skip
    for name, array in (("correction_bias", correction_bias), ("per_expert_scale", per_expert_scale), ("hash_table", hash_table)):
        if array is not None:
            settings[name] = _arrays.export(array, name)
    chosen = min(max(topk, 0), width)  # a topk out of range is an error below
    ids = _arrays.empty(logits, (logits.shape[0], chosen), "int32")
    weights = _arrays.empty(logits, (logits.shape[0], chosen), "float32")
    tokens = None if token_ids is None else _arrays.export(token_ids, "token_ids")
    stream, _ = _arrays.stream(_arrays.framework(logits))
    library.route(settings, _arrays.export(logits, "logits"), tokens, _arrays.export(ids), _arrays.export(weights), stream)
    return Routing(_arrays.finish(ids, logits), _arrays.finish(weights, logits))


def quantize(matrix: Array, quantization: str) -> Quantized:
    """Quantises weights, on the host.

    Args:
        matrix: [rows, cols] or [n, rows, cols], float32, bfloat16 or float16, in host memory.
        quantization: a scheme that `Runner` takes. "none": the matrix itself, without scales.

    Returns:
        Quantized(codes, scales), of the framework of matrix, with the same n in front. fp8 codes are float8_e4m3fn with torch and uint8
        with numpy.
    """
    _arrays.check("matrix", matrix, 2, 3)
    if not isinstance(quantization, str):
        raise ArgumentError(f"E_ARG: quantization: is of type {type(quantization).__name__}, expected the name of a scheme")
    if quantization == "none":
        return Quantized(matrix, None)
    layout = [int(value) for value in library.quantized_layout(quantization, int(matrix.shape[-2]), int(matrix.shape[-1]))]
    code_cols, scale_rows, scale_cols = layout[:3]
    front = tuple(int(n) for n in matrix.shape[:-1])
    codes = _arrays.empty(matrix, (*front, code_cols), _DTYPES[layout[3], layout[4]])
    scales = None
    if scale_rows * scale_cols:
        scales = _arrays.empty(matrix, (*front[:-1], scale_rows, scale_cols), _DTYPES[layout[6], layout[7]])
    into = None if scales is None else _arrays.export(scales)
    library.quantize(quantization, _arrays.export(matrix, "matrix"), _arrays.export(codes), into)
    if quantization.startswith(("fp8", "mxfp8")) and _arrays.framework(matrix) == "torch":
        import torch

        codes = codes.view(torch.float8_e4m3fn)
    return Quantized(_arrays.finish(codes, matrix), None if scales is None else _arrays.finish(scales, matrix))


def nvfp4_scales(scales: ArrayT, global_scale: Array) -> ArrayT:
    """The scales of "nvfp4_w4a16" in the form that `Runner` takes: an expert's bytes in one row, the global scale behind the others.

    Args:
        scales: [E, N, K/16], float8_e4m3fn, or uint8 with the same bits: those of a checkpoint's matrices [N, K].
        global_scale: float32 [E], one for each matrix; it multiplies. A checkpoint that stores what divides has its reciprocal.

    Returns:
        uint8 [E, ...], of the framework and device of scales.
    """
    _arrays.check("scales", scales, 3)
    _arrays.check("global_scale", global_scale, 1)
    kind, count = _arrays.framework(scales), int(scales.shape[0])
    for name, array, dtypes in (("scales", scales, ("float8_e4m3fn", "uint8")), ("global_scale", global_scale, ("float32",))):
        if _arrays.dtype_name(array) not in dtypes:
            raise ArgumentError(f"E_ARG: {name}: dtype is {_arrays.dtype_name(array)}, expected {' or '.join(dtypes)}")
        if _arrays.framework(array) != kind or kind == "dlpack":
            expected = "torch, numpy, JAX or CuPy" if kind == "dlpack" else kind
            raise ArgumentError(f"E_ARG: {name}: is an array of {_arrays.framework(array)}, expected one of {expected}")
    if int(global_scale.shape[0]) != count:
        raise ArgumentError(f"E_ARG: global_scale: shape is {tuple(global_scale.shape)}, expected ({count},)")
    module: Any = importlib.import_module("jax.numpy" if kind == "jax" else kind)
    blocks: Any = scales
    globals_: Any = global_scale
    rows = blocks.reshape(count, int(blocks.shape[1]) * int(blocks.shape[2])).view(module.uint8)
    last = globals_.reshape(count, 1).view(module.uint8)
    return module.concatenate((rows, module.zeros_like(rows[:, : -rows.shape[1] % 4]), last), 1)


def plan(load: Array, num_physical: int, num_ranks: int = 1, num_nodes: int = 1, num_groups: int = 1) -> Plan:
    """Places experts by their load (docs/semantics/eplb.md), on the host.

    Args:
        load: [L, E], the tokens of each expert in each layer: float32, float64, int32 or int64.
        num_physical: P, physical experts over all ranks: a multiple of num_ranks, at least E.
        num_ranks, num_nodes: ranks of the group, and the nodes that hold them.
        num_groups: expert groups of the router.

    Returns:
        Plan(physical_to_logical, logical_to_physical, replica_count), of the framework of load.
    """
    _arrays.check("load", load, 2)
    num_physical = whole_number("num_physical", num_physical)
    if not 1 <= num_physical <= MOST_PHYSICAL:
        raise ArgumentError(f"E_ARG: num_physical: {num_physical} is out of range [1, {MOST_PHYSICAL}]")
    layers, num_experts = (int(n) for n in load.shape)
    counts = {"num_ranks": num_ranks, "num_nodes": num_nodes, "num_groups": num_groups}
    settings = {"num_physical": num_physical, **{name: whole_number(name, value) for name, value in counts.items()}}
    replicas = max(num_physical - num_experts + 1, 1)
    physical = _arrays.empty(load, (layers, num_physical), "int32")
    logical = _arrays.empty(load, (layers, num_experts, replicas), "int32")
    count = _arrays.empty(load, (layers, num_experts), "int32")
    library.plan(settings, _arrays.export(load, "load"), _arrays.export(physical), _arrays.export(logical), _arrays.export(count))
    return Plan(*(_arrays.finish(array, load) for array in (physical, logical, count)))
