# SPDX-License-Identifier: Apache-2.0
# tests/tool/cuda_nccl_test.py: `moe block --device cuda` between GPUs over NCCL gives the expected output with every backend, over a
# communicator and over windows, and refuses what its exchange does not support. Skipped where the tool finds no GPU or was built without
# CUDA or NCCL, or where no case can run; cases with more ranks than GPUs are left out, each with a line "skipped, ...".
import json
import os
import pathlib
import sys
import tempfile

from tool import DATA, bf16_rows, in_parallel, moe, no_gpus, padded_block, read, same_output, same_routing, rows, values

FILES = ("qwen3_moe", "deepseek_v3_e16k4", "mixtral_e8k2", "olmoe")
COMMUNICATORS = ("all_to_all_v", "allgather_reduce_scatter", "naive")
STANDARD = ("high_throughput", "low_latency_rank_major", "one_sided", "two_sided")
BATCHED = ("low_latency", "pplx")
# max |got - want| / max |want|: float32; bf16 activations and weights.
FLOAT32, BF16 = 1e-5, 2e-2
CASES = ([(backend, "cuda_reference", FLOAT32) for backend in COMMUNICATORS] +
         [(backend, "hopper_contiguous", BF16) for backend in COMMUNICATORS] +
         [(backend, experts, BF16) for backend in STANDARD for experts in ("cuda_reference", "hopper_contiguous")] +
         [(backend, experts, BF16) for backend in BATCHED for experts in ("cuda_reference", "hopper_masked")])


def check(folder, file, ranks, backend, experts, bound, options):
    output = folder / "out.safetensors"
    run = moe("block", file, "--device", "cuda", "--backend", backend, "--experts", experts, "--output", output, "--json", *options,
              ranks=ranks)
    if run.returncode != 0:
        return run.stderr.strip() or f"exit code {run.returncode}"
    report = json.loads(run.stdout)
    composition = {key: report["composition"][key] for key in ("backend", "experts", "device")}
    if composition != {"backend": backend, "experts": experts, "device": "cuda"} or report["ranks"] != ranks:
        return f"report {report}"
    want, got = read(file)[0], read(output)[0]
    wrong = same_output(values(got["output"]), values(want["expected"]), bound)
    return wrong or same_routing(rows(got["topk_ids"]), rows(got["topk_weights"]), rows(want["topk_ids"]), rows(want["topk_weights"]))


def refusals(folder, file, ranks):
    """What exchanges over windows do not take, in their own words."""
    for backend in ("one_sided", "two_sided", "pplx"):
        run = moe("block", file, "--device", "cuda", "--backend", backend, "--output", folder / "out.safetensors", ranks=ranks)
        expected = f"moe: E_UNSUPPORTED: {backend}: hidden 64 is not a multiple of 128 up to 16384"
        if run.returncode != 1 or run.stdout != "" or run.stderr.strip() != expected:
            yield f"{backend}, hidden 64: {run}"


class Cases:
    def __init__(self, folder):
        self.folder = folder
        self.ran = self.failed = self.most_ranks = 0
        self.too_many = {}  # ranks that the GPUs do not suffice for -> the tool's words
        self.over = False   # nothing runs here

    def run(self, number, ranks):
        """Case `number` on so many ranks."""
        backend, experts, bound = CASES[number]
        folder = self.folder / f"{number}_{ranks}"
        folder.mkdir()
        file = block(FILES[number % len(FILES)])
        file = padded_block(file, folder / "block.safetensors", 128, 128) if backend in STANDARD + BATCHED else file
        file = bf16_rows(file, folder) if bound == BF16 else file
        options = ["--placement", "round_robin", "--deal", "random", "--seed", number] if experts == "cuda_reference" else []
        wrong = self.too_many.get(ranks) or check(folder, file, ranks, backend, experts, bound, options)
        reason, self.over = no_gpus(wrong or "", ranks)
        if reason:
            print(f"skipped, {ranks} ranks: {reason}")
            if "each rank needs its own" in reason:
                self.too_many[ranks] = reason
            return
        self.ran += 1
        self.most_ranks = max(self.most_ranks, ranks)
        if wrong:
            self.failed += 1
            print(f"FAILED: {FILES[number % len(FILES)]}, {ranks} ranks, {backend}, {experts}: {wrong}")


def block(name):
    return next(f for f in sorted((DATA / "moe_blocks").iterdir()) if f.name.startswith(name))


def main():
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        cases = Cases(folder)
        cases.run(0, 1)
        if cases.over:
            return 77
        # A run mostly starts processes, CUDA and NCCL, so several run at a time.
        in_parallel([(cases.run, number, ranks) for number in range(len(CASES)) for ranks in (1, 2, 4) if (number, ranks) != (0, 1)],
                    max(4, min(8, (os.cpu_count() or 1) // 5)))
        if cases.ran == 0:
            return 77
        for wrong in refusals(folder, block(FILES[0]), cases.most_ranks):
            cases.failed += 1
            print(f"FAILED: {wrong}")
    print(f"{cases.ran} cases, {cases.failed} failures")
    return int(cases.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
