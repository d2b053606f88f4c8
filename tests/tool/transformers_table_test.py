# SPDX-License-Identifier: Apache-2.0
# tests/tool/transformers_table_test.py: bench/transformers_table.py: the median of the turns, what failed with its reason, and verdicts
# that are no where "moe" is slower, further from float32, fell back or did not run.
import json
import pathlib
import subprocess
import sys
import tempfile

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "bench" / "transformers_table.py"
failures = 0


def point(name, implementation, ms, turn=0, rows=16, model="qwen3"):
    return {"model": model, "layers": 8, "point": name, "turn": turn, "implementation": implementation, "ms": ms,
            "tokens_per_s": rows / ms * 1e3}


def run(records, *, code):
    global failures
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "lines"
        path.write_text("a line of another program\n" + "".join(json.dumps(record) + "\n" for record in records))
        done = subprocess.run([sys.executable, "-B", SCRIPT, path], capture_output=True, text=True, check=False)
    if done.returncode != code:
        print(f"FAILED: exit code {done.returncode}, expected {code}\n{done.stdout}{done.stderr}")
        failures += 1
    return done.stdout


def expect(said, *parts):
    global failures
    for part in parts:
        if part not in said:
            print(f"FAILED: no {part!r} in\n{said}")
            failures += 1


CHECKS = [{"model": "qwen3", "check": name, "distance": 0.16} for name in ("moe", "grouped_mm", "eager")]
GOOD = [*CHECKS,
        point("decode 16", "moe", 2.0), point("decode 16", "moe", 4.0, 1), point("decode 16", "grouped_mm", 5.0),
        point("decode 16", "eager", 9.0),
        point("prefill 4096", "moe", 9.0, rows=4096), point("prefill 4096", "grouped_mm", 14.0, rows=4096),
        {"model": "qwen3", "point": "prefill 4096", "implementation": "eager", "failed": "OutOfMemoryError: out of memory",
         "in": "x.py:1 f"},
        {"model": "qwen3", "fallbacks": ["None"]}]  # fmt: skip

expect(run(GOOD, code=0), "### qwen3, 8 layers", "| call | `moe` | `grouped_mm` | `eager` |",
       "| decode 16 | 3.000 (6000) | 5.000 (3200) | 9.000 (1778) |",
       "| prefill 4096 | 9.000 (455111) | 14.000 (292571) | [1] |", "[1] OutOfMemoryError: out of memory",
       "* yes: moe is faster than grouped_mm at all 2 points",
       "* yes: moe is faster than eager at all 1 points", "* yes: logits from a float32 eager run: moe 0.16, grouped_mm 0.16")  # fmt: skip
expect(run([*GOOD, point("decode 1", "moe", 6.0), point("decode 1", "grouped_mm", 5.5)], code=1),
       "* NO: moe is not faster than grouped_mm at 1 of 3 points: decode 1: 6.000 and 5.500 ms")
expect(run([*GOOD, point("decode 1", "moe", 5.0), point("decode 1", "grouped_mm", 5.0)], code=1), "at 1 of 3 points")
expect(run([*GOOD, point("decode 1", "grouped_mm", 5.5)], code=1), "decode 1: moe did not run")
expect(run([dict(GOOD[0], distance=0.17), *GOOD[1:]], code=1), "* NO: logits from a float32 eager run: moe 0.17, grouped_mm 0.16")
expect(run(GOOD[1:], code=1), "* NO: logits: not checked for both moe and grouped_mm")
expect(run([*GOOD[:-1], {"model": "qwen3", "fallbacks": ["static scales"]}], code=1), "* NO: moe fell back: static scales")
two = run([*GOOD, *({**record, "model": "gpt_oss_mxfp4"} for record in GOOD)], code=0)
expect(two, "### qwen3, 8 layers", "### gpt_oss_mxfp4, 8 layers")
run([], code=1)
print(f"{failures} failures")
sys.exit(1 if failures else 0)
