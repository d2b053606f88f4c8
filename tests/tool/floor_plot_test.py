# SPDX-License-Identifier: Apache-2.0
# tests/tool/floor_plot_test.py: bench/floor_plot.py draws the output of bench/compare.py: one panel per model, one curve per candidate, in
# a small file.
import json
import math
import pathlib
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as tree

from expectations import expect, finish

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "bench" / "floor_plot.py"
SHAPES = ("mixtral-8x7b", "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3-ep8rank", "gpt-oss-120b")
TOKENS = (1, 8, 64, 256, 1024, 4096, 16384)
SVG = "{http://www.w3.org/2000/svg}"


def result(shapes, times):
    points = [{"shape": s, "tokens": t, "floor_us": 10.0, "us": {name: 10.0 * x for name, x in times.items()}} for s in shapes
              for t in TOKENS]
    return {"device": "a <device>", "dtype": "bf16", "points": points}


def draw(folder, *results):
    paths = []
    for i, value in enumerate(results):
        paths.append(folder / f"{i}.json")
        paths[-1].write_text(json.dumps(value))
    out = folder / "out.svg"
    run = subprocess.run([sys.executable, str(SCRIPT), str(out), *map(str, paths)], capture_output=True, text=True)
    expect(run.returncode == 0, run)
    expect(out.stat().st_size < 100_000, "the picture is large")
    return tree.parse(out).getroot()


def heights(root, index):
    """Heights of one curve's points."""
    return [float(point.split(",")[1]) for point in root.findall(f"{SVG}polyline")[index].get("points").split()]


with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    root = draw(folder, result(SHAPES, {"this library": 1.1, "transformers": 2.0}))
    texts = [node.text for node in root.iter(f"{SVG}text")]
    expect(all(texts.count(shape) == 1 for shape in SHAPES), texts)
    expect(any("a <device>" in text for text in texts), texts)
    expect(len(root.findall(f"{SVG}polyline")) == 2 * len(SHAPES), "a curve a candidate in every panel")
    peer, ours = heights(root, 0), heights(root, 1)
    expect(len(ours) == len(TOKENS) and len(set(ours)) == 1, ours)
    expect(math.isclose(ours[0] - peer[0], 210 * math.log(2.0 / 1.1) / math.log(4.0 / 0.9), abs_tol=0.2), "logarithmic heights")

    root = draw(folder, result(SHAPES[:1], {"this library": 7.25}), result(SHAPES[1:2], {"this library": 1.5}))  # two runs, one picture
    expect(len(root.findall(f"{SVG}polyline")) == 2, "curves of two runs")
    expect([node.text for node in root.iter(f"{SVG}text")].count("7.2") == len(TOKENS), "times beyond the axis are written out")

    run = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True)
    expect(run.returncode == 2 and "Usage" in run.stderr, run)

finish()
