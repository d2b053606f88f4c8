#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# bench/before_after.py: times the benchmarks of two build folders alternately, in one run, and reports which points became slower.
"""Usage: before_after.py BEFORE AFTER [--gpus N] [--seconds S] [--sweeps K] [--only REGEX] [--limit PERCENT] [--json OUT]

BEFORE and AFTER are build folders (build/gpu) with bench/layer, for more than one GPU with bench/exchange_bench and bench/ep_layer_bench.
One GPU: bench/layer. More: exchange_bench and ep_layer_bench on N GPUs. The points are cut into jobs of a few seconds. Each job runs as
before, after, after, before; once all have, again, K (3) times in all or as often as fits into S seconds (150), which are not exceeded:
those that did not run are named.

A line a point: the median before, the median after, after / before, and the spread: by how much two consecutive runs of the same binary
differ, in percent of their median: the median of these differences, of the binary where it is larger. "SLOWER" marks a point that is slower
by more than PERCENT (1) beyond the spread, "slower, within the spread" one that is slower by more than PERCENT.

Exit code: 0 if no point is slower, 1 if one is, 2 if a benchmark failed or nothing was measured.
"""
import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}
LAYER_SHAPES = ("qwen3-30b-a3b", "deepseek-v3-ep8rank", "qwen3-235b-a22b", "mixtral-8x7b")
TURNS = ("before", "after", "after", "before")


class Failure(Exception):
    """A benchmark failed; the text holds its command and its last output."""


class Job:
    """Some points of one program, measured by one run of it."""

    def __init__(self, name, program, arguments, ranks=0):
        self.name, self.program, self.arguments, self.ranks = name, program, arguments, ranks
        self.times = {"before": {}, "after": {}}  # point: microseconds of each run
        self.longest = 0.0  # seconds of a run

    def run(self, side, build, deadline):
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder) / "out.json"
            command = [str(build / "bench" / self.program), *(text.replace("OUT", str(out)) for text in self.arguments)]
            if self.ranks:
                command = ["mpirun", "--oversubscribe", "--bind-to", "none", "-n", str(self.ranks), *command]
            start = time.monotonic()
            environment = {**ENVIRONMENT, **os.environ}
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
            try:
                output, _ = process.communicate(timeout=max(0.1, deadline - start))
            except subprocess.TimeoutExpired:
                process.terminate()  # mpirun then ends its ranks
                process.communicate()
                return False
            self.longest = max(self.longest, time.monotonic() - start)
            if process.returncode != 0:
                raise Failure(f"{' '.join(command)}: exit code {process.returncode}\n{output[-4000:]}")
            points = read_points(out.read_text() if out.exists() else "")
            if not points:
                raise Failure(f"{' '.join(command)}: no points\n{output[-4000:]}")
            for point, us in points.items():
                self.times[side].setdefault(f"{self.name}: {point}", []).append(us)
            return True


def read_points(text):
    """{point: microseconds} of Google Benchmark's JSON, or of exchange_bench's, which is one object a line."""
    points = {}
    if text.lstrip().startswith("{") and '"benchmarks"' in text:
        unit = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}
        for one in json.loads(text)["benchmarks"]:
            if one.get("error_occurred"):
                continue  # cuda_reference needs more memory than there is
            name = re.sub(r"/(iterations:\d+|manual_time)", "", one["name"])
            points[name] = one["real_time"] * unit[one["time_unit"]]
            if "experts_us" in one:
                points[f"{name}, experts"] = one["experts_us"]
        return points
    for line in text.splitlines():
        one = json.loads(line)
        timed = {key: value for key, value in one.items() if key in ("us", "pair_us", "dispatch_us", "cached_us", "combine_us")
                 and value > 0}
        measured = ("gb_per_s", "pair_spread_us", "cached_us", "rows_out", "seconds", "grown")
        name = " ".join(f"{key} {value}" for key, value in one.items() if key not in timed and key not in measured and key != "section")
        for key, value in timed.items():
            points[f"{one['section']} {name}, {key.removesuffix('_us')}"] = value
    return points


def jobs_for(gpus):
    """What is measured, the most important first."""
    if gpus == 1:
        report = ["--benchmark_out=OUT", "--benchmark_out_format=json"]
        return [
            Job(f"layer {scheme} {shape}", "layer", [f"--benchmark_filter=hopper_contiguous/{scheme}/{shape}/", *report])
            for shape in LAYER_SHAPES
            for scheme in ("bf16", "fp8_block")
        ]

    def whole(shape, scheme, tokens):
        arguments = ["--shapes", shape, "--schemes", scheme, "--tokens", tokens, "--like-ranks", "8", "--backends", "window", "--json",
                     "OUT"]
        return Job(f"ep_layer {shape} {scheme}", "ep_layer_bench", arguments, ranks=gpus)

    def exchange(section):
        arguments = ["--ranks", str(gpus), "--quick", "--sections", section, "--ht-blocks", "16", "--json", "OUT"]
        return Job(f"exchange {section}", "exchange_bench", arguments)

    return [
        whole("flash", "fp8", "8,128,1024,4096"),
        exchange("ll"),
        exchange("ht"),
        whole("flash", "bf16", "8,128,1024,4096"),
        exchange("windows"),
        whole("pro", "fp8", "8,128,1024,4096"),
    ]


