# SPDX-License-Identifier: Apache-2.0
# tests/tool/serve_sim_test.py: `moe serve-sim` balances a skewed load, on simulated ranks and through a layer on MPI ranks; its report, its
# page and its placement say what happened.
import html.parser
import json
import os
import pathlib
import pty
import re
import shutil
import subprocess
import tempfile

from expectations import expect, finish
from tool import DATA, ENVIRONMENT, TOOL, moe, raw, read, rows, write


def simulate(*options, ranks=0, steps=40):
    run = moe("serve-sim", "--steps", steps, "--json", *options, ranks=ranks)
    expect(run.returncode == 0 and run.stderr == "", f"{options}: exit code {run.returncode}: {run.stderr}")
    return json.loads(run.stdout) if run.returncode == 0 else None


def imbalance(loads):
    return max(loads) * len(loads) / sum(loads)


def check_zipf():
    """zipf(1.2), 32 replicas: unbalanced before, at least 0.9 after; every slot counted once."""
    report = simulate("--routing", "zipf:1.2", "--replicas", 32)
    expect(report["ranks"] == 8 and report["experts"] == 256 and not report["computed"], f"defaults: {report}")
    expect(report["before"]["balancedness"] < 0.6, f"zipf is skewed: {report['before']}")
    expect(report["after"]["balancedness"] >= 0.9, f"balancedness after rebalancing: {report['after']['balancedness']}")
    expect(report["rebalanced_after"] and report["before"]["last_step"] == report["rebalanced_after"][0],
           f"steps: {report['rebalanced_after']}")
    expect(report["after"]["first_step"] == report["rebalanced_after"][-1] + 1, "the steps after the last rebalancing")
    for side in ("before", "after"):
        expect(abs(sum(report[side]["rank_slots"]) - 8 * 128 * 8) < 1e-6, f"{side}: {sum(report[side]['rank_slots'])} slots")
    expect(len(report["imbalance"]) == 40 and min(report["imbalance"][report["rebalanced_after"][-1] + 1:]) < 1.12,
           "imbalance of each step")
    without = simulate("--routing", "zipf:1.2", "--replicas", 32, "--eplb", "off")
    expect(without["rebalanced_after"] == [] and without["after"]["balancedness"] < 0.6, f"without balancing: {without}")
    again = simulate("--routing", "zipf:1.2", "--replicas", 32)
    expect(again == report, "equal runs give equal reports")


def check_mpi(folder):
    """The same through a layer on 4 ranks, with weights that move; the loads are those that one process simulates for 4 ranks."""
    options = ["--routing", "zipf:1.2", "--experts", 64, "--replicas", 8, "--tokens", 64, "--topk", 4]
    simulated = simulate(*options, "--ranks", 4, steps=24)
    for mode in ("pause", "stepwise", "background"):
        real = simulate(*options, "--eplb", mode, ranks=4, steps=24)
        expect(real["computed"] and real["ranks"] == 4 and len(real["step_ms"]) == 24 and min(real["step_ms"]) > 0, f"{mode}: {real}")
        if mode == "background":  # when the weights have moved depends on time
            continue
        expect(real["after"]["balancedness"] > real["before"]["balancedness"] + 0.2, f"{mode}: {real['before']}, {real['after']}")
        first = real["rebalanced_after"][0] if real["rebalanced_after"] else 0
        expect(first > 0 and real["imbalance"][:first] == simulated["imbalance"][:first], f"{mode}: loads before rebalancing")
        expect(real["before"]["rank_slots"] == simulated["before"]["rank_slots"], f"{mode}: tokens of each rank before rebalancing")


