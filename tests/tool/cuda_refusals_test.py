# SPDX-License-Identifier: Apache-2.0
# tests/tool/cuda_refusals_test.py: what `--device cuda` refuses over windows once it has a GPU, it refuses with the exit code, the code
# and the words of `--device host`: weights, and values that the exchange or the runner does not take; and sizes that only its kernels do
# not take. Skipped where the tool finds no GPU or was built without CUDA or NCCL; cases with more ranks than GPUs are left out, each with a
# line "skipped, ...". device_refusals_test.py has what is refused before.
#
# A case is a start of the tool for each space. The one with a GPU takes seconds, most of them for CUDA and NCCL, so several run at a time,
# each with its seconds in a line. One that does not end is killed and named; no case begins after LIMIT.
import itertools
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

from bad_inputs import BLOCK, WEIGHTS, make
from refusals import BACKENDS, NeedsGpu, all_ranks, same_refusal, with_output
from tool import in_parallel, moe, no_gpus, padded_block, read, write

BATCHED = ("low_latency", "pplx")
LIMIT, RUN = 110, 45  # seconds: in which cases begin, and of one start of the tool
AT_A_TIME = max(2, min(8, (os.cpu_count() or 1) // 2))  # each has less than 2 GB on the first GPU
STARTED = time.monotonic()


def weights(cases, output):
    """Every input whose weights are refused, the backends in turn: a start of the tool with a GPU takes seconds."""
    refused = [case for case in cases if case[0] in WEIGHTS and (case[3] == 1 or ":" in case[1])]
    for (name, arguments, _, ranks, _), backend in zip(refused, itertools.cycle(BACKENDS)):
        yield same_refusal, name, with_output(arguments, output), backend, 0 if ranks == 1 else ranks


def too_narrow(name, arguments, backend, ranks, timeout):
    """None if the device refuses what the host computes, blocks of a scheme that are not whole, and names the size; the exchange may be
    the first to see it, or the experts."""
    experts = "hopper_masked" if backend in BATCHED else "hopper_contiguous"
    run = moe(*arguments, "--device", "cuda", "--backend", backend, "--experts", experts, "--quantization", "fp8_block128", ranks=ranks,
              timeout=timeout)
    reason = no_gpus(run.stderr.strip(), 1)[0]
    if reason:
        return NeedsGpu(reason)
    words = r"moe: E_(CONFIG|UNSUPPORTED): .*(hidden 64|intermediate 32) .*multiple of .*\n"
    if run.returncode != 1 or run.stdout or not re.fullmatch(words, run.stderr):
        return f"{name}, {backend}: {run}"
    return None


def limits(folder, output):
    """What the exchange, the experts or the runner refuses. The rows are as wide as device windows need, but not for the scheme."""
    for backend in BACKENDS:
        yield too_narrow, "hidden 64 in blocks of 128", ["block", BLOCK, "--output", output], backend, 0
    file = padded_block(BLOCK, folder / "padded.safetensors", 128, 128)
    block = ["block", file, "--output", output]
    tensors, metadata = read(file)
    on_input = folder / "on_input.safetensors"
    write(on_input, tensors, {**metadata, "weight_applied_on": "expert_input"})
    for backend in BATCHED:
        yield same_refusal, "router weight on the input of 2 experts", ["block", on_input, "--output", output], backend, 0
    for backend in ("low_latency", "high_throughput", "pplx"):
        yield same_refusal, "halves of 1 row", [*block, "--dual-batch", "on", "--chunk", 1], backend, 0
    yield same_refusal, "8 experts on 3 ranks", block, "pplx", 3


def run_check(check, name, arguments, backend, ranks):
    """check(), with a line of what came out."""
    start = time.monotonic()
    case = f"{name}, {backend} on {all_ranks(arguments, ranks) or 1} ranks"
    left = LIMIT - (start - STARTED)
    try:
        what = check(name, arguments, backend, ranks, timeout=RUN) if left > 0 else f"{case}: no time was left"
    except subprocess.TimeoutExpired as late:
        what = f"{case}: not over after {late.timeout:.0f} s: {late.cmd}: {late.stderr}"
    now = time.monotonic()
    result = f"skipped: {what}" if isinstance(what, NeedsGpu) else "FAILED" if what else "fine"
    print(f"{now - STARTED:5.1f} s, took {now - start:4.1f} s: {case}: {result}", flush=True)
    return what


with tempfile.TemporaryDirectory() as temporary:
    root = pathlib.Path(temporary)
    written = root / "out.safetensors"
    inputs, _ = make(root)
    # The first one says whether there is a GPU. Those with more ranks take longer and begin before the others.
    first, *others = [*weights(inputs, written), *limits(root, written)]
    found = [run_check(*first)]
    if isinstance(found[0], NeedsGpu):
        print(f"skipped: {found[0]}")
        sys.exit(77)
    others.sort(key=lambda case: -all_ranks(case[2], case[4]))
    found += in_parallel([(run_check, *case) for case in others], AT_A_TIME)
    problems = [what for what in found if what and not isinstance(what, NeedsGpu)]
    if written.exists():
        problems.append("an output was written")
for (_, _, arguments, _, ranks), what in zip([first, *others], found):
    if isinstance(what, NeedsGpu):
        print(f"skipped, {all_ranks(arguments, ranks) or 1} ranks: {what}")
for problem in problems:
    print(f"FAILED: {problem}")
print(f"{len(found)} inputs, {len(problems)} failures, {time.monotonic() - STARTED:.0f} s")
sys.exit(1 if problems else 0)
