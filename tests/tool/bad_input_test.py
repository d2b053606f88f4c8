# SPDX-License-Identifier: Apache-2.0
# tests/tool/bad_input_test.py: any error in files, configuration or arguments gives one line that names it and exit code 1 or 2, quickly,
# on one rank and on three, and no output file.
import pathlib
import sys
import tempfile
import time

from bad_inputs import make
from tool import in_parallel, moe

DEADLINE = 20  # seconds; a rank that waits for another gives up after 100


def run_case(outputs, number, case):
    name, arguments, parts, ranks, code = case
    target = outputs / f"{number}" / "out.safetensors"
    target.parent.mkdir()
    if "--output" not in arguments and arguments[0] not in ("check", "list", "plan"):
        arguments = [*arguments, "--output", target]
    start = time.monotonic()
    run = moe(*arguments, ranks=ranks, timeout=3 * DEADLINE)
    seconds = time.monotonic() - start
    lines = run.stderr.splitlines()
    problems = []
    if run.returncode != code:
        problems.append(f"exit code {run.returncode}, expected {code}")
    if len(lines) != 1 or not lines[0].startswith("moe: ") or any(ord(c) < 32 for c in lines[0]):
        problems.append("not one line that begins with 'moe: '")
    if run.stdout:
        problems.append(f"output {run.stdout[:200]!r}")
    problems += [f"'{part}' is not named" for part in map(str, parts) if part not in run.stderr]
    if seconds > DEADLINE:
        problems.append(f"took {seconds:.0f} s")
    if list(target.parent.iterdir()):
        problems.append(f"left {list(target.parent.iterdir())}")
    return [f"FAILED: {name} on {ranks} ranks: {'; '.join(problems)}\n    {run.stderr[:1000].strip()}"] if problems else []


with tempfile.TemporaryDirectory() as temporary:
    root = pathlib.Path(temporary)
    cases, unchanged = make(root)
    (root / "out").mkdir()
    results = in_parallel([(run_case, root / "out", i, case) for i, case in enumerate(cases)], 6)
    left = list(root.rglob("*.tmp*"))
    left += root.glob("disagreement/*.safetensors")
    kept = unchanged()
failures = [line for result in results for line in result] + [f"FAILED: files were left: {left}"] * bool(left)
failures += ["FAILED: an input, a pipe or a link was written"] * (not kept)
print("\n".join(failures))
print(f"{len(cases)} cases, {len(failures)} failed")
sys.exit(1 if failures else 0)
