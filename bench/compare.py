#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# bench/compare.py: this library's layer beside its peers in one process: same inputs, all checked against float32, then timed in turns.
"""Usage: compare.py LIBRARY [--dtype TYPE] [--shapes a,b] [--tokens 1,8,...] [--peers a,b] [--turns N] [--json FILE]
       compare.py --list [--dtype TYPE]

LIBRARY is bench/hopper_capi.cu as a shared object (target moe_hopper_capi). --list says which peers of a type are installed, and how
to install the others; it needs no GPU.

TYPE is that of the weights, with activations in bf16 unless it says otherwise:
  bf16
  fp8      e4m3, a scale per 128 x 128; activations in e4m3, a scale per 128
  int8     a scale per channel; activations in int8, a scale per row, and, as a second candidate, in bf16
  mxfp4    a power of two per 32; activations in bf16, and, as a second candidate, in e4m3
  int4, int4_32   a scale per 128 and per 32; activations as with mxfp4
  nvfp4    an e4m3 scale per 16
gpt-oss's shapes have, in 4 bits, biases and gpt-oss's clamped SwiGLU; all others SwiGLU. This library gets rows in int8 and in e4m3 that
are quantised outside the timed region, as its dispatch delivers them; peers quantise bf16 rows themselves.

Every result is checked before it is timed, on sixteen tokens, against float32 on the candidate's own dequantised weights and equally
quantised activations; of products alone, eight rows. Bounds (compare_table.py): bf16, 4 bits and int8 weights alone 5e-3 (peers 1e-2:
they round router weights and slots to bf16), 4 bits with e4m3 activations 1e-2; fp8 1e-2, below 8 tokens 4e-2, where one code that rounds
the other way is a large part (peers 4e-2: they round to bf16 before they quantise); int8 5e-3 (peers 2e-2, likewise); products 2e-2. A
candidate that is wrong is not timed, and the exit code is 1.

Each candidate is captured in a CUDA graph that runs every input set and lasts at least 1.5 ms. It keeps every tensor that it reads. Graphs
are replayed in turns, in a new random order each turn, so that all see the same clocks. Sustained: the median over the turns,
with the spread (10 to 90 %) where it is over 3 %. Single-shot: the median of replays after 40 ms of idling. Floor: the larger of useful
operations over the sustained cuBLAS rate of the candidate's activations and least bytes (weights as checkpoints hold them) over the rate of
a read; both rates are measured here first.
floor_plot.py draws the JSON.
"""
import argparse
import json
import pathlib
import statistics
import sys

import compare_table as table
from compare_table import DTYPES, OURS, SHAPES

MOST_TOKENS = 1 << 17


