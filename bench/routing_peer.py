#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# bench/routing_peer.py: torch's softmax, topk and renormalisation, timed as routing_bench times the routing kernel: 64 calls in a graph.
#
# It neither groups nor counts nor sorts. Run it before and after routing_bench on the same machine.
import torch

CALLS, INPUTS = 64, 8


def route(logits):
    weights, ids = torch.topk(torch.softmax(logits, dim=-1), 8, dim=-1)
    return weights / weights.sum(dim=-1, keepdim=True), ids


def main():
    for tokens in (1, 128, 4096):
        inputs = [torch.randn(tokens, 256, device="cuda") * 1.5 for _ in range(INPUTS)]
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            route(inputs[0])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(CALLS):
                route(inputs[i % INPUTS])
        times = []
        for _ in range(60):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(1e3 * begin.elapsed_time(end) / CALLS)
        print(f"torch softmax + topk, {tokens} tokens: {sorted(times[10:])[25]:.2f} us")


if __name__ == "__main__":
    main()
