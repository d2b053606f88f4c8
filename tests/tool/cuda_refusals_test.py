# SPDX-License-Identifier: Apache-2.0
# tests/tool/cuda_refusals_test.py: what `--device cuda` refuses over windows once it has a GPU, it refuses with the exit code, the code
# and the words of `--device host`: weights, and values that the exchange, the scheme or the runner does not take. Skipped where the tool
# finds no GPU or was built without CUDA or NCCL; cases with more ranks than GPUs are left out, each with a line "skipped, ...".
# device_refusals_test.py has what is refused before.
import itertools
import pathlib
import sys
import tempfile

from bad_inputs import BLOCK, WEIGHTS, make
from refusals import BACKENDS, REFERENCE, NeedsGpu, all_ranks, same_refusal, with_output
from tool import in_parallel, padded_block, read, write

BATCHED = ("low_latency", "pplx")
SCHEME = ("--quantization", "fp8_block128")  # which the host has over a communicator


def weights(cases, output):
    """Every input whose weights are refused, the backends in turn: a start of the tool with a GPU takes seconds."""
    refused = [case for case in cases if case[0] in WEIGHTS and (case[3] == 1 or ":" in case[1])]
    for (name, arguments, _, ranks, _), backend in zip(refused, itertools.cycle(BACKENDS)):
        yield name, with_output(arguments, output), backend, 0 if ranks == 1 else ranks


def limits(folder, output):
    """What the scheme, the exchange or the runner refuses. The rows are as wide as device windows need, but not for the scheme."""
    host = ("--backend", "all_to_all_v", *REFERENCE["host"], *SCHEME)
    for backend in BACKENDS:
        cuda = ("--experts", "hopper_masked" if backend in BATCHED else "hopper_contiguous", *SCHEME)
        yield "hidden 64 in blocks of 128", ["block", BLOCK, "--output", output], backend, 0, {"host": host, "cuda": cuda}
    file = padded_block(BLOCK, folder / "padded.safetensors", 128, 128)
    block = ["block", file, "--output", output]
    tensors, metadata = read(file)
    on_input = folder / "on_input.safetensors"
    write(on_input, tensors, {**metadata, "weight_applied_on": "expert_input"})
    for backend in BATCHED:
        yield "router weight on the input of 2 experts", ["block", on_input, "--output", output], backend, 0
    for backend in ("low_latency", "high_throughput", "pplx"):
        yield "halves of 1 row", [*block, "--dual-batch", "on", "--chunk", 1], backend, 0
    yield "8 experts on 3 ranks", block, "pplx", 3


with tempfile.TemporaryDirectory() as temporary:
    root = pathlib.Path(temporary)
    written = root / "out.safetensors"
    inputs, _ = make(root)
    runs = [*weights(inputs, written), *limits(root, written)]
    first = same_refusal(*runs[0])
    if isinstance(first, NeedsGpu):
        print(f"skipped: {first}")
        sys.exit(77)
    found = [first, *in_parallel([(same_refusal, *case) for case in runs[1:]], 4)]
    problems = [what for what in found if what and not isinstance(what, NeedsGpu)]
    if written.exists():
        problems.append("an output was written")
for (_, arguments, _, ranks, *_), what in zip(runs, found):
    if isinstance(what, NeedsGpu):
        print(f"skipped, {all_ranks(arguments, ranks) or 1} ranks: {what}")
for problem in problems:
    print(f"FAILED: {problem}")
print(f"{len(runs)} inputs, {len(problems)} failures")
sys.exit(1 if problems else 0)
