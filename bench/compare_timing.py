# SPDX-License-Identifier: Apache-2.0
# bench/compare_timing.py: CUDA graphs that keep what they read, their replays in turns, and the rates of the run.
import random
import statistics
import time

import torch


class Graph:
    """`repeats` rounds of some calls as a CUDA graph. It keeps the calls: a graph reads the memory of their tensors, which torch would give
    to others once the last reference is gone."""

    def __init__(self, calls, repeats):
        self.calls, self.repeats = list(calls), repeats
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._round()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for _ in range(repeats):
                self._round()

    def _round(self):
        for call in self.calls:
            call()

    def replay_ms(self):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)


def long_enough(calls):
    """A graph whose replay lasts at least 1.5 ms."""
    once = Graph(calls, 1).replay_ms()
    return Graph(calls, max(1, min(64, int(1.5 / max(once, 0.01)) + 1)))


def in_turns(graphs, warm_ms, turns, idle=time.sleep):
    """{name: milliseconds of each turn}, {name: of three replays after 40 ms of idling}. A turn replays every graph once, in an order of
    its own, so that no candidate always follows the same neighbour."""
    single = {name: [] for name in graphs}
    for _ in range(3):
        for name, graph in graphs.items():
            if not single[name]:
                graph.replay_ms()
            idle(0.04)
            single[name].append(graph.replay_ms())
    spent = 0.0
    while graphs and spent < warm_ms:
        spent += sum(graph.replay_ms() for graph in graphs.values())
    times = {name: [] for name in graphs}
    order, shuffle = list(graphs), random.Random(7).shuffle
    for _ in range(turns):
        shuffle(order)
        for name in order:
            times[name].append(graphs[name].replay_ms())
    return times, single


def ceilings(read):
    """Rates of this run: cuBLAS of 8192^3 sustained and after idling, a device copy, and `read(tensor)`, which enqueues one read of it."""
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
        times, single = in_turns({"mm": Graph([run], 2)}, 250, 21)
        flops = 2 * 2 * 8192**3
        result[f"{name}_tflops"] = flops / statistics.median(times["mm"]) * 1e-9
        result[f"{name}_tflops_single"] = flops / statistics.median(single["mm"]) * 1e-9
    source = torch.randint(1, 2**15, (2**31,), device="cuda", dtype=torch.int16)
    target = torch.empty_like(source)
    bytes_ = 2 * source.numel()
    for name, run, moved in (("copy", lambda: target.copy_(source), 2 * bytes_), ("read", lambda: read(source), bytes_)):
        times, _ = in_turns({name: Graph([run], 1)}, 20, 9)
        result[f"{name}_gbs"] = moved / statistics.median(times[name]) * 1e-6
    return result
