# SPDX-License-Identifier: Apache-2.0
# tests/tool/device_refusals_test.py: what `--device cuda` refuses before it looks for a GPU, it refuses over windows with the exit code,
# the code and the words of `--device host`. Programs with and without CUDA check the input in the same order, so this test runs in any
# build, on machines without a GPU too. cuda_refusals_test.py has what is refused later.
import itertools
import json
import pathlib
import sys
import tempfile

from bad_inputs import BLOCK, WEIGHTS, make
from refusals import BACKENDS, REFERENCE, NeedsGpu, same_refusal, with_output
from tool import TOOL, in_parallel, moe

OWN = {"--backend", "--experts", "--device", "--quantization"}
INSIDE = {"host": ("--experts", "monolithic_reference"), "cuda": ("--experts", "monolithic_cuda_reference")}


def files(cases, output):
    """Every bad input of one rank, with the backends in turn."""
    turn = itertools.cycle(BACKENDS)
    for name, arguments, _, ranks, _ in cases:
        if ranks == 1 and arguments[0] in ("block", "layer") and not OWN & set(map(str, arguments)) and name not in WEIGHTS:
            yield name, with_output(arguments, output), next(turn), 0


def options(folder, output):
    """Grids, placements, replicas and compositions that cannot be, with every backend."""
    maps = folder / "maps.json"
    maps.write_text(json.dumps({"models": {}}))
    short = folder / "short.json"
    short.write_text(json.dumps({"models": {"m": {"physical_to_logical": [[0, 1, 2]]}}}))
    block = ["block", BLOCK, "--output", output]
    refused = [(2, ["--tp", 3]), (4, ["--dp", 2, "--pcp", 2]), (2, ["--expert-parallel", "off"]), (2, ["--tp", 2, "--sequence-parallel"]),
               (2, ["--replicas", 1]), (2, ["--placement", "round_robin", "--replicas", 2]), (2, ["--placement", maps]),
               (2, ["--placement", short])]
    for (ranks, more), backend in itertools.product(refused, BACKENDS):
        yield f"{more}", [*block, *more], backend, ranks
    for backend in BACKENDS:
        yield "experts that route inside", block, backend, 2, INSIDE
        yield "int4_group128", [*block, "--quantization", "int4_group128"], backend, 2
    for backend in ("one_sided", "two_sided"):
        yield "halves", [*block, "--dual-batch", "on"], backend, 2
    for backend in ("two_sided", "pplx"):
        yield "sequence parallel", [*block, "--tp", 2, "--sequence-parallel"], backend, 4
    for backend, differs in zip(BACKENDS, ("--seed", "--repeat", "--chunk", "--sequence-length")):
        yield f"ranks differ in {differs}", [*block, differs, 7, ":", "-n", 1, TOOL, *block, differs, 8], backend, 2
    yield "more ranks than experts", block, "low_latency", 9


def other_space(output):
    """Experts of the other space, and ranks in two spaces."""
    block = ["block", BLOCK, "--output", output]
    mixed = (("cuda", "reference", "host"), ("host", "cuda_reference", "cuda"))
    for backend, (space, experts, other) in itertools.product(BACKENDS, mixed):
        run = moe(*block, "--device", space, "--backend", backend, "--experts", experts, ranks=0)
        expected = f"moe: E_CONFIG: --experts {experts} needs --device {other}\n"
        if run.returncode != 1 or run.stdout or run.stderr != expected:
            yield f"{experts} with {backend} on {space}: {run}"
    cuda, host = ([*block, "--backend", "pplx", "--device", space, *REFERENCE[space]] for space in ("cuda", "host"))
    run = moe(*cuda, ":", "-n", 1, TOOL, *host, ranks=2)
    if run.returncode != 1 or "E_MISMATCH" not in run.stderr or "about --device: rank 0 has cuda, rank 2 has host" not in run.stderr:
        yield f"ranks in two spaces: {run}"


with tempfile.TemporaryDirectory() as temporary:
    root = pathlib.Path(temporary)
    written = root / "out.safetensors"
    inputs, unchanged = make(root)
    runs = [*files(inputs, written), *options(root, written)]
    problems = [found for found in in_parallel([(same_refusal, *case) for case in runs], 4) if found]
    problems = [f"the GPU is checked before the input: {found}" if isinstance(found, NeedsGpu) else found for found in problems]
    problems += other_space(written)
    if written.exists() or not unchanged():
        problems.append("a file was written")
for problem in problems:
    print(f"FAILED: {problem}")
print(f"{len(runs)} inputs, {len(problems)} failures")
sys.exit(1 if problems else 0)
