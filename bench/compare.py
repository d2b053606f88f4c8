#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# bench/compare.py: this library's layer beside PyTorch's in one process: same inputs, both checked against float32, then timed in turns.
"""Usage: compare.py LIBRARY [--shapes a,b] [--tokens 1,8,...] [--dtype bf16|fp8] [--json FILE]

LIBRARY is bench/hopper_capi.cu as a shared object. Peers in bf16: two torch._grouped_mm on rows already sorted by expert with SwiGLU between
(no sort, no reduction), and the experts module of transformers with its grouped_mm implementation (the whole layer). Each candidate is
captured in a CUDA graph that runs every input set; graphs are replayed in turns (A, B, C, A, B, C, ...), so that all of them meet the same
clocks; the median over turns is reported, and the first replay after a pause as the single-shot time. x floor: time over max(useful
operations / sustained cuBLAS rate, least bytes / stream rate), both ceilings being measured here first.
"""
import argparse
import ctypes
import json
import time

import torch

SHAPES = {  # experts, hidden, intermediate, topk
    "mixtral-8x7b": (8, 4096, 14336, 2),
    "qwen3-30b-a3b": (128, 2048, 768, 8),
    "qwen3-235b-a22b": (128, 4096, 1536, 8),
    "deepseek-v3-ep8rank": (32, 7168, 2048, 1),
    "gpt-oss-120b": (128, 2880, 2880, 4),
}


class Library:
    def __init__(self, path):
        self.lib = ctypes.CDLL(path)
        self.lib.moe_hopper_create.restype = ctypes.c_void_p
        self.lib.moe_hopper_create.argtypes = [ctypes.c_int] * 5 + [ctypes.c_void_p] * 4
        self.lib.moe_hopper_workspace_bytes.restype = ctypes.c_longlong
        self.lib.moe_hopper_workspace_bytes.argtypes = [ctypes.c_void_p, ctypes.c_int]
        self.lib.moe_hopper_forward.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int] + [ctypes.c_void_p] * 3
        self.lib.moe_hopper_destroy.argtypes = [ctypes.c_void_p]

    def layer(self, fp8, experts, hidden, inter, topk, weights):
        w13, w2, s13, s2 = weights
        handle = self.lib.moe_hopper_create(2 if fp8 else 0, experts, hidden, inter, topk, w13.data_ptr(), w2.data_ptr(),
                                            s13.data_ptr() if fp8 else None, s2.data_ptr() if fp8 else None)
        assert handle, "moe_hopper_create failed"
        return handle

    def forward(self, handle, x, ids, weights, out, workspace):
        stream = torch.cuda.current_stream().cuda_stream
        status = self.lib.moe_hopper_forward(handle, x.data_ptr(), ids.data_ptr(), weights.data_ptr(), x.shape[0], out.data_ptr(),
                                             workspace.data_ptr(), stream)
        assert status == 0, "moe_hopper_forward failed"


