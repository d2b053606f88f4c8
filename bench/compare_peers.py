# SPDX-License-Identifier: Apache-2.0
# bench/compare_peers.py: the peers of bench/compare.py that are PyTorch's, transformers' and sglang's, the list of all, and which are
# installed.
#
# A peer is a subclass of Candidate (compare_layers.py). Preparing (sorting rows, padding, quantising inputs) happens outside the call where
# the peer's two products alone are timed.
import importlib.metadata

import compare_vllm
import compare_w4
import torch
from compare_layers import SWIGLU, Candidate, Products, as_read, quantize_rows


def sorted_rows(batch, experts):
    """Rows of x in the order of their experts, each row's expert, and the end of each expert's rows."""
    flat = batch.ids.reshape(-1).long()
    order = torch.argsort(flat, stable=True)
    ends = torch.cumsum(torch.bincount(flat, minlength=experts), 0).to(torch.int32)
    return batch.x[order // batch.ids.shape[1]].contiguous(), flat[order].to(torch.int32), ends


class Transformers(Candidate):
    """The experts module of transformers with its grouped_mm implementation: the whole layer."""

    name, dtypes, modules = "transformers", ("bf16",), ("transformers",)
    obtained = "pip install transformers"

    def prepare(self, layer):
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
        return module

    def call(self, prepared, layer, batch):
        ids, weights = batch.ids.long(), batch.weights.to(batch.x.dtype)
        return lambda: prepared(batch.x, ids, weights)


class GroupedMm(Candidate):
    """Two grouped products on rows already sorted, SwiGLU between: no sort, no sum over the slots."""

    name, dtypes, whole = "2 grouped_mm", ("bf16",), False

    def call(self, prepared, layer, batch):
        rows, owners, ends = sorted_rows(batch, layer.experts)
        w13, w2 = layer.w13.transpose(1, 2), layer.w2.transpose(1, 2)

        def run():
            h = torch._grouped_mm(rows, w13, offs=ends)
            inner = SWIGLU(h)
            return h, torch._grouped_mm(inner, w2, offs=ends), inner

        return Products(run, rows, owners, None, run)


class ScaledGroupedMm(Candidate):
    """Two grouped fp8 products with a scale per row and per channel, on rows sorted and quantised before: the products alone."""

    name, dtypes, whole = "2 scaled_grouped_mm", ("fp8",), False

    def prepare(self, layer):
        return {name: layer.row_weights(name) for name in ("w13", "w2")}

    def call(self, prepared, layer, batch):
        rows, owners, ends = sorted_rows(batch, layer.experts)
        inner = torch.randn(rows.shape[0], layer.inter, device=layer.device, dtype=torch.bfloat16)
        quantised = {"w13": quantize_rows(rows), "w2": quantize_rows(inner)}

        def product(name):
            (a, scale_a), (b, scale_b) = quantised[name], prepared[name]
            return torch._scaled_grouped_mm(
                a, b.transpose(1, 2), scale_a, scale_b, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
            )

        def read(v):
            codes, scale = quantize_rows(v)
            return codes.float() * scale.unsqueeze(-1)

        def run():
            return product("w13"), product("w2")

        return Products(run, rows, owners, inner, run, read, lambda name, e: prepared[name][0][e].float() * prepared[name][1][e][:, None])


class Sglang(Candidate):
    """sglang's Triton kernel: the whole layer."""

    name, dtypes, modules = "sglang", ("bf16",), ("sglang", "sglang.srt.layers.moe.fused_moe_triton.fused_moe")
    obtained = "pip install sglang"

    def call(self, prepared, layer, batch):
        module = self.load()[-1]
        return lambda: module.fused_experts_impl(batch.x, layer.w13, layer.w2, batch.weights, batch.ids)


class DeepGemmContiguous(Candidate):
    """DeepGEMM's two contiguous grouped products, an expert's rows padded to 128 with owner -1, scales of the rows in its layout: the
    products alone."""

    name, dtypes, whole = "DG contiguous 2 GEMMs", ("bf16", "fp8"), False
    modules, obtained = compare_vllm.MODULES, compare_vllm.OBTAINED

    def load(self):
        return [compare_vllm.deep_gemm()]

    def refuses(self, layer, tokens):
        return "fewer than 256 rows" if tokens * layer.topk < 256 else None

    def call(self, prepared, layer, batch):
        library = self.load()[0]
        rows, owners, _ = sorted_rows(batch, layer.experts)
        place, indices = padded_places(owners, layer.experts)
        a = torch.zeros(indices.shape[0], layer.hidden, device=layer.device, dtype=torch.bfloat16)
        a[place] = rows
        inner = torch.randn(indices.shape[0], layer.inter, device=layer.device, dtype=torch.bfloat16)
        h = torch.empty(indices.shape[0], 2 * layer.inter, device=layer.device, dtype=torch.bfloat16)
        out = torch.empty(indices.shape[0], layer.hidden, device=layer.device, dtype=torch.bfloat16)
        compare_vllm.set_alignment(library, 128)
        run, first, second = compare_vllm.two_products(library, layer, a, inner, "contiguous")

        def both():
            run(*first, h, indices)
            run(*second, out, indices)

        return Products(both, rows, owners, inner[place], lambda: (h[place], out[place]), lambda v: as_read(layer.dtype, v))


class DeepGemmMasked(Candidate):
    """DeepGEMM's two masked grouped products, as many rows an expert as the fullest has, in 64s: the products alone."""

    name, dtypes, whole = "DG masked 2 GEMMs", ("bf16", "fp8"), False
    modules, obtained = compare_vllm.MODULES, compare_vllm.OBTAINED

    def load(self):
        return [compare_vllm.deep_gemm()]

    def refuses(self, layer, tokens):
        return "more than 1024 tokens" if tokens > 1024 else None

    def call(self, prepared, layer, batch):
        library = self.load()[0]
        rows, owners, _ = sorted_rows(batch, layer.experts)
        owner = owners.long()
        counts = torch.bincount(owner, minlength=layer.experts)
        most = (int(counts.max()) + 63) // 64 * 64
        slot = torch.arange(rows.shape[0], device=layer.device) - (torch.cumsum(counts, 0) - counts)[owner]
        a = torch.zeros(layer.experts, most, layer.hidden, device=layer.device, dtype=torch.bfloat16)
        a[owner, slot] = rows
        inner = torch.randn(layer.experts, most, layer.inter, device=layer.device, dtype=torch.bfloat16)
        h = torch.empty(layer.experts, most, 2 * layer.inter, device=layer.device, dtype=torch.bfloat16)
        out = torch.empty(layer.experts, most, layer.hidden, device=layer.device, dtype=torch.bfloat16)
        masked, expected = counts.to(torch.int32), max(1, -(-rows.shape[0] // layer.experts))
        run, first, second = compare_vllm.two_products(library, layer, a, inner, "masked")

        def both():
            run(*first, h, masked, expected)
            run(*second, out, masked, expected)

        def outputs():
            return h[owner, slot], out[owner, slot]

        return Products(both, rows, owners, inner[owner, slot], outputs, lambda v: as_read(layer.dtype, v))


def padded_places(owners, experts, alignment=128):
    """Where each sorted row lies once every expert's rows are padded, and the owner of each padded row, -1 beyond an expert's rows."""
    counts = torch.bincount(owners.long(), minlength=experts)
    padded = (counts + alignment - 1) // alignment * alignment
    start = torch.cumsum(padded, 0) - padded
    place = torch.arange(owners.shape[0], device=owners.device) + (start - (torch.cumsum(counts, 0) - counts))[owners.long()]
    indices = torch.full((int(padded.sum()),), -1, device=owners.device, dtype=torch.int32)
    indices[place] = owners
    return place, indices


PEERS = [
    Transformers(),
    GroupedMm(),
    ScaledGroupedMm(),
    compare_vllm.VllmTriton(),
    compare_vllm.VllmDeepGemm(),
    compare_w4.Marlin(),
    compare_w4.TritonKernels(),
    Sglang(),
    DeepGemmContiguous(),
    DeepGemmMasked(),
]


def probe(peers):
    """(the peers whose modules can be imported, {name: version, or why it is missing and how it is obtained})."""
    found, said = [], {}
    for peer in peers:
        try:
            peer.load()
            said[peer.name] = version(peer.modules[0])
            found.append(peer)
        except Exception as error:  # an import may fail in any way
            why = (str(error).splitlines() or [""])[0]
            said[peer.name] = f"missing: {type(error).__name__}: {why}" + (f". It comes with: {peer.obtained}" if peer.obtained else "")
    return found, said


def version(module):
    try:
        return importlib.metadata.version(module)
    except importlib.metadata.PackageNotFoundError:
        return "of an unknown version"