def turns(job, builds, deadline):
    """Four runs of a job. False if they do not all fit before the deadline."""
    for done, side in enumerate(TURNS):
        if time.monotonic() + 1.1 * job.longest * (len(TURNS) - done) > deadline or not job.run(side, builds[side], deadline):
            return False
    return True


def measure(jobs, builds, sweeps, deadline):
    """Runs the jobs in turns, `sweeps` times or as often as fits. Returns those that were not measured."""
    left_out = None
    for _ in range(sweeps):
        fit = [job for job in jobs if turns(job, builds, deadline)]
        if left_out is None:
            left_out = [job for job in jobs if job not in fit]
        jobs = fit
    return left_out


def apart(times):
    """By how much two consecutive runs of one binary differ (the median of all such differences), as a part of the runs' median."""
    return statistics.median(abs(a - b) for a, b in zip(times, times[1:])) / statistics.median(times)


def compare(jobs, limit):
    rows = []
    for job in jobs:
        for point, before in job.times["before"].items():
            after = job.times["after"].get(point)
            if after is None or len(before) < 2 or len(after) < 2:
                continue
            ratio = statistics.median(after) / statistics.median(before)
            spread = max(apart(before), apart(after))
            rows.append(
                {
                    "point": point,
                    "before_us": statistics.median(before),
                    "after_us": statistics.median(after),
                    "ratio": ratio,
                    "spread": spread,
                    "runs": min(len(before), len(after)),
                    "above_limit": ratio > 1.0 + limit / 100.0,
                    "slower": ratio > 1.0 + limit / 100.0 + spread,
                }
            )
    return rows


def show(rows):
    width = max(len(row["point"]) for row in rows)
    print(f"{'point':{width}}  {'before us':>10}  {'after us':>10}  {'ratio':>6}  spread  runs")
    for row in rows:
        mark = "  SLOWER" if row["slower"] else "  slower, within the spread" if row["above_limit"] else ""
        print(
            f"{row['point']:{width}}  {row['before_us']:10.2f}  {row['after_us']:10.2f}  {row['ratio']:6.3f}  {100 * row['spread']:5.1f}%"
            f"  {row['runs']:4}{mark}"
        )
    ratios = [row["ratio"] for row in rows]
    print(
        f"{len(rows)} points, {sum(row['slower'] for row in rows)} slower, {sum(row['above_limit'] for row in rows)} above the limit; "
        f"ratio: median {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}"
    )


def main():
    start = time.monotonic()
    parser = argparse.ArgumentParser(
        usage=__doc__.split("\n\n", maxsplit=1)[0].removeprefix("Usage: "),
        description=__doc__.split("\n\n", maxsplit=1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("before", type=pathlib.Path)
    parser.add_argument("after", type=pathlib.Path)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--sweeps", type=int, default=3)
    parser.add_argument("--only", default="")
    parser.add_argument("--limit", type=float, default=1.0)
    parser.add_argument("--json", type=pathlib.Path)
    o = parser.parse_args()
    for name in ("gpus", "sweeps"):
        if getattr(o, name) < 1:
            parser.error(f"--{name}: {getattr(o, name)} is out of range, at least 1")
    jobs = [job for job in jobs_for(o.gpus) if re.search(o.only, job.name)]
    if not jobs:
        parser.error(f"--only: no job matches {o.only}; there are: {', '.join(job.name for job in jobs_for(o.gpus))}")
    builds = {"before": o.before, "after": o.after}
    for build in builds.values():
        for program in sorted({job.program for job in jobs}):
            if not (build / "bench" / program).is_file():
                parser.error(f"{build / 'bench' / program} is not there: build it with scripts/gpu bench")
    left_out = measure(jobs, builds, o.sweeps, start + o.seconds)
    rows = compare(jobs, o.limit)
    if left_out:
        print(f"not measured in {o.seconds:.0f} s: {', '.join(job.name for job in left_out)}")
    if not rows:
        raise Failure(f"nothing was measured in {o.seconds:.0f} s")
    show(rows)
    if o.json:
        o.json.write_text(json.dumps({"gpus": o.gpus, "limit_percent": o.limit, "points": rows}, indent=1) + "\n")
    return 1 if any(row["slower"] for row in rows) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failure as failure:
        print(f"before_after: {failure}", file=sys.stderr)
        sys.exit(2)