def check_trace(folder):
    """Replays what `moe block` has routed: the load is that of the file."""
    block = sorted((DATA / "moe_blocks").glob("qwen2_moe_*"))[0]
    output = folder / "routed.safetensors"
    run = moe("block", block, "--output", output, ranks=0)
    expect(run.returncode == 0, run.stderr)
    ids = rows(read(output)[0]["topk_ids"])
    experts = max(map(max, ids)) + 1
    report = simulate("--routing", f"trace:{output}", "--experts", 16, "--ranks", 4, "--tokens", len(ids) // 4, "--eplb", "off", steps=1)
    first = ids[:len(ids) // 4 * 4]
    want = [float(sum(1 for row in first for e in row if e // 4 == rank)) for rank in range(4)]
    expect(report["before"]["rank_slots"] == want and report["topk"] == len(ids[0]),
           f"{report['before']['rank_slots']}, the trace gives {want}")
    expect(experts <= 16, "the file has 16 experts")


class Page(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.data, self.inside, self.links, self.open = "", False, [], []

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        self.inside = tag == "script" and named.get("type") == "application/json"
        self.links += [value for key, value in attrs if key in ("src", "href")]
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        expect(self.open and self.open.pop() == tag, f"the page closes {tag}")
        self.inside = False

    def handle_data(self, data):
        if self.inside:
            self.data += data


def check_files(folder):
    """The page holds the report's data and loads nothing; the placement is one that `moe block` takes."""
    page, placement = folder / "page.html", folder / "placement.json"
    options = ["--routing", "zipf:1.2", "--experts", 16, "--replicas", 4, "--ranks", 4, "--topk", 4]
    report = simulate(*options, "--html", page, "--save-placement", placement)
    parser = Page()
    text = page.read_text()
    parser.feed(text)
    expect(json.loads(parser.data) == report, "the page holds the report")
    expect(parser.links == [] and "http://" not in re.sub(r"http://www\.w3\.org/2000/svg", "", text) and "https://" not in text
           and not parser.open, f"the page loads nothing: {parser.links}, {parser.open}")
    maps = json.loads(placement.read_text())["models"]["main"]
    expect(sorted(set(maps["physical_to_logical"][0])) == list(range(16)) and len(maps["physical_to_logical"][0]) == 20,
           f"placement {maps}")

    block = sorted((DATA / "moe_blocks").glob("qwen2_moe_*"))[0]
    for name, extra, replicas in (("placement", ["--placement", placement], 4), ("replicas", ["--replicas", 4], 4), ("none", [], 0)):
        run = moe("block", block, "--output", folder / f"{name}.safetensors", "--expected", f"{block}:expected", "--json", *extra, ranks=4)
        expect(run.returncode == 0, f"{name}: {run.stderr}")
        got = json.loads(run.stdout)
        expect(got["error"] <= 1e-5 and got["replicas"] == replicas, f"{name}: {got}")
        expect(sum(got["load_per_rank"]) == sum(got["load"]) and len(got["waited_ms"]) == 4, f"{name}: {got['load_per_rank']}")


def check_written_files(folder):
    """No file that is read is written, and no page over a placement."""
    trace, page = folder / "trace.safetensors", folder / "both"
    write(trace, {"topk_ids": ("I32", [2, 2], raw("i", [0, 1, 2, 3]))})
    before = trace.read_bytes()
    options = ["serve-sim", "--steps", 4, "--ranks", 2, "--routing", f"trace:{trace}"]
    for more, part in ((["--html", trace], f"--html '{trace}' is the input file"),
                       (["--save-placement", trace], f"--save-placement '{trace}' is the input file"),
                       (["--html", page, "--save-placement", os.path.relpath(page)], "--html and --save-placement are one file")):
        run = moe(*options, *more, ranks=0)
        expect(run.returncode == 1 and part in run.stderr and run.stderr.count("\n") == 1 and run.stdout == "", f"{more}: {run}")
    expect(trace.read_bytes() == before and not page.exists(), "the trace is as it was, and nothing was written")


# Enough of a browser for the page's script, which it runs; prints how many points its last line has.
BROWSER = """
const text = require("fs").readFileSync(process.argv[1], "utf8"), found = {};
let points = 0;
const node = () => ({style: {}, append() {}, setAttribute(key, value) { if (key === "points") points = value.split(" ").length; }});
globalThis.document = {createElement: node, createElementNS: node, getElementById: id => found[id] ??= node()};
document.getElementById("data").textContent = /id="data">([^]*?)<\\/script>/.exec(text)[1];
new Function(/<script>([^]*?)<\\/script>/.exec(text)[1])();
console.log(points);
"""


def check_many_steps(folder):
    """The charts of many steps are drawn, through few points."""
    if shutil.which("node") is None:
        print("the page's script is not run: no node")
        return
    for steps, few, most in ((40, 40, 40), (200_000, 800, 2000)):
        page = folder / "steps.html"
        simulate("--routing", "zipf:1.2", "--experts", 4, "--ranks", 2, "--topk", 1, "--tokens", 1, "--eplb-interval", 5, "--html", page,
                 steps=steps)
        run = subprocess.run(["node", "-e", BROWSER, page], capture_output=True, text=True, check=False)
        expect(run.returncode == 0 and few <= int(run.stdout or 0) <= most, f"{steps} steps: {run.stdout}{run.stderr[-500:]}")


def check_text(folder):
    """The text has both sides of every rank, and the progress bar appears on a terminal only."""
    options = ["serve-sim", "--steps", "40", "--routing", "zipf:1.2", "--replicas", "32"]
    plain = moe(*options, ranks=0)
    report = simulate("--routing", "zipf:1.2", "--replicas", 32)
    expect(plain.returncode == 0 and plain.stderr == "", f"no progress bar in a pipe: {plain.stderr!r}")
    bars = re.findall(r"^ +(\d) +[█▏▎▍▌▋▊▉ ]+ +(\d+) +[█▏▎▍▌▋▊▉ ]+ +(\d+)$", plain.stdout, re.M)
    expect([int(rank) for rank, _, _ in bars] == list(range(8)), f"one line per rank:\n{plain.stdout}")
    expect(all(abs(int(first) - a) <= 0.5 and abs(int(last) - b) <= 0.5 for (_, first, last), a, b in
               zip(bars, report["before"]["rank_slots"], report["after"]["rank_slots"])), f"the bars' numbers:\n{plain.stdout}")
    shown = f"balancedness  {report['before']['balancedness']:.3f} -> {report['after']['balancedness']:.3f}"
    expect(shown in plain.stdout, f"'{shown}' is missing:\n{plain.stdout}")

    terminal, process_end = pty.openpty()
    run = subprocess.Popen([TOOL, *options], stdout=subprocess.DEVNULL, stderr=process_end, env=ENVIRONMENT)
    os.close(process_end)
    drawn = b""
    while True:
        try:
            part = os.read(terminal, 4096)
        except OSError:  # the process has closed its end
            break
        if not part:
            break
        drawn += part
    expect(run.wait() == 0 and b"step 40 / 40" in drawn and "█".encode() in drawn and drawn.endswith(b"\r\x1b[K"),
           f"progress bar: {drawn[-200:]}")


def check_errors(folder):
    broken = folder / "broken.safetensors"
    write(broken, {"topk_ids": ("I32", [2, 2], raw("i", [0, 1, 2, 9]))})
    huge, idle = folder / "huge.safetensors", folder / "idle.safetensors"
    write(huge, {"topk_ids": ("I32", [1, 2], raw("i", [2**31 - 1, 0]))})
    write(idle, {"topk_ids": ("I32", [1, 2], raw("i", [-1, -1]))})
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    for options, part, ranks in ((["--routing", "flat"], '--routing: "flat", expected zipf:S or trace:FILE', 0),
                                 (["--routing", "zipf:x"], "zipf:x", 0),
                                 (["--routing", "zipf:1", "--topk", 300], "--topk: 300 is out of range [1, 32]", 0),
                                 (["--routing", "zipf:1", "--experts", 1025], "--experts: 1025 is out of range [1, 1024] of zipf", 0),
                                 (["--routing", "zipf:1", "--experts", 4], "--topk: 8 is out of range [1, 4] of --experts 4", 0),
                                 (["--routing", f"trace:{huge}"], "row 0: expert 2147483647 is out of range [-1, 65536)", 0),
                                 (["--routing", f"trace:{pipe}"], f"'{pipe}' is not a regular file", 0),
                                 (["--routing", f"trace:{idle}"], f"'{idle}': no row names an expert", 0),
                                 (["--routing", f"trace:{idle}", "--experts", 65537], '--experts: "65537", expected a whole number', 0),
                                 (["--routing", "trace:"], '--routing: "trace:", expected zipf:S or trace:FILE', 0),
                                 (["--routing", "zipf:1", "--html", ""], '--html: "", expected a file to write', 0),
                                 (["--routing", "zipf:1", "--save-placement", ""], '--save-placement: "", expected a file to write', 0),
                                 (["--routing", "zipf:1", "--replicas", 3], "nearest valid --replicas: 0 or 8", 0),
                                 (["--routing", f"trace:{folder / 'nothing'}"], "nothing", 0),
                                 (["--routing", f"trace:{broken}", "--experts", 8], "row 1: expert 9 is out of range [-1, 8)", 0),
                                 (["--routing", "zipf:1", "--html", folder / "no" / "page.html"], "page.html", 0),
                                 (["--routing", "zipf:1", "--eplb", "stepwise"], "--eplb stepwise: simulated ranks", 0),
                                 (["--routing", "zipf:1", "--ranks", 4], "mpirun gives the ranks", 2),
                                 (["--routing", "zipf:1", "--replicas", 1], "nearest valid --replicas: 0 or 2", 2)):
        run = moe("serve-sim", "--steps", 4, *options, ranks=ranks)
        lines = run.stderr.splitlines()
        expect(run.returncode in (1, 2) and len(lines) == 1 and lines[0].startswith("moe: ") and part in lines[0] and run.stdout == "",
               f"{options} on {ranks} ranks: exit code {run.returncode}: {run.stderr}{run.stdout[:200]}")


with tempfile.TemporaryDirectory() as temporary:
    where = pathlib.Path(temporary)
    check_zipf()
    check_mpi(where)
    check_trace(where)
    check_files(where)
    check_written_files(where)
    check_many_steps(where)
    check_text(where)
    check_errors(where)
    expect(not list(where.glob("*.tmp*")), "a temporary file was left")
finish()
