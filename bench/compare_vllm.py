# SPDX-License-Identifier: Apache-2.0
# bench/compare_vllm.py: vLLM 0.26's Triton layer and DeepGEMM layer as peers of bench/compare.py, and the DeepGEMM that it carries. Only
# calls of its functions. They were read at version 0.26.0, the last for torch 2.11; other versions may have moved them.
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from unittest import mock

import torch
from compare_layers import Candidate, quantize_groups

MODULES = ("vllm",)
OBTAINED = (
    "pip download --no-deps vllm==0.26.0 (for torch 2.11, CUDA 13), unpacked with its dist-info into a folder of PYTHONPATH; and pydantic"
)
BLOCK = [128, 128]

# What vLLM imports for serving and its layers do not use. Absent ones become empty modules, so that the wheel alone is enough.
SERVING = frozenset(
    """PIL aiohttp anthropic blake3 cachetools cbor2 compressed_tensors cpuinfo depyf diskcache fastapi gguf ijson lark llguidance
    lm_format_enforcer mcp mistral_common model_hosting_container_standards msgspec numba openai openai_harmony opentelemetry outlines_core
    partial_json_parser prometheus_client prometheus_fastapi_instrumentator py_cpuinfo pybase64 pycountry pydantic_settings
    python_json_logger ray requests setproctitle starlette urllib3 uvicorn watchfiles xgrammar zmq""".split()
)


class EmptyModule(types.ModuleType):
    """Any attribute is a mock."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = mock.MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class EmptyModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of SERVING that nothing before it found. `used`: their names."""

    def __init__(self):
        self.used = set()

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in SERVING:
            return None
        self.used.add(name.split(".")[0])
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return EmptyModule(spec.name)

    def exec_module(self, module):
        pass


EMPTY = EmptyModules()


def vllm(name):
    """A module of vLLM, whose serving dependencies may be absent."""
    if importlib.util.find_spec("vllm") is None:
        raise ModuleNotFoundError("No module named 'vllm'")
    os.environ.setdefault("VLLM_USE_DEEP_GEMM_E8M0", "0")  # float32 scales, which Hopper's kernels read
    if EMPTY not in sys.meta_path:
        sys.meta_path.append(EMPTY)
    return importlib.import_module(f"vllm.{name}")


def fused_moe(name):
    return vllm(f"model_executor.layers.fused_moe.{name}")


class VllmTriton(Candidate):
    """vLLM's Triton kernels, fused_experts_impl: the whole layer. int8: weights per channel, rows quantised inside."""

    name, dtypes, modules, obtained = "vllm triton", ("bf16", "fp8", "int8"), MODULES, OBTAINED

    def load(self):
        return [fused_moe("fused_moe")]

    def call(self, prepared, layer, batch):
        function, options = self.load()[0].fused_experts_impl, {}
        if layer.dtype != "bf16":
            options = {"w1_scale": layer.s13, "w2_scale": layer.s2}
            options |= {"use_fp8_w8a8": True, "block_shape": BLOCK} if layer.fp8 else {"use_int8_w8a8": True, "per_channel_quant": True}
        return lambda: function(batch.x, layer.w13, layer.w2, batch.weights, batch.ids, **options)


class VllmDeepGemm(Candidate):
    """The steps of vLLM's DeepGemmExperts.apply after the quantisation of its prepare step, by its functions: the whole layer."""

    name, dtypes, modules, obtained = "vllm deep_gemm", ("fp8",), MODULES, OBTAINED

    def load(self):
        return [
            fused_moe("deep_gemm_utils"),
            fused_moe("utils").moe_kernel_quantize_input,
            vllm("model_executor.layers.quantization.utils.fp8_utils").silu_mul_per_token_group_quant_fp8_colmajor,
            vllm("utils.deep_gemm"),
        ]

    def refuses(self, layer, tokens):
        return "fewer than 128 tokens, where vLLM takes its Triton layer" if tokens < 128 else None

    def call(self, prepared, layer, batch):
        steps, quantize, activate, library = self.load()
        experts, wide, hidden = layer.w13.shape
        e4m3 = torch.float8_e4m3fn
        alignment = library.get_mk_alignment_for_contiguous_layout()[0]
        rows, _ = steps.compute_aligned_M_and_alignment(
            M=batch.x.shape[0], num_topk=layer.topk, local_num_experts=experts, alignment=alignment, expert_tokens_meta=None
        )
        first = torch.empty(rows * max(wide // 2, hidden), device=layer.device, dtype=torch.bfloat16)
        second = torch.empty(rows * max(wide, hidden), device=layer.device, dtype=torch.bfloat16)
        codes_in = first.view(e4m3)[: rows * hidden].view(rows, hidden)
        codes_inner = first.view(e4m3)[: rows * (wide // 2)].view(rows, wide // 2)
        h, slots = second[: rows * wide].view(rows, wide), second[: rows * hidden].view(rows, hidden)

        def run():
            codes, scales = quantize(A=batch.x, A_scale=None, quant_dtype=e4m3, per_act_token_quant=False, block_shape=BLOCK)
            codes, scales, owners, inverse, used = steps.deepgemm_moe_permute(
                aq=codes, aq_scale=scales, topk_ids=batch.ids, local_num_experts=experts, expert_map=None, expert_tokens_meta=None,
                aq_out=codes_in,
            )  # fmt: skip
            with library.mk_alignment_scope(used):
                library.m_grouped_fp8_gemm_nt_contiguous((codes, scales), (layer.w13, layer.s13), h, owners)
                inner, inner_scales = activate(input=h, output=codes_inner, use_ue8m0=False, group_size=128)
                library.m_grouped_fp8_gemm_nt_contiguous((inner, inner_scales), (layer.w2, layer.s2), slots, owners)
            steps.deepgemm_unpermute_and_reduce(
                a=slots, topk_ids=batch.ids, topk_weights=batch.weights, inv_perm=inverse, expert_map=None, output=batch.out
            )
            return batch.out

        return run


def deep_gemm():
    """DeepGEMM: vLLM's copy, else an installed one."""
    try:
        return vllm("third_party.deep_gemm")
    except ImportError:
        if importlib.util.find_spec("deep_gemm") is None:
            raise
        return importlib.import_module("deep_gemm")


def set_alignment(library, rows):
    """To how many rows an expert's part is padded, where the version lets one choose."""
    if hasattr(library, "set_mk_alignment_for_contiguous_layout"):
        library.set_mk_alignment_for_contiguous_layout(rows)


def two_products(library, layer, rows, inner, layout):
    """(the grouped product, operands of the first, of the second). fp8: rows quantised in groups of 128, scales in DeepGEMM's layout."""
    if not layer.fp8:
        run = getattr(library, f"m_grouped_bf16_gemm_nt_{layout}")
        return run, (rows, layer.w13), (inner, layer.w2)

    def quantised(v):
        codes, scales = quantize_groups(v)
        return codes, library.get_mn_major_tma_aligned_tensor(scales)

    run = getattr(library, f"m_grouped_fp8_gemm_nt_{layout}")
    return run, (quantised(rows), (layer.w13, layer.s13)), (quantised(inner), (layer.w2, layer.s2))
