# SPDX-License-Identifier: Apache-2.0
# bench/compare_w4.py: the peers of bench/compare.py with 4- or 8-bit weights and bf16 activations: Marlin and triton_kernels as vLLM 0.26
# carries them. Only calls of their functions, which were read at version 0.26.0.
import dataclasses
import importlib
import math

import torch
from compare_layers import Candidate
from compare_vllm import MODULES, OBTAINED, fused_moe, vllm

QUANTIZATION = "model_executor.layers.quantization.utils"


@dataclasses.dataclass
class MarlinWeights:
    """Arguments of fused_marlin_moe; hidden: what x is padded to."""

    hidden: int
    arguments: dict


class Marlin(Candidate):
    """fused_marlin_moe over moe_wna16_marlin_gemm of vLLM's compiled _moe_C: the whole layer. Sizes are padded as vLLM pads them (gpt-oss:
    2880 to 3072 and 2944); x is padded before the timed region, which vLLM does in each call."""

    name, dtypes, modules, obtained = "vllm marlin", ("mxfp4", "int4", "int4_32", "nvfp4", "int8"), MODULES, OBTAINED

    def activations(self, dtype):
        return "bf16"

    def load(self):
        operators = vllm("_custom_ops")
        if not hasattr(torch.ops._moe_C, "moe_wna16_marlin_gemm"):
            raise ImportError("vLLM's compiled _moe_C has no moe_wna16_marlin_gemm: it was built for another torch, or without CUDA")
        return [
            operators,
            fused_moe("experts.marlin_moe").fused_marlin_moe,
            vllm(f"{QUANTIZATION}.marlin_utils"),
            vllm(f"{QUANTIZATION}.marlin_utils_fp4"),
            vllm("scalar_type").scalar_types,
            fused_moe("activation").MoEActivation,
        ]

    def prepare(self, layer):
        operators, _, layout, fp4, types, activation = self.load()
        hidden, inter = marlin_sizes(layer)
        bits = 8 if layer.dtype == "int8" else 4
        group = -1 if layer.dtype == "int8" else layer.group("w13")
        arguments = {"quant_type_id": {"int8": types.uint8b128, "int4": types.uint4b8, "int4_32": types.uint4b8}.get(
            layer.dtype, types.float4_e2m1f).id}  # fmt: skip
        no_order = torch.empty(0, dtype=torch.int32, device=layer.device)
        for mine, theirs in (("w13", "w1"), ("w2", "w2")):
            rows, cols = (2 * inter, hidden) if mine == "w13" else (hidden, inter)
            codes, scales, bias = marlin_operands(layer, mine, hidden, inter)
            packed, permuted = [], []
            factor = fp4._nvfp4_compute_scale_factor(scales, torch.bfloat16) if layer.dtype == "nvfp4" else None
            for e in range(layer.experts):
                words = codes(e).view(torch.int32).t().contiguous()
                packed.append(operators.gptq_marlin_repack(b_q_weight=words, perm=no_order, size_k=cols, size_n=rows, num_bits=bits))
                s = layout.marlin_permute_scales(s=scales[e].t().contiguous(), size_k=cols, size_n=rows, group_size=group)
                if layer.dtype == "mxfp4":
                    s = fp4.mxfp4_marlin_process_scales(s)
                elif layer.dtype == "nvfp4":
                    s = fp4.nvfp4_marlin_process_scales(s, scale_factor=factor, a_dtype=torch.bfloat16)[0]
                permuted.append(s)
            arguments[theirs] = torch.stack(packed)
            arguments[f"{theirs}_scale"] = torch.stack(permuted)
            if layer.dtype == "nvfp4":
                total = getattr(layer, "g" + mine[1:])
                name = "global_scale1" if mine == "w13" else "global_scale2"
                arguments[name] = fp4.nvfp4_marlin_process_global_scale(total, torch.bfloat16) / factor
            if bias is not None:
                bias = torch.stack([layout.marlin_permute_bias(b) for b in bias])
            arguments["bias1" if mine == "w13" else "bias2"] = bias
        arguments["workspace"] = layout.marlin_make_workspace_new(arguments["w1"].device, 4)
        act = layer.activation
        arguments["activation"] = activation.SILU
        if act.limit is not None:
            arguments["activation"] = activation.SWIGLUOAI_UNINTERLEAVE
            arguments |= {"clamp_limit": act.limit, "gemm1_alpha": act.alpha, "gemm1_beta": act.beta}
        return MarlinWeights(hidden, arguments)

    def call(self, prepared, layer, batch):
        operators, function = self.load()[:2]
        x = torch.nn.functional.pad(batch.x, (0, prepared.hidden - layer.hidden)).contiguous()
        out = torch.empty_like(x)

        def add_slots(slots, y, ids, expert_map):  # as MarlinExperts.moe_sum
            operators.moe_sum(slots, y)
            return y

        def run():
            function(
                hidden_states=x, topk_weights=batch.weights, topk_ids=batch.ids, moe_sum=add_slots, output=out, **prepared.arguments
            )  # fmt: skip
            return out[:, : layer.hidden]

        return run


