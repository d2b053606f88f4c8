#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""bench/plot.py: draws the JSON of exchange_bench, comm_exchange_bench and ep_layer_bench as SVG files.

    plot.py FILE.json... [--out FOLDER] [--prefix NAME]

exchange_bench writes one object a line, the others Google Benchmark's JSON, whose names end in the number of tokens. One chart a section or
a model; both axes logarithmic. Needs nothing but Python.
"""
import argparse
import html
import json
import math
import os
from collections import defaultdict

COLORS = ["#1f6fb4", "#d9541e", "#3a923a", "#8a4fa8", "#8c564b", "#c23b8a", "#6b6b6b", "#a8962a", "#1fa3b0", "#b03a3a"]
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 640, 400, 64, 36, 44


def charts_of_lines(lines):
    """exchange_bench: {(file, title, x, y): {series: {x: y}}}."""
    charts = defaultdict(lambda: defaultdict(dict))
    for r in lines:
        ranks = f"{r['ranks']} GPUs"
        if r["section"] == "ceiling":
            chart = charts[("ceiling", f"Equal bytes to every peer, {ranks}", "bytes per peer", "GB/s out of one GPU")]
            chart[f"{r['move']}, {r['blocks']} blocks"][r["bytes_per_peer"]] = r["gb_per_s"]
        elif r["section"] == "low_latency":
            kind, per = "fp8" if r["fp8"] else "bf16", "rank" if r["per_rank"] else "expert"
            name = f"{r['hidden']}, {r['topk']} of {r['experts']}, {kind}, per {per}"
            charts[("low_latency", f"LowLatency: dispatch and combine, {ranks}", "tokens per rank", "us")][name][r["tokens"]] = r["pair_us"]
        elif r["section"] == "high_throughput" and r["warps"] == 16:
            kind = "fp8" if r["fp8"] else "bf16"
            chart = charts[("high_throughput", f"HighThroughput, {r['tokens']} tokens per rank, {ranks}", "thread blocks", "us")]
            if not r["lists"]:
                chart[f"{kind} dispatch"][r["blocks"]] = r["dispatch_us"]
                chart[f"{kind} dispatch, cached layout"][r["blocks"]] = r["cached_us"]
                if not r["fp8"]:
                    chart["bf16 combine"][r["blocks"]] = r["combine_us"]
    return charts


def charts_of_benchmarks(data):
    """ep_layer_bench: model/scheme/composition/tokens; comm_exchange_bench: who/what/tokens/scheme/mode."""
    charts = defaultdict(lambda: defaultdict(dict))
    layers = "ep_layer" in data["context"]["executable"]
    for r in data["benchmarks"]:
        part = r["name"].split("/")
        ranks = f"{int(r['ranks'])} GPUs"
        if layers:
            key = (f"layer_{part[0]}_{part[1]}", f"Whole layer, {part[0]}, {part[1]}, {int(r['experts'])} experts, {ranks}",
                   "tokens per rank", "us")
            charts[key][part[2]][int(part[3])] = r["real_time"]
            charts[key][f"{part[2]}: experts alone"][int(part[3])] = r["experts_us"]
        elif part[3] == "bf16" and part[4] == "exact":
            rows = part[1].endswith("_rows")
            key = ("nccl_rows" if rows else "nccl_calls", f"{'Rows alone' if rows else 'Whole calls'} over NCCL, bf16, {ranks}",
                   "tokens per rank", "us")
            charts[key][f"{part[0]}, {part[1].replace('_', ' ')}"][int(part[2])] = r["real_time"]
    return charts


def read(path):
    with open(path, encoding="utf-8") as file:
        text = file.read()
    try:
        data = json.loads(text)
    except json.JSONDecodeError:
        return charts_of_lines([json.loads(line) for line in text.splitlines() if line.strip()])
    return charts_of_lines([data]) if "section" in data else charts_of_benchmarks(data)


def ticks(low, high):
    """Powers of two of a logarithmic axis, at most nine."""
    first, last = math.floor(math.log2(low)), math.ceil(math.log2(high))
    step = max(1, (last - first + 7) // 8)
    return [2.0**i for i in range(first, last + step, step)]


def label(value, name):
    for unit, size in (("Mi", 2**20), ("Ki", 2**10)):
        if "bytes" in name and value >= 8 * size:
            return f"{value / size:g} {unit}"
    return f"{value:g}"


def svg(title, x_name, y_name, series):
    points = [(x, y) for line in series.values() for x, y in line.items() if x > 0 and y > 0]
    xs, ys = ticks(min(p[0] for p in points), max(p[0] for p in points)), ticks(min(p[1] for p in points), max(p[1] for p in points))
    legend = 7 * max(len(name) for name in series) + 40
    right, bottom = LEFT + WIDTH - 90, HEIGHT - BOTTOM

    def at(value, marks, low, high):
        span = math.log2(marks[-1] / marks[0]) or 1.0
        return low + (high - low) * math.log2(value / marks[0]) / span

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{right + legend}" height="{HEIGHT}" font-family="sans-serif" font-size="12">',
           '<rect width="100%" height="100%" fill="white"/>', f'<text x="{LEFT}" y="20" font-size="14">{html.escape(title)}</text>']
    for x in xs:
        px = at(x, xs, LEFT, right)
        out.append(f'<path d="M{px:.1f} {TOP}V{bottom}" stroke="#ddd"/>'
                   f'<text x="{px:.1f}" y="{bottom + 16}" text-anchor="middle">{label(x, x_name)}</text>')
    for y in ys:
        py = at(y, ys, bottom, TOP)
        out.append(f'<path d="M{LEFT} {py:.1f}H{right}" stroke="#ddd"/>'
                   f'<text x="{LEFT - 6}" y="{py + 4:.1f}" text-anchor="end">{label(y, y_name)}</text>')
    out.append(f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{html.escape(x_name)}</text>')
    out.append(f'<text transform="translate(14 {(TOP + bottom) / 2}) rotate(-90)" text-anchor="middle">{html.escape(y_name)}</text>')
    for i, (name, line) in enumerate(series.items()):
        color, dash = COLORS[i % len(COLORS)], ' stroke-dasharray="5 3"' if i >= len(COLORS) or "alone" in name else ""
        places = [(at(x, xs, LEFT, right), at(y, ys, bottom, TOP)) for x, y in sorted(line.items())]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        out.append(f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="1.6"{dash}/>')
        out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{color}"/>' for x, y in places]
        key = TOP + 10 + 17 * i
        out.append(f'<path d="M{right + 10} {key}h18" stroke="{color}" stroke-width="2"{dash}/>'
                   f'<text x="{right + 33}" y="{key + 4}">{html.escape(name)}</text>')
    return "\n".join(out + ["</svg>\n"])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+")
    parser.add_argument("--out", default=".", help="folder to write to")
    parser.add_argument("--prefix", default="", help="of the files' names")
    args = parser.parse_args()
    os.makedirs(args.out, exist_ok=True)
    for path in args.files:
        for (file, title, x_name, y_name), series in read(path).items():
            to = os.path.join(args.out, f"{args.prefix}{file}.svg")
            with open(to, "w", encoding="utf-8") as svg_file:
                svg_file.write(svg(title, x_name, y_name, dict(series)))
            print(to)


if __name__ == "__main__":
    main()