def quantize_blocks(w):
    e, n, k = w.shape
    tiles = w.float().view(e, n // 128, 128, k // 128, 128)
    scale = tiles.abs().amax(dim=(2, 4)).clamp(min=1e-10) / 448.0
    codes = (tiles / scale[:, :, None, :, None]).to(torch.float8_e4m3fn).view(e, n, k)
    return codes.contiguous(), scale.contiguous()


def random_weights(experts, hidden, inter, fp8):
    w13 = torch.empty(experts, 2 * inter, hidden, device="cuda", dtype=torch.bfloat16)
    w2 = torch.empty(experts, hidden, inter, device="cuda", dtype=torch.bfloat16)
    w13.normal_(0, hidden**-0.5)
    w2.normal_(0, inter**-0.5)
    if not fp8:
        return w13, w2, None, None
    parts = [], [], [], []
    for e in range(experts):  # one expert at a time: the float32 copies are large
        c13, s13 = quantize_blocks(w13[e : e + 1])
        c2, s2 = quantize_blocks(w2[e : e + 1])
        for part, value in zip(parts, (c13, c2, s13, s2)):
            part.append(value)
    return tuple(torch.cat(p) for p in parts)


def random_routing(tokens, experts, topk, first):
    if tokens == 1:  # disjoint experts between sets, so that weights come from memory
        ids = torch.tensor([[(first * topk + j) * 5 % experts for j in range(topk)]], device="cuda", dtype=torch.int32)
    else:
        ids = torch.rand(tokens, experts, device="cuda").topk(topk, dim=1).indices.to(torch.int32)
    return ids.contiguous(), torch.softmax(torch.randn(tokens, topk, device="cuda"), dim=1).contiguous()


def reference(x, ids, weights, w13, w2, sample):
    """float32 by definition for the sampled tokens."""
    out = torch.zeros(len(sample), x.shape[1], device="cuda")
    inter = w2.shape[2]
    for i, t in enumerate(sample):
        for j in range(ids.shape[1]):
            e = int(ids[t, j])
            h = w13[e].float() @ x[t].float()
            out[i] += weights[t, j] * (w2[e].float() @ (torch.nn.functional.silu(h[:inter]) * h[inter:]))
    return out


def capture(run, repeats):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            run()
    return graph


def replay_ms(graph):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def in_turns(graphs, warm_ms, turns):
    """Median milliseconds of each graph's replay, and the first replay after 40 ms of idling."""
    single = {}
    for name, graph in graphs.items():
        replay_ms(graph)
        torch.cuda.synchronize()
        time.sleep(0.04)
        single[name] = replay_ms(graph)
    spent = 0.0
    while spent < warm_ms:
        for graph in graphs.values():
            spent += replay_ms(graph)
    times = {name: [] for name in graphs}
    for _ in range(turns):
        for name, graph in graphs.items():
            times[name].append(replay_ms(graph))
    return {name: sorted(t)[len(t) // 2] for name, t in times.items()}, single


def ceilings():
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    graph = capture(lambda: torch.mm(a, b.t()), 2)
    sustained, single = in_turns({"mm": graph}, 250, 21)
    flops = 2 * 2 * 8192**3
    result = {"bf16_tflops": flops / sustained["mm"] * 1e-9, "bf16_tflops_single": flops / single["mm"] * 1e-9}
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")
    graph = capture(lambda: torch._scaled_mm(a8, b8.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True), 2)
    sustained, single = in_turns({"mm": graph}, 250, 21)
    result |= {"fp8_tflops": flops / sustained["mm"] * 1e-9, "fp8_tflops_single": flops / single["mm"] * 1e-9}
    source = torch.empty(2**31, device="cuda", dtype=torch.bfloat16).zero_()
    target = torch.empty_like(source)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(3):
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
    result["copy_gbs"] = 2 * source.numel() * 2 / begin.elapsed_time(end) * 1e-6
    return result


def grouped_mm(x, ids, w13t, w2t):
    """Two grouped products on sorted rows; the sort is not timed."""
    experts = w13t.shape[0]
    flat = ids.reshape(-1).long()
    order = torch.argsort(flat, stable=True)
    rows = x[order // ids.shape[1]].contiguous()
    offsets = torch.cumsum(torch.bincount(flat, minlength=experts), 0).to(torch.int32)
    inter = w2t.shape[1]

    def run():
        h = torch._grouped_mm(rows, w13t, offs=offsets)
        return torch._grouped_mm(torch.nn.functional.silu(h[:, :inter]) * h[:, inter:], w2t, offs=offsets)

    return run


def transformers_experts(experts, hidden, inter, topk, w13, w2):
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(hidden_size=hidden, moe_intermediate_size=inter, num_experts=experts, num_experts_per_tok=topk)
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        module = Qwen3MoeExperts(config)
    module.gate_up_proj = torch.nn.Parameter(w13, requires_grad=False)
    module.down_proj = torch.nn.Parameter(w2, requires_grad=False)
    return module


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("--shapes", default="qwen3-30b-a3b,deepseek-v3-ep8rank")
    parser.add_argument("--tokens", default="1,8,64,256,1024,4096,16384")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.manual_seed(1)
    library = Library(args.library)
    fp8 = args.dtype == "fp8"
    top = ceilings()
    print("ceilings:", {k: round(v, 1) for k, v in top.items()}, flush=True)
    stream_bytes = 4472e9
    rate = (top["fp8_tflops"] if fp8 else top["bf16_tflops"]) * 1e12
    results = {"device": torch.cuda.get_device_name(), "dtype": args.dtype, "ceilings": top, "points": []}
    for shape in args.shapes.split(","):
        experts, hidden, inter, topk = SHAPES[shape]
        if fp8 and hidden % 128:
            continue
        weights = random_weights(experts, hidden, inter, fp8)
        layer = library.layer(fp8, experts, hidden, inter, topk, weights)
        module = None if fp8 else transformers_experts(experts, hidden, inter, topk, weights[0], weights[1])
        for tokens in map(int, args.tokens.split(",")):
            sets = 8 if tokens <= 64 else 4 if tokens <= 256 else 2
            xs = [torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]
            routing = [random_routing(tokens, experts, topk, s) for s in range(sets)]
            workspace = torch.full((library.lib.moe_hopper_workspace_bytes(layer, tokens) + 1024,), 255, device="cuda", dtype=torch.uint8)
            workspace = workspace[(-workspace.data_ptr()) % 1024 :]
            outs = [torch.full((tokens, hidden), float("nan"), device="cuda", dtype=torch.bfloat16) for _ in range(sets)]

            def ours():
                for x, (ids, w), out in zip(xs, routing, outs):
                    library.forward(layer, x, ids, w, out, workspace)

            candidates = {"this library": ours}
            if not fp8:
                pairs = [grouped_mm(x, ids, weights[0].transpose(1, 2), weights[1].transpose(1, 2)) for x, (ids, _) in zip(xs, routing)]
                candidates["2 grouped_mm"] = lambda: [run() for run in pairs]
                candidates["transformers"] = lambda: [module(x, ids.long(), w.to(x.dtype)) for x, (ids, w) in zip(xs, routing)]
            with torch.no_grad():
                errors = {}
                if tokens <= 4096 and not fp8:
                    sample = sorted({0, tokens - 1, tokens // 2, tokens // 3})
                    ours()
                    expected = reference(xs[0], *routing[0], weights[0], weights[1], sample)
                    errors["this library"] = float((outs[0][sample].float() - expected).norm() / expected.norm())
                    peer = module(xs[0], routing[0][0].long(), routing[0][1].to(torch.bfloat16))
                    errors["transformers"] = float((peer[sample].float() - expected).norm() / expected.norm())
                graphs, repeats = {}, {}
                for name, run in candidates.items():
                    try:
                        once = replay_ms(capture(run, 1))
                        repeats[name] = max(1, min(64, int(1.5 / max(once, 0.01)) + 1))
                        graphs[name] = capture(run, repeats[name])
                    except Exception as error:  # a peer that cannot run this point is left out, and said so
                        print(shape, tokens, name, "not run:", str(error).splitlines()[0], flush=True)
                medians, single = in_turns(graphs, 250 if tokens >= 1024 else 60, 15)
            hit = sum(len(torch.unique(ids)) for ids, _ in routing) / sets
            flops = 6 * tokens * topk * hidden * inter
            least = hit * 3 * hidden * inter * (1 if fp8 else 2) + 4 * tokens * hidden
            floor = 1e6 * max(flops / rate, least / stream_bytes)
            line = f"{shape:20s} {args.dtype} M{tokens:<6d} floor {floor:8.1f}"
            point = {"shape": shape, "tokens": tokens, "floor_us": floor, "errors": errors, "us": {}, "single_us": {}}
            for name in graphs:
                us = 1e3 * medians[name] / (repeats[name] * sets)
                point["us"][name] = us
                point["single_us"][name] = 1e3 * single[name] / (repeats[name] * sets)
                line += f" | {name} {us:8.1f} x{us / floor:.2f}"
            line += " | errors " + ", ".join(f"{v:.1e}" for v in errors.values())
            print(line, flush=True)
            results["points"].append(point)
            del graphs, candidates
        library.lib.moe_hopper_destroy(layer)
        del weights, module, xs, routing, workspace, outs
        torch.cuda.empty_cache()
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
