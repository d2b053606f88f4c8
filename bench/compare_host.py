#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times the host layer beside transformers' experts on the CPU: same shape, element type and thread count, alternating in one run.

    bench/compare_host.py --bench build/host/bench/host_layer_bench [--shape "1024 512 32 4"] [--threads 4] [--rounds 3] [--json FILE]

Needs torch and transformers in the Python that runs it. The library's time includes routing and the quantisation-free exchange; the peer's
is Qwen3MoeExperts.forward alone, with its routing given, in the faster of its eager and grouped_mm implementations.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time

parser = argparse.ArgumentParser()
parser.add_argument("--bench", required=True)
parser.add_argument("--shape", default="1024 512 32 4", help="hidden intermediate experts topk")
parser.add_argument("--threads", type=int, default=os.cpu_count())
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--json", default="")
options = parser.parse_args()
os.environ["OMP_NUM_THREADS"] = str(options.threads)
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # for both: if a core is busy, spinning threads measure the scheduler

import torch  # noqa: E402  after OMP_NUM_THREADS
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig  # noqa: E402
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts  # noqa: E402

torch.set_num_threads(options.threads)
torch.manual_seed(0)
HIDDEN, INTERMEDIATE, EXPERTS, TOPK = (int(v) for v in options.shape.split())


def peer(dtype: torch.dtype, implementation: str):
    config = Qwen3MoeConfig(hidden_size=HIDDEN, moe_intermediate_size=INTERMEDIATE, num_experts=EXPERTS, num_experts_per_tok=TOPK)
    config._experts_implementation = implementation
    module = Qwen3MoeExperts(config).to(dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return module


def time_peer(module, tokens: int, dtype: torch.dtype) -> float:
    x = torch.randn(tokens, HIDDEN).to(dtype)
    weights, ids = torch.topk(torch.softmax(torch.randn(tokens, EXPERTS), -1), TOPK, dim=-1)
    weights = (weights / weights.sum(-1, keepdim=True)).to(dtype)
    times = []
    with torch.no_grad():
        module(x, ids, weights)
        begin = time.perf_counter()
        while len(times) < 5 or time.perf_counter() - begin < 0.4:
            start = time.perf_counter()
            module(x, ids, weights)
            times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def time_library(tokens: int, element: str) -> float:
    command = [options.bench, "--benchmark_format=json", f"--benchmark_filter=host_layer<{element}>/tokens:{tokens}/",
               "--benchmark_min_time=0.4"]
    environment = dict(os.environ, MOE_BENCH_SHAPE=options.shape)
    result = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return json.loads(result.stdout)["benchmarks"][0]["real_time"]


rows = []
print(f"hidden {HIDDEN}, intermediate {INTERMEDIATE}, {EXPERTS} experts, top {TOPK}, {options.threads} threads, torch {torch.__version__}")
print("| element | tokens | this library, ms | transformers, ms (eager / grouped_mm) | ratio |\n|---|---|---|---|---|")
for element, dtype in (("float", torch.float32), ("bf16", torch.bfloat16)):
    modules = {}
    for implementation in ("eager", "grouped_mm"):
        try:
            modules[implementation] = peer(dtype, implementation)
            time_peer(modules[implementation], 4, dtype)
        except Exception as error:  # an implementation that this torch lacks on the CPU
            print(f"note: {implementation} {element}: {error}", file=sys.stderr)
            modules.pop(implementation, None)
    for tokens in (1, 16, 128, 1024):
        ours, theirs = [], {name: [] for name in modules}
        for _ in range(options.rounds):
            ours.append(time_library(tokens, element))
            for name, module in modules.items():
                theirs[name].append(time_peer(module, tokens, dtype))
        mine = statistics.median(ours)
        peers = {name: statistics.median(values) for name, values in theirs.items()}
        best = min(peers.values())
        rows.append({"element": element, "tokens": tokens, "library_ms": mine, "peer_ms": peers, "ratio": best / mine})
        listed = " / ".join(f"{peers[name]:.2f}" if name in peers else "-" for name in ("eager", "grouped_mm"))
        print(f"| {element} | {tokens} | {mine:.2f} | {listed} | {best / mine:.2f} |", flush=True)
if options.json:
    with open(options.json, "w", encoding="utf-8") as file:
        json.dump({"shape": options.shape, "threads": options.threads, "torch": torch.__version__, "rows": rows}, file, indent=1)
