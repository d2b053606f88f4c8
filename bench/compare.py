#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# bench/compare.py: this library's layer beside its peers in one process: same inputs, all checked against float32, then timed in turns.
"""Usage: compare.py LIBRARY [--shapes a,b] [--tokens 1,8,...] [--dtype bf16|fp8|int8] [--peers a,b] [--json FILE]

LIBRARY is bench/hopper_capi.cu as a shared object (target moe_hopper_capi). Peers are those of compare_peers.py that can be imported; the
others are named. Whole layers must agree with float32 on sampled tokens before they are timed: in bf16 within 5e-3 (peers 1e-2: they round
router weights and slots to bf16), in fp8 (against dequantised weights and equally quantised activations) within 1e-2, or 4e-2 below 8
tokens, where one code that rounds the other way is a large part, in int8 (likewise) within 5e-3 (peers 2e-2: they quantise an intermediate
rounded to bf16). fp8: weights per 128 x 128, x in bf16. int8: weights per channel; this library gets rows of x that are quantised per token
outside the timed region, as its dispatch delivers them, peers quantise bf16 rows themselves.
Each candidate is captured in a CUDA graph that runs every input set; graphs are replayed in turns (A, B, C, A, B, C, ...), so that all of
them meet the same clocks. Sustained: the median over the turns. Single-shot: the median of replays after 40 ms of idling. Floor: the larger
of useful operations over the sustained cuBLAS rate, measured here first, and least bytes over the stream rate. floor_plot.py draws the
JSON.
"""
import argparse
import ctypes
import json
import time

import compare_peers
import torch

SHAPES = {  # experts, hidden, intermediate, topk
    "mixtral-8x7b": (8, 4096, 14336, 2),
    "qwen3-30b-a3b": (128, 2048, 768, 8),
    "qwen3-235b-a22b": (128, 4096, 1536, 8),
    "deepseek-v3-ep8rank": (32, 7168, 2048, 1),
    "gpt-oss-120b": (128, 2880, 2880, 4),
}
STREAM_BYTES = 4472e9  # a read-only stream of 4 GiB
# docs/log/hopper.md; for the second floor in the JSON. int8: fp8's, which is nominally the same; it was not measured.
BASELINE_FLOPS = {"bf16": 679.8e12, "fp8": 1266e12, "int8": 1266e12}
SCHEMES = {"bf16": 0, "fp8": 2, "int8": 4}  # of moe_hopper_create
OURS = "this library"


class Library:
    """bench/hopper_capi.cu."""

    def __init__(self, path):
        self.lib = ctypes.CDLL(path)
        self.lib.moe_hopper_create.restype = ctypes.c_void_p
        self.lib.moe_hopper_create.argtypes = [ctypes.c_int] * 5 + [ctypes.c_void_p] * 4
        self.lib.moe_hopper_workspace_bytes.restype = ctypes.c_longlong
        self.lib.moe_hopper_workspace_bytes.argtypes = [ctypes.c_void_p, ctypes.c_int]
        self.lib.moe_hopper_forward.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_int] + [ctypes.c_void_p] * 3
        self.lib.moe_hopper_destroy.argtypes = [ctypes.c_void_p]

    def create(self, layer):
        scales = (None, None) if layer.dtype == "bf16" else (layer.s13.data_ptr(), layer.s2.data_ptr())
        sizes = (layer.experts, layer.hidden, layer.inter, layer.topk)
        handle = self.lib.moe_hopper_create(SCHEMES[layer.dtype], *sizes, layer.w13.data_ptr(), layer.w2.data_ptr(), *scales)
        assert handle, "moe_hopper_create failed"
        return handle

    def call(self, handle, layer, batch, workspace):
        rows, scales = compare_peers.quantize_int8(batch.x) if layer.dtype == "int8" else (batch.x, None)

        def run():
            status = self.lib.moe_hopper_forward(
                handle,
                rows.data_ptr(),
                None if scales is None else scales.data_ptr(),
                batch.ids.data_ptr(),
                batch.weights.data_ptr(),
                batch.x.shape[0],
                batch.out.data_ptr(),
                workspace.data_ptr(),
                torch.cuda.current_stream().cuda_stream,
            )
            assert status == 0, "moe_hopper_forward failed"
            return batch.out

        return run

    def workspace(self, handle, tokens):
        """Poisoned, 1024-byte aligned."""
        bytes_ = torch.full((self.lib.moe_hopper_workspace_bytes(handle, tokens) + 1024,), 255, device="cuda", dtype=torch.uint8)
        return bytes_[(-bytes_.data_ptr()) % 1024 :]