def marlin_sizes(layer):
    """Hidden and intermediate size that Marlin's tiles take: of mxfp4 multiples of 256 and 128, as vLLM rounds them; else of 128, and of 64
    and whole groups."""
    group = layer.group("w13") if layer.dtype != "int8" else 1
    if layer.dtype == "mxfp4":
        return up(layer.hidden, 256), up(layer.inter, 128)
    return up(layer.hidden, 128), up(layer.inter, math.lcm(64, group))


def up(value, multiple):
    return -(-value // multiple) * multiple


def marlin_operands(layer, name, hidden, inter):
    """(codes of one expert as bytes [rows, padded cols in bytes], scales of all in bf16 [E, rows, groups], biases in bf16), padded with
    zeros: codes of any value whose scales are zero."""
    codes, scales = getattr(layer, name), getattr(layer, "s" + name[1:])
    halves = 2 if name == "w13" else 1
    rows = inter if name == "w13" else hidden
    cols = hidden if name == "w13" else inter
    if layer.dtype == "mxfp4":
        scales = torch.exp2(scales.float() - 127)
    scales = scales.unsqueeze(-1) if layer.dtype == "int8" else scales
    have = codes.shape[1] // halves
    group = cols if layer.dtype == "int8" else layer.group(name)

    def pad(v, width):
        v = v.unflatten(-2, (halves, have))
        return torch.nn.functional.pad(v, (0, width - v.shape[-1], 0, rows - have)).flatten(-3, -2)

    def expert(e):
        part = codes[e].view(torch.uint8)
        if layer.dtype == "int8":
            part = part ^ 128  # two's complement to 128 + code
        return pad(part, cols if layer.dtype == "int8" else cols // 2).contiguous()

    scales = pad(scales.float(), cols // group).to(torch.bfloat16)
    bias = getattr(layer, "b" + name[1:])
    if bias is not None:
        bias = pad(bias.unsqueeze(-1), 1).squeeze(-1).to(torch.bfloat16)
    return expert, scales, bias


class TritonKernels(Candidate):
    """vLLM's make_routing_data and the two matmul_ogs of its triton_kernels, with its Hopper layouts: the whole layer. The fused activation
    is gpt-oss's; with alpha 1, no limit and a bias of -1 on the up rows it is SwiGLU."""

    name, dtypes, modules, obtained = "triton_kernels", ("mxfp4",), MODULES, OBTAINED

    def load(self):
        vllm("utils.import_utils").import_triton_kernels()
        return [
            fused_moe("experts.gpt_oss_triton_kernels_moe"),
            vllm(f"{QUANTIZATION}.mxfp4_utils")._swizzle_mxfp4,
            fused_moe("config").mxfp4_w4a16_moe_quant_config,
            importlib.import_module("triton_kernels.matmul_ogs"),  # vLLM has made the name importable
        ]

    def prepare(self, layer):
        _, swizzle, config, products = self.load()

        def stored(codes, scales):
            weight, flex, scale = swizzle(codes.clone(), scales.clone())
            return weight, products.PrecisionConfig(weight_scale=scale, flex_ctx=products.FlexCtx(rhs_data=flex))

        w13, scale13 = stored(interleaved(layer.w13), interleaved(layer.s13))
        w2, scale2 = stored(layer.w2, layer.s2)
        bias13, alpha, limit = triton_activation(layer)
        bias2 = layer.b2 if layer.b2 is not None else torch.zeros(layer.experts, layer.hidden, device=layer.device)
        quant = config(w1_scale=scale13, w2_scale=scale2, w1_bias=bias13, w2_bias=bias2)
        return {"w1": w13, "w2": w2, "quant_config": quant, "swiglu_alpha": alpha, "swiglu_limit": limit}

    def call(self, prepared, layer, batch):
        layers = self.load()[0]
        ids, order = batch.ids.long().sort(dim=1)  # its routing takes a token's experts in order
        weights, out = batch.weights.gather(1, order), torch.empty_like(batch.out)

        def run():
            routing = layers.make_routing_data(ids, weights, layer.experts)
            return layers.triton_kernel_fused_experts(
                out, batch.x, prepared["w1"], prepared["w2"], *routing, topk=layer.topk,
                **{name: value for name, value in prepared.items() if name not in ("w1", "w2")},
            )  # fmt: skip

        return run


def interleaved(v):
    """[E, 2I, ...] from gate rows before up rows to gate 0, up 0, gate 1, up 1, ..."""
    gate, up_rows = v.chunk(2, dim=1)
    return torch.stack((gate, up_rows), dim=2).flatten(1, 2)


def triton_activation(layer):
    """(bias of w13 in the interleaved order, alpha, limit) with which gate sigmoid(alpha gate) (up + 1) is the layer's activation."""
    act = layer.activation
    bias = layer.b13 if layer.b13 is not None else torch.zeros(layer.experts, 2 * layer.inter, device=layer.device)
    bias = bias.clone()
    bias[:, layer.inter :] += act.beta - 1.0
    return interleaved(bias), act.alpha, 1e30 if act.limit is None else act.limit
