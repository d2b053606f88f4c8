#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# bench/floor_plot.py: draws the results of bench/compare.py: time over the floor against tokens, one panel per model, as one small SVG.
"""Usage: floor_plot.py OUT.svg RESULT.json [RESULT.json ...]

Each RESULT.json is one run of compare.py; runs of one element type belong into one picture. Needs nothing but Python.
"""
import json
import math
import sys
from xml.sax.saxutils import escape

COLOURS = {
    "this library": "#0b5fa5",
    "transformers": "#b5541c",
    "2 grouped_mm": "#6b6b6b",
    "2 scaled_grouped_mm": "#6b6b6b",
    "this library w4a8": "#5aa0e0",
    "this library w8a16": "#5aa0e0",
    "vllm triton": "#2c7a3f",
    "vllm deep_gemm": "#7fb08a",
    "vllm marlin": "#c23b5a",
    "triton_kernels": "#1f8a8a",
    "sglang": "#7a3f8f",
    "DG contiguous 2 GEMMs": "#a3860b",
    "DG masked 2 GEMMs": "#d0b64a",
}
PANEL_WIDTH, PANEL_HEIGHT = 260, 210
LEFT, TOP, GAP_X, GAP_Y = 44, 66, 40, 70
MOST = 4.0  # times beyond are drawn at the upper edge and written out


def merged(results):
    """{shape: {candidate: {tokens: time over the floor}}} of all runs; a later run replaces a point of an earlier one."""
    panels = {}
    for result in results:
        for point in result["points"]:
            for name, us in point["us"].items():
                panels.setdefault(point["shape"], {}).setdefault(name, {})[point["tokens"]] = us / point["floor_us"]
    return panels


class Panel:
    """Axes of one model: tokens to the right in powers of two, time over the floor upwards from 1, both logarithmic."""

    def __init__(self, x, y, tokens):
        self.x, self.y, self.tokens = x, y, tokens

    def across(self, tokens):
        low, high = math.log2(self.tokens[0]), math.log2(max(self.tokens[-1], 2 * self.tokens[0]))
        return self.x + PANEL_WIDTH * (math.log2(tokens) - low) / (high - low)

    def up(self, ratio):
        bounded = min(max(ratio, 0.9), MOST)
        return self.y + PANEL_HEIGHT * (1 - math.log(bounded / 0.9) / math.log(MOST / 0.9))


def text(x, y, value, anchor="middle", size=11, colour="#222", weight="normal"):
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}" font-weight="{weight}">'
        f"{escape(value)}</text>"
    )


def line(x1, y1, x2, y2, colour, width=1.0, dash=""):
    style = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{width}"{style}/>'


def draw_panel(shape, curves, x, y):
    tokens = sorted({t for curve in curves.values() for t in curve})
    panel = Panel(x, y, tokens)
    out = [text(x + PANEL_WIDTH / 2, y - 18, shape, size=13, weight="bold")]
    for ratio in (1.0, 1.2, 1.5, 2.0, 3.0, 4.0):
        height = panel.up(ratio)
        out.append(line(x, height, x + PANEL_WIDTH, height, "#444" if ratio == 1.0 else "#ddd", 1.2 if ratio == 1.0 else 0.8))
        out.append(text(x - 6, height + 4, f"{ratio:g}", "end"))
    for t in tokens:
        out.append(line(panel.across(t), y + PANEL_HEIGHT, panel.across(t), y + PANEL_HEIGHT + 4, "#444"))
        out.append(text(panel.across(t), y + PANEL_HEIGHT + 16, str(t), size=10))
    for name, curve in sorted(curves.items(), key=lambda item: item[0] == "this library"):  # ours on top
        colour = COLOURS.get(name, "#999")
        points = [(panel.across(t), panel.up(curve[t]), curve[t]) for t in sorted(curve)]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py, _ in points)
        width = 2.2 if name == "this library" else 1.4
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>')
        for px, py, ratio in points:
            out.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="2.6" fill="{colour}"><title>{escape(name)} {ratio:.2f}</title></circle>')
            if ratio > MOST:
                out.append(text(px, py - 5, f"{ratio:.1f}", size=9, colour=colour))
    return out


def draw(results):
    """The SVG of some runs as text."""
    panels = merged(results)
    names = sorted({name for curves in panels.values() for name in curves}, key=lambda name: (name != "this library", name))
    columns = min(3, max(1, len(panels)))
    rows = (len(panels) + columns - 1) // columns
    width = LEFT + columns * (PANEL_WIDTH + GAP_X)
    height = TOP + rows * (PANEL_HEIGHT + GAP_Y)
    kinds = ", ".join(sorted({f"{r['dtype']} on {r['device']}" for r in results}))
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif"><rect width="{width}" height="{height}" fill="white"/>',
        text(LEFT, 16, f"Time over the floor against tokens: {kinds}", "start", 13),
    ]
    x = LEFT
    for name in names:
        out.append(line(x, 32, x + 18, 32, COLOURS.get(name, "#999"), 2.2))
        out.append(text(x + 22, 36, name, "start"))
        x += 40 + 6.5 * len(name)
    for i, (shape, curves) in enumerate(sorted(panels.items())):
        out += draw_panel(shape, curves, LEFT + i % columns * (PANEL_WIDTH + GAP_X), TOP + 8 + i // columns * (PANEL_HEIGHT + GAP_Y))
    return "\n".join([*out, "</svg>", ""])


def main(arguments):
    if len(arguments) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    results = []
    for path in arguments[1:]:
        with open(path) as file:
            results.append(json.load(file))
    with open(arguments[0], "w") as file:
        file.write(draw(results))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
