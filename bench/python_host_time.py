#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# bench/python_host_time.py: microseconds of host time of a call from Python, without rows and with one row, on one GPU.
"""python3 bench/python_host_time.py
Needs the package of python/ and torch with a GPU. One line for each number of rows; the device is waited for between rounds only."""
import statistics
import time

import torch

import moe
from moe._runner import _forward_routed

EXPERTS, HIDDEN, INTERMEDIATE, TOPK = 16, 256, 256, 2
ROUNDS, CALLS = 30, 300


def host_time(call):
    """The least of three medians of ten rounds."""
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - begin) / CALLS * 1e6)
        torch.cuda.synchronize()
    return min(statistics.median(times[i : i + 10]) for i in range(0, ROUNDS, 10))


@torch.no_grad()
def main():
    torch.manual_seed(0)
    options = dict(device="cuda", dtype=torch.bfloat16)
    w13 = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, **options)
    w2 = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, **options)
    for rows in (0, 1):
        x = torch.randn(rows, HIDDEN, **options)
        ids = torch.arange(TOPK, device="cuda").expand(rows, TOPK).contiguous()
        weights = torch.ones(rows, TOPK, device="cuda")
        out = torch.empty_like(x)
        runner = moe.Runner(w13, w2, topk=TOPK, max_tokens=64)
        moe.experts(x, ids, weights, w13, w2)  # makes the runner that later calls find
        calls = {
            "C function": lambda: _forward_routed(runner._handle, x, ids, weights, out, -1),
            "runner, into": lambda: runner.forward_routed(x, ids, weights, out),
            "runner": lambda: runner.forward_routed(x, ids, weights),
            "experts, into": lambda: moe.experts(x, ids, weights, w13, w2, output=out),
            "experts": lambda: moe.experts(x, ids, weights, w13, w2),
            "empty_like": lambda: torch.empty_like(x),
        }
        print(f"rows {rows}: " + ", ".join(f"{name} {host_time(call):.2f} us" for name, call in calls.items()), flush=True)


if __name__ == "__main__":
    main()
