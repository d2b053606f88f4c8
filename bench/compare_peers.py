# SPDX-License-Identifier: Apache-2.0
# bench/compare_peers.py: what bench/compare.py times beside this library: PyTorch, and other MoE libraries where they are installed.
#
# A peer is a function of (layer, batch) that returns one call. A call returns the layer's output, or None where the peer times its two
# products alone. Preparing (sorting rows, padding, quantising inputs) happens outside the call where the peer's own timing is of products.
import importlib
import importlib.metadata

import torch


class Unavailable(Exception):
    """The peer cannot run this layer; the text says why."""


def quantize_groups(x):
    """e4m3 codes and scales of groups of 128 along the last axis."""
    groups = x.float().unflatten(-1, (-1, 128))
    # Divides by a tensor: for a Python number, torch multiplies by the reciprocal. A scale that differs in its last bit changes codes,
    # because quotients of bf16 numbers often lie midway between two codes.
    scale = groups.abs().amax(dim=-1, keepdim=True).clamp(min=1e-10) / torch.tensor(448.0, device=x.device)
    return (groups / scale).to(torch.float8_e4m3fn).flatten(-2), scale.squeeze(-1)


def quantize_rows(x):
    scale = x.float().abs().amax(dim=-1, keepdim=True).clamp(min=1e-10) / 448.0
    return (x.float() / scale).to(torch.float8_e4m3fn), scale.squeeze(-1)


def quantize_int8(x):
    """int8 codes and scales of rows along the last axis. Divides by a tensor, as quantize_groups does."""
    scale = x.float().abs().amax(dim=-1, keepdim=True).clamp(min=1e-10) / torch.tensor(127.0, device=x.device)
    return (x.float() / scale).round().clamp(-127, 127).to(torch.int8), scale.squeeze(-1)


def swiglu(h):
    gate, up = h.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def sorted_rows(batch, experts):
    """Rows of x in the order of their experts, and the end of each expert's rows."""
    flat = batch.ids.reshape(-1).long()
    order = torch.argsort(flat, stable=True)
    ends = torch.cumsum(torch.bincount(flat, minlength=experts), 0).to(torch.int32)
    return batch.x[order // batch.ids.shape[1]].contiguous(), flat[order].to(torch.int32), ends


def transformers_experts(layer, batch):
    """The experts module of transformers with its grouped_mm implementation: the whole layer."""
    if layer.dtype != "bf16":
        raise Unavailable("bf16 only")
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        hidden_size=layer.hidden, moe_intermediate_size=layer.inter, num_experts=layer.experts, num_experts_per_tok=layer.topk
    )
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        module = Qwen3MoeExperts(config)
    module.gate_up_proj = torch.nn.Parameter(layer.w13, requires_grad=False)
    module.down_proj = torch.nn.Parameter(layer.w2, requires_grad=False)
    ids, weights = batch.ids.long(), batch.weights.to(batch.x.dtype)
    return lambda: module(batch.x, ids, weights)


def grouped_mm(layer, batch):
    """Two grouped products on rows already sorted, SwiGLU between: no sort, no sum over the slots."""
    if layer.dtype != "bf16":
        raise Unavailable("bf16 only")
    rows, _, ends = sorted_rows(batch, layer.experts)
    w13, w2 = layer.w13.transpose(1, 2), layer.w2.transpose(1, 2)

    def call():
        torch._grouped_mm(swiglu(torch._grouped_mm(rows, w13, offs=ends)), w2, offs=ends)

    return call


def scaled_grouped_mm(layer, batch):
    """Two grouped fp8 products with a scale per row and per channel, on rows sorted and quantised before: the products alone."""
    if not layer.fp8:
        raise Unavailable("fp8 only")
    rows, _, ends = sorted_rows(batch, layer.experts)
    w13, s13 = layer.row_weights("w13")
    w2, s2 = layer.row_weights("w2")
    codes, scales = quantize_rows(rows)
    inner = torch.randn(rows.shape[0], layer.inter, device="cuda", dtype=torch.bfloat16)
    inner_codes, inner_scales = quantize_rows(inner)

    def product(a, scale_a, b, scale_b):
        torch._scaled_grouped_mm(a, b.transpose(1, 2), scale_a, scale_b, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True)

    def call():
        product(codes, scales, w13, s13)
        product(inner_codes, inner_scales, w2, s2)

    return call


