# SPDX-License-Identifier: Apache-2.0
# tests/tool/before_after_test.py: bench/before_after.py times two builds in turns, reports points slower by more than the spread, keeps its
# time limit and stops if a benchmark fails. The benchmarks are scripts here that print times of their own.
import json
import pathlib
import subprocess
import sys
import tempfile
import time

from expectations import expect, finish

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "bench" / "before_after.py"

# Google Benchmark's JSON of three points; the k-th run of a build adds k noise to the second.
LAYER = """#!{python}
import json, pathlib, sys, time
time.sleep({seconds})
log = pathlib.Path({log!r})
log.write_text(log.read_text() + {side!r} + " ")
out = next(a for a in sys.argv if a.startswith("--benchmark_out=")).split("=")[1]
run = log.read_text().split().count({side!r})
times = [{us}, 50 + {noise} * (run % 2), 7]
names = ["a/tokens:1/iterations:25/manual_time", "a/tokens:8/iterations:25/manual_time", "a/tokens:64"]
points = [dict(name=n, real_time=t, time_unit="us") for n, t in zip(names, times)]
points.append(dict(name="too large", error_occurred=True, real_time=0, time_unit="us"))
pathlib.Path(out).write_text(json.dumps(dict(benchmarks=points)))
sys.exit({code})
"""
# exchange_bench's lines, and what ep_layer_bench writes on rank 0.
EXCHANGE = """#!{python}
import sys
out = sys.argv[sys.argv.index("--json") + 1]
line = '{{"section":"low_latency","ranks":2,"tokens":8,"pair_us":{us},"pair_spread_us":0.5,"dispatch_us":4,"rows_out":3}}'
open(out, "w").write(line + chr(10) + line.replace("8", "9") + chr(10))
"""
EP_LAYER = """#!{python}
import json, os, sys
out = sys.argv[sys.argv.index("--json") + 1]
point = dict(name="flash/fp8/low_latency/8", real_time={us}, time_unit="us", experts_us=60)
if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
    json.dump(dict(benchmarks=[point]), open(out, "w"))
"""


class Builds:
    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.log = self.folder / "log"

    def program(self, side, name, text, **values):
        path = self.folder / side / "bench" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.format(python=sys.executable, log=str(self.log), side=side, **values))
        path.chmod(0o755)

    def layer(self, side, us, noise=0.0, seconds=0.0, code=0):
        self.program(side, "layer", LAYER, us=us, noise=noise, seconds=seconds, code=code)

    def run(self, *arguments):
        self.log.write_text("")
        command = [sys.executable, str(SCRIPT), str(self.folder / "before"), str(self.folder / "after"), *arguments]
        start = time.monotonic()
        result = subprocess.run(command, capture_output=True, text=True)
        result.seconds = time.monotonic() - start
        return result


with tempfile.TemporaryDirectory() as name:
    builds = Builds(name)
    one = ("--only", "bf16 qwen3-30b", "--sweeps", "2", "--json", str(builds.folder / "table.json"))

    builds.layer("before", us=100.0)
    builds.layer("after", us=102.0)
    run = builds.run(*one)
    expect(run.returncode == 1 and run.stdout.count("SLOWER") == 1 and "3 points, 1 slower, 1 above the limit" in run.stdout, run)
    expect("1.020" in run.stdout, run)
    order = builds.log.read_text().split()
    expect(order == ["before", "after", "after", "before"] * 2, order)
    points = {row["point"]: row for row in json.loads((builds.folder / "table.json").read_text())["points"]}
    slow = points["layer bf16 qwen3-30b-a3b: a/tokens:1"]
    expect(slow["slower"] and slow["before_us"] == 100.0 and slow["after_us"] == 102.0 and slow["spread"] == 0.0, slow)

    builds.layer("after", us=100.9, noise=3.0)  # within a percent; the second point differs by less than its runs do
    run = builds.run(*one, "--limit", "1")
    expect(run.returncode == 0 and "SLOWER" not in run.stdout, run)
    expect("  slower, within the spread" in run.stdout and "0 slower, 1 above the limit" in run.stdout, run)
    expect(builds.run(*one, "--limit", "0.5").returncode == 1, "a lower limit")

    builds.layer("after", us=100.0, seconds=60.0)  # longer than the time limit
    run = builds.run(*one, "--seconds", "4")
    expect(run.returncode == 2 and "nothing was measured in 4 s" in run.stderr and run.seconds < 20.0, run)

    builds.layer("after", us=100.0, code=1)
    run = builds.run(*one)
    expect(run.returncode == 2 and "exit code 1" in run.stderr and "after/bench/layer" in run.stderr, run)

    for arguments, part in ((("--only", "nothing"), "no job matches"), (("--gpus", "0"), "--gpus: 0 is out of range"),
                            (("--gpus", "2"), "is not there")):
        run = builds.run(*arguments)
        expect(run.returncode == 2 and part in run.stderr, run)

    for side, us in (("before", 10.0), ("after", 11.0)):
        builds.program(side, "exchange_bench", EXCHANGE, us=us)
        builds.program(side, "ep_layer_bench", EP_LAYER, us=us)
    run = builds.run("--gpus", "2", "--only", "exchange ll|flash fp8", "--sweeps", "1")
    expect(run.returncode == 1 and "6 points, 3 slower" in run.stdout, run)
    expect("exchange ll: low_latency ranks 2 tokens 8, pair" in run.stdout, run)
    expect("ep_layer flash fp8: flash/fp8/low_latency/8, experts" in run.stdout, run)

finish()