def quantize_blocks(w):
    e, n, k = w.shape
    tiles = w.float().view(e, n // 128, 128, k // 128, 128)
    scale = tiles.abs().amax(dim=(2, 4)).clamp(min=1e-10) / 448.0
    codes = (tiles / scale[:, :, None, :, None]).to(torch.float8_e4m3fn).view(e, n, k)
    return codes.contiguous(), scale.contiguous()


class Layer:
    """Random weights of one shape. fp8: e4m3 with a scale per 128 x 128 block; int8: a scale per channel."""

    def __init__(self, shape, dtype):
        self.experts, self.hidden, self.inter, self.topk = shape
        self.dtype = dtype
        self.fp8 = dtype == "fp8"
        self.s13 = self.s2 = None
        self.rows_ = {}
        self.w13 = torch.empty(self.experts, 2 * self.inter, self.hidden, device="cuda", dtype=torch.bfloat16).normal_(0, self.hidden**-0.5)
        self.w2 = torch.empty(self.experts, self.hidden, self.inter, device="cuda", dtype=torch.bfloat16).normal_(0, self.inter**-0.5)
        if dtype != "bf16":
            quantize = quantize_blocks if self.fp8 else compare_peers.quantize_int8
            self.w13, self.s13 = self.by_expert(self.w13, quantize)
            self.w2, self.s2 = self.by_expert(self.w2, quantize)

    @staticmethod
    def by_expert(w, quantize):
        """One expert at a time: the float32 copies are large."""
        parts = [quantize(w[e : e + 1]) for e in range(w.shape[0])]
        return tuple(torch.cat(part) for part in zip(*parts))

    def weight(self, name, expert):
        """One expert's weights as float32."""
        w = getattr(self, name)[expert].float()
        if self.dtype == "bf16":
            return w
        scale = getattr(self, "s" + name[1:])[expert]
        if self.dtype == "int8":
            return w * scale[:, None]
        return w * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)

    def row_weights(self, name):
        """e4m3 codes and a scale per channel, of the same weights; made once."""
        if name not in self.rows_:
            parts = [compare_peers.quantize_rows(self.weight(name, e)) for e in range(self.experts)]
            self.rows_[name] = tuple(torch.stack(part) for part in zip(*parts))
        return self.rows_[name]


class Batch:
    """Random inputs of one call."""

    def __init__(self, layer, tokens, index):
        self.x = torch.randn(tokens, layer.hidden, device="cuda", dtype=torch.bfloat16)
        if tokens == 1:  # disjoint experts between sets, so that weights come from memory
            chosen = [[(index * layer.topk + j) * 5 % layer.experts for j in range(layer.topk)]]
            self.ids = torch.tensor(chosen, device="cuda", dtype=torch.int32)
        else:
            self.ids = torch.rand(tokens, layer.experts, device="cuda").topk(layer.topk, dim=1).indices.to(torch.int32).contiguous()
        self.weights = torch.softmax(torch.randn(tokens, layer.topk, device="cuda"), dim=1).contiguous()
        self.out = torch.full((tokens, layer.hidden), float("nan"), device="cuda", dtype=torch.bfloat16)


def reference(layer, batch, sample):
    """float32 by definition for the sampled tokens."""

    def as_read(v):
        if layer.dtype == "bf16":
            return v
        if layer.dtype == "int8":
            codes, scale = compare_peers.quantize_int8(v)
            return codes.float() * scale
        codes, scale = compare_peers.quantize_groups(v)
        return codes.float() * scale.repeat_interleave(128, -1)

    out = torch.zeros(len(sample), layer.hidden, device="cuda")
    for i, t in enumerate(sample):
        x = as_read(batch.x[t].float())
        for j in range(layer.topk):
            e = int(batch.ids[t, j])
            h = as_read(compare_peers.swiglu(layer.weight("w13", e) @ x))
            out[i] += batch.weights[t, j] * (layer.weight("w2", e) @ h)
    return out