def fused_experts(layer, batch, function):
    """vLLM's and sglang's kernel: the whole layer."""
    if layer.fp8:
        return lambda: function(
            *(batch.x, layer.w13, layer.w2, batch.weights, batch.ids),
            **{"use_fp8_w8a8": True, "w1_scale": layer.s13, "w2_scale": layer.s2, "block_shape": [128, 128]},
        )
    if layer.dtype == "int8":
        return lambda: function(
            *(batch.x, layer.w13, layer.w2, batch.weights, batch.ids),
            **{"use_int8_w8a8": True, "per_channel_quant": True, "w1_scale": layer.s13, "w2_scale": layer.s2},
        )
    return lambda: function(batch.x, layer.w13, layer.w2, batch.weights, batch.ids)


def vllm(layer, batch):
    return fused_experts(layer, batch, importlib.import_module("vllm.model_executor.layers.fused_moe").fused_experts)


def sglang(layer, batch):
    if layer.dtype != "bf16":
        raise Unavailable("bf16 only here")
    module = importlib.import_module("sglang.srt.layers.moe.fused_moe_triton.fused_moe")
    return lambda: module.fused_experts_impl(batch.x, layer.w13, layer.w2, batch.weights, batch.ids)


def deep_gemm(layer, batch):
    """DeepGEMM's two contiguous grouped products, rows padded to its alignment: the products alone."""
    if layer.dtype == "int8":
        raise Unavailable("bf16 and fp8 only")
    library = importlib.import_module("deep_gemm")
    rows, owners, _ = sorted_rows(batch, layer.experts)
    alignment = library.get_m_alignment_for_contiguous_layout()
    counts = torch.bincount(owners.long(), minlength=layer.experts).tolist()
    places, ids, start = [], [], 0
    for expert, count in enumerate(counts):
        padded = (count + alignment - 1) // alignment * alignment
        places.append(torch.arange(start, start + count))
        ids.append(torch.full((padded,), expert, dtype=torch.int32))
        start += padded
    a = torch.zeros(start, layer.hidden, device="cuda", dtype=torch.bfloat16)
    a[torch.cat(places).cuda()] = rows
    indices = torch.cat(ids).cuda()
    inner = torch.randn(start, layer.inter, device="cuda", dtype=torch.bfloat16)
    h = torch.empty(start, 2 * layer.inter, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(start, layer.hidden, device="cuda", dtype=torch.bfloat16)
    if layer.fp8:
        run, left, right = library.m_grouped_fp8_gemm_nt_contiguous, quantize_groups(a), quantize_groups(inner)
        first, second = (layer.w13, layer.s13), (layer.w2, layer.s2)
    else:
        run, left, right = library.m_grouped_bf16_gemm_nt_contiguous, a, inner
        first, second = layer.w13, layer.w2

    def call():
        run(left, first, h, indices)
        run(right, second, out, indices)

    return call


# Name, module that must be importable, whether the whole layer is timed, function.
PEERS = [
    ("transformers", "transformers", True, transformers_experts),
    ("2 grouped_mm", "torch", False, grouped_mm),
    ("2 scaled_grouped_mm", "torch", False, scaled_grouped_mm),
    ("vllm", "vllm", True, vllm),
    ("sglang", "sglang", True, sglang),
    ("deep_gemm", "deep_gemm", False, deep_gemm),
]


def probe():
    """(peers that can be imported, {peer: version or why not})."""
    found, said = [], {}
    for peer in PEERS:
        name, module = peer[0], peer[1]
        try:
            importlib.import_module(module)
            said[name] = importlib.metadata.version(module)
            found.append(peer)
        except Exception as error:  # an import may fail in any way
            said[name] = f"absent: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return found, said