def arguments(given):
    parser = argparse.ArgumentParser(
        usage=__doc__.split("\n\n", maxsplit=1)[0].removeprefix("Usage: "),
        description=__doc__.split("\n\n", maxsplit=1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("capi", metavar="LIBRARY", nargs="?")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--shapes")
    parser.add_argument("--tokens", default="1,8,64,256,1024,4096,16384")
    parser.add_argument("--peers", help="names of --list; default: all that are there")
    parser.add_argument("--turns", default="15")
    parser.add_argument("--json", type=pathlib.Path)
    o = parser.parse_args(given)
    try:
        if o.dtype not in DTYPES:
            raise ValueError(f"--dtype: no {o.dtype!r}; there are: {', '.join(DTYPES)}")
        o.shapes = table.names(o.shapes, "--shapes", tuple(SHAPES)) if o.shapes is not None else list(DTYPES[o.dtype].shapes)
        o.tokens = table.numbers(o.tokens, "--tokens", 1, MOST_TOKENS)
        o.turns = table.numbers(o.turns, "--turns", 3, 1000)[0]
    except ValueError as error:
        parser.error(str(error))
    if not o.list and o.capi is None:
        parser.error("LIBRARY is missing: the path of libmoe_hopper_capi.so, which the target moe_hopper_capi builds")
    if not o.list and not pathlib.Path(o.capi).is_file():
        parser.error(f"LIBRARY: {o.capi} is not there; the target moe_hopper_capi builds it")
    if o.json is not None and not o.json.parent.is_dir():
        parser.error(f"--json: the folder {o.json.parent} is not there")
    return parser, o


def chosen_peers(parser, o):
    """(the peers of this type that are there, {name: version, or why not})."""
    import compare_peers

    peers = [peer for peer in compare_peers.PEERS if o.dtype in peer.dtypes]
    if o.peers is not None:
        try:
            wanted = table.names(o.peers, f"--peers of {o.dtype}", [peer.name for peer in peers]) if o.peers else []
        except ValueError as error:
            parser.error(str(error))
        peers = [peer for peer in peers if peer.name in wanted]
    return compare_peers.probe(peers)


class Failed(str):
    """Why preparing failed."""


class Prepared:
    """Each candidate's weights of one layer, made when they are first asked for."""

    def __init__(self, layer):
        self.layer, self.made = layer, {}

    def of(self, candidate):
        if candidate.name not in self.made:
            try:
                self.made[candidate.name] = candidate.prepare(self.layer)
            except Exception as error:  # kept as text: its traceback would keep tensors
                self.made[candidate.name] = Failed(f"preparing: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        made = self.made[candidate.name]
        if isinstance(made, Failed):
            raise RuntimeError(made)
        return made

    def close(self):
        for made in self.made.values():
            if hasattr(made, "close"):
                made.close()
        self.made.clear()


def measure(candidates, prepared, shape, tokens, rates, turns):
    """One point: every candidate checked, then all in turns."""
    import compare_timing
    from compare_layers import Batch, Unavailable, Wrong, checked

    layer, dtype = prepared.layer, DTYPES[prepared.layer.dtype]
    sets = 8 if tokens <= 64 else 4 if tokens <= 256 else 2
    batches = [Batch(layer, tokens, i) for i in range(sets)]
    hit = sum(len(batch.ids.unique()) for batch in batches) / sets
    floors = table.floors(SHAPES[shape], dtype, tokens, hit, rates["flops"], rates["read"])
    baseline = table.floors(SHAPES[shape], dtype, tokens, hit, table.BASELINE_FLOPS, table.BASELINE_READ)
    point = {"shape": shape, "tokens": tokens, "experts_hit": hit, "errors": {}, "us": {}, "single_us": {}, "spread": {}, "floors_us": {}}
    point |= {"floor_us": floors[dtype.activations], "baseline_floor_us": baseline[dtype.activations], "not_timed": {}, "wrong": []}
    graphs = {}
    for candidate in candidates:
        name = candidate.name
        try:
            why = candidate.refuses(layer, tokens)
            if why is not None:
                raise Unavailable(why)
            calls = [candidate.call(prepared.of(candidate), layer, batch) for batch in batches]
            point["errors"][name] = checked(candidate, layer, batches[0], calls[0], name.startswith(OURS))
            graphs[name] = compare_timing.long_enough(calls)
            point["floors_us"][name] = floors[candidate.activations(dtype.name)]
        except Exception as error:  # a candidate that cannot run this point, or is wrong, is left out with a message
            point["not_timed"][name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            if isinstance(error, Wrong) or (name.startswith(OURS) and not isinstance(error, Unavailable)):
                point["wrong"].append(name)
    times, single = compare_timing.in_turns(graphs, 250 if tokens >= 1024 else 60, turns)
    for name, graph in graphs.items():
        calls = graph.repeats * sets
        point["us"][name] = 1e3 * statistics.median(times[name]) / calls
        point["single_us"][name] = 1e3 * statistics.median(single[name]) / calls
        point["spread"][name] = table.spread(times[name])
    return point


def report(shape, dtype, point):
    print(table.line(shape, dtype, point), flush=True)
    for name, why in point["not_timed"].items():
        if not why.startswith("Unavailable: ") or name.startswith(OURS):
            print(f"  {name} not timed: {why}", flush=True)


def stopped(why):
    print(f"compare.py: {why}", file=sys.stderr)
    return 2


def main(given=None):
    parser, o = arguments(given)
    try:
        import torch
    except ImportError as error:
        return stopped(f"{error}; it needs torch 2.11 or newer with CUDA")
    peers, versions = chosen_peers(parser, o)
    for name, said in versions.items():
        print(f"{name}: {said}", flush=True)
    if o.list:
        return 0
    if not torch.cuda.is_available():
        return stopped("torch finds no CUDA device; this part needs an H100 or H200")
    import compare_library
    from compare_layers import Layer
    from compare_timing import ceilings

    library = compare_library.Library(o.capi)
    candidates = [*compare_library.candidates(library, o.dtype), *peers]
    top = ceilings(library.read)
    torch.cuda.empty_cache()
    print("ceilings:", {k: round(v, 1) for k, v in top.items()}, flush=True)
    rates = {"flops": {kind: 1e12 * top[f"{kind}_tflops"] for kind in table.BASELINE_FLOPS}, "read": 1e9 * top["read_gbs"]}
    results = {"device": torch.cuda.get_device_name(), "dtype": o.dtype, "torch": torch.__version__, "peers": versions, "ceilings": top}
    results |= {"turns": o.turns, "points": []}
    for shape in o.shapes:
        why = DTYPES[o.dtype].unfit(SHAPES[shape])
        if why is not None:
            print(f"{shape}: not in {o.dtype}, {why}", flush=True)
            continue
        with torch.no_grad():
            prepared = Prepared(Layer(SHAPES[shape], o.dtype, gpt_oss=shape.startswith("gpt-oss")))
            for tokens in o.tokens:
                point = measure(candidates, prepared, shape, tokens, rates, o.turns)
                report(shape, o.dtype, point)
                results["points"].append(point)
                if o.json:  # after every point, so that an interrupted run keeps its results
                    o.json.write_text(json.dumps(results, indent=1))
                torch.cuda.empty_cache()
        prepared.close()
        del prepared
        torch.cuda.empty_cache()
    return 1 if any(point["wrong"] for point in results["points"]) else 0


if __name__ == "__main__":
    sys.exit(main())
