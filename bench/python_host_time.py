#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# bench/python_host_time.py: microseconds of host time of a call from Python, without rows and with one row, on one GPU; or of one layer on
# the host from C++, C and Python.
"""python3 bench/python_host_time.py [--host build/cuda/tests/capi/capi_overhead_test]
Needs the package of python/ and torch, without --host with a GPU. One line for each number of rows; the device is waited for between rounds
only. --host: a layer of 8 columns and one row, one thread; the program, an argument, measures it from C++ and from C. numpy's arrays are
measured, and torch's where it is installed. A new array alone, empty_like, is part of every call without an output."""
import argparse
import re
import statistics
import subprocess
import sys
import time

try:
    import torch
except ImportError:
    torch = None
import numpy

import moe
from moe._runner import _forward_routed

EXPERTS, HIDDEN, INTERMEDIATE, TOPK = 16, 256, 256, 2
ROUNDS, CALLS = 30, 300


def host_time(call):
    """The least of three medians of ten repeats."""
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - begin) / CALLS * 1e6)
        if torch is not None and torch.cuda.is_available():
            torch.cuda.synchronize()
    return min(statistics.median(times[i : i + 10]) for i in range(0, ROUNDS, 10))


def on_host(program):
    """The layer of tests/capi/overhead_test.cpp, from C++, C and Python: the limits are 1 us over C++ for C, 6 us for Python."""
    said = subprocess.run([program], capture_output=True, text=True, check=False).stdout
    pairs = [tuple(map(float, pair)) for pair in re.findall(r"C\+\+ (\d+) ns, C (\d+) ns", said)]
    if not pairs:
        sys.exit(f"{program} printed no line with the times of C++ and C:\n{said}")
    cpp, c = (min(times) / 1e3 for times in zip(*pairs))
    arrays = [numpy.full(shape, value, dtype) for shape, value, dtype in (
        ((1, 8), 0.5, numpy.float32), ((1, 1), 0, numpy.int32), ((1, 1), 1.0, numpy.float32), ((2, 16, 8), 0.1, numpy.float32),
        ((2, 8, 8), 0.1, numpy.float32), ((1, 8), 0.0, numpy.float32))]  # fmt: skip
    print("| one row on the host | us | over C++ |\n|---|---:|---:|")
    for name, us in {"C++": cpp, "C": c}.items():
        print(f"| {name} | {us:.2f} | {us - cpp:.2f} |", flush=True)
    of_framework(numpy, arrays, 0, cpp)
    if torch is not None:
        of_framework(torch, [torch.from_numpy(array) for array in arrays], -1, cpp)


def of_framework(framework, arrays, stream, cpp):
    x, ids, weights, w13, w2, out = arrays
    runner = moe.Runner(w13, w2, topk=1, max_tokens=1, num_threads=1)
    moe.experts(x, ids, weights, w13, w2)
    calls = {
        "the C function through the extension, into an output": lambda: _forward_routed(runner._handle, x, ids, weights, out, stream),
        "Runner.forward_routed into an output": lambda: runner.forward_routed(x, ids, weights, out),
        "Runner.forward_routed": lambda: runner.forward_routed(x, ids, weights),
        "moe.experts into an output": lambda: moe.experts(x, ids, weights, w13, w2, output=out),
        "moe.experts": lambda: moe.experts(x, ids, weights, w13, w2),
    }
    for name, call in {**calls, "empty_like": lambda: framework.empty_like(x)}.items():
        us = host_time(call)
        print(f"| {framework.__name__}: {name} | {us:.2f} | {us - cpp:.2f} |", flush=True)


def on_gpu():
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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", metavar="PROGRAM", help="measure on the host; the program is capi_overhead_test")
    program = parser.parse_args().host
    if torch is None and program is None:
        sys.exit("the times on a GPU need torch")
    if torch is None:
        return on_host(program)
    with torch.no_grad():
        return on_gpu() if program is None else on_host(program)


if __name__ == "__main__":
    main()