def error_of(layer, batch, call):
    """Relative distance of a whole layer's output from float32; NaN where something was not written."""
    tokens = batch.x.shape[0]
    sample = sorted({i * (tokens - 1) // 15 for i in range(16)})
    expected = reference(layer, batch, sample)
    got = call()
    torch.cuda.synchronize()
    assert torch.isfinite(got).all(), "not every element was written"
    return float((got[sample].float() - expected).norm() / expected.norm())


def tolerance(layer, tokens, name):
    if not layer.fp8:
        return 5e-3 if name == OURS else 1e-2 if layer.dtype == "bf16" else 2e-2
    return 1e-2 if tokens >= 8 else 4e-2


def capture(calls, repeats):
    def run():
        for call in calls:
            call()

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


def median(values):
    return sorted(values)[len(values) // 2]


def in_turns(graphs, warm_ms, turns):
    """Median milliseconds of each graph's replay in turns, and after 40 ms of idling."""
    single = {name: [] for name in graphs}
    for _ in range(3):
        for name, graph in graphs.items():
            if not single[name]:
                replay_ms(graph)
            torch.cuda.synchronize()
            time.sleep(0.04)
            single[name].append(replay_ms(graph))
    spent = 0.0
    while spent < warm_ms:
        for graph in graphs.values():
            spent += replay_ms(graph)
    times = {name: [] for name in graphs}
    for _ in range(turns):
        for name, graph in graphs.items():
            times[name].append(replay_ms(graph))
    return {name: median(t) for name, t in times.items()}, {name: median(t) for name, t in single.items()}


def ceilings():
    """Sustained and single-shot rates of cuBLAS, and a device copy's."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    ai, bi = (torch.randint(-127, 128, (8192, 8192), device="cuda", dtype=torch.int8) for _ in range(2))
    one = torch.ones((), device="cuda")
    result = {}
    for name, run in (
        ("bf16", lambda: torch.mm(a, b.t())),
        ("fp8", lambda: torch._scaled_mm(a8, b8.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)),
        ("int8", lambda: torch._int_mm(ai, bi.t())),
    ):
        sustained, single = in_turns({"mm": capture([run], 2)}, 250, 21)
        flops = 2 * 2 * 8192**3
        result[f"{name}_tflops"] = flops / sustained["mm"] * 1e-9
        result[f"{name}_tflops_single"] = flops / single["mm"] * 1e-9
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


def measure(library, handle, layer, tokens, peers, rates):
    """One point: every candidate checked, then all in turns."""
    sets = 8 if tokens <= 64 else 4 if tokens <= 256 else 2
    batches = [Batch(layer, tokens, i) for i in range(sets)]
    workspace = library.workspace(handle, tokens)
    point = {"tokens": tokens, "errors": {}, "us": {}, "single_us": {}, "not_timed": {}}
    hit = sum(len(torch.unique(batch.ids)) for batch in batches) / sets
    flops = 6 * tokens * layer.topk * layer.hidden * layer.inter
    least = hit * 3 * layer.hidden * layer.inter * (2 if layer.dtype == "bf16" else 1) + 4 * tokens * layer.hidden
    for name, rate in zip(("floor_us", "baseline_floor_us"), rates):
        point[name] = 1e6 * max(flops / rate, least / STREAM_BYTES)

    candidates = [(OURS, True, lambda layer, batch: library.call(handle, layer, batch, workspace))]
    candidates += [(name, whole, make) for name, _, whole, make in peers]
    graphs, repeats = {}, {}
    for name, whole, make in candidates:
        try:
            calls = [make(layer, batch) for batch in batches]
            if whole:
                point["errors"][name] = error_of(layer, batches[0], calls[0])
                most = tolerance(layer, tokens, name)
                if not point["errors"][name] < most:
                    raise compare_peers.Unavailable(f"error {point['errors'][name]:.1e}, at most {most}")
            once = replay_ms(capture(calls, 1))
            repeats[name] = max(1, min(64, int(1.5 / max(once, 0.01)) + 1))
            graphs[name] = capture(calls, repeats[name])
        except Exception as error:  # a candidate that cannot run this point, or is wrong, is left out with a message
            point["not_timed"][name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    sustained, single = in_turns(graphs, 250 if tokens >= 1024 else 60, 15)
    for name in graphs:
        point["us"][name] = 1e3 * sustained[name] / (repeats[name] * sets)
        point["single_us"][name] = 1e3 * single[name] / (repeats[name] * sets)
    return point


def report(shape, dtype, point):
    floor = point["floor_us"]
    line = f"{shape:20s} {dtype} M{point['tokens']:<6d} floor {floor:8.1f}"
    for name, us in point["us"].items():
        error = f" error {point['errors'][name]:.1e}" if name in point["errors"] else ""
        line += f" | {name} {us:8.1f} x{us / floor:.2f} (single {point['single_us'][name]:.1f}){error}"
    print(line, flush=True)
    for name, why in point["not_timed"].items():
        if not why.startswith("Unavailable: ") or name == OURS or "error" in why:
            print(f"  {name} not timed: {why}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("capi", metavar="LIBRARY")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tokens", default="1,8,64,256,1024,4096,16384")
    parser.add_argument("--dtype", default="bf16", choices=tuple(SCHEMES))
    parser.add_argument("--peers", help="names of compare_peers.py; default: all that can be imported")
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.manual_seed(1)
    library = Library(args.capi)
    peers, versions = compare_peers.probe()
    if args.peers is not None:
        peers = [peer for peer in peers if peer[0] in args.peers.split(",")]
    print("peers:", versions, flush=True)
    top = ceilings()
    print("ceilings:", {k: round(v, 1) for k, v in top.items()}, flush=True)
    rates = (top[f"{args.dtype}_tflops"] * 1e12, BASELINE_FLOPS[args.dtype])
    results = {"device": torch.cuda.get_device_name(), "dtype": args.dtype, "torch": torch.__version__, "peers": versions, "ceilings": top}
    results["points"] = []
    for shape in args.shapes.split(","):
        if args.dtype == "fp8" and (SHAPES[shape][1] % 128 or SHAPES[shape][2] % 128):
            print(f"{shape}: not in fp8, its sizes are no multiples of 128", flush=True)
            continue
        layer = Layer(SHAPES[shape], args.dtype)
        handle = library.create(layer)
        for tokens in map(int, args.tokens.split(",")):
            with torch.no_grad():
                point = measure(library, handle, layer, tokens, peers, rates)
            report(shape, args.dtype, point)
            results["points"].append({"shape": shape} | point)
            if args.json:  # after every point, so that an interrupted run keeps its results
                with open(args.json, "w") as file:
                    json.dump(results, file, indent=1)
        library.lib.moe_hopper_destroy(handle)
        del layer
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
