# SPDX-License-Identifier: Apache-2.0
# tests/tool/cuda_grid_test.py: `moe block --device cuda` gives what the host gives on one rank: every block file on one GPU, and over NCCL
# on grids of tensor, data and context parallel ranks, in chunks, in two halves and with replicas. The argument is the number of ranks.
# Skipped where the tool finds fewer GPUs or was built without CUDA, cuBLAS or NCCL.
# moe-ranks: 1 2 4
import itertools
import json
import os
import pathlib
import sys
import tempfile

from tool import DATA, bf16_rows, in_parallel, moe, no_gpus, padded_block, read, rows, same_output, same_routing, values

# Shared experts with a sigmoid gate; grouped routing with shared experts; expert biases; zero experts; a latent width.
FAMILIES = ("qwen2_moe", "deepseek_v2", "gpt_oss", "longcat", "nemotron_h_latent")
PADDED = ("qwen2_moe", "deepseek_v2", "olmoe")  # padded_block() knows their tensors
GATHER, LOCAL = ("naive", "allgather_reduce_scatter"), ("no_expert_parallel",)
# max |got - want| / max |want|: float32; bf16 activations and weights.
FLOAT32, BF16 = 1e-5, 2e-2
REFERENCE = ["--experts", "cuda_reference"]
INSIDE = "monolithic_cuda_reference"
NEVER_SPLIT = "auto: batches are never split: on two H200 and on four H100 "
AT_A_TIME = max(4, min(8, (os.cpu_count() or 1) // 5))  # a run mostly starts processes, CUDA and NCCL


def grids():
    """(ranks, options): every grid of 2 and 4 ranks and backend over a communicator, every third in chunks of 3 rows, every second with
    rows dealt unevenly, every fourth with the shared experts first."""
    number = 0
    for tp, dp, pcp in ((2, 1, 1), (1, 2, 1), (1, 1, 2), (4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 4, 1)):
        ranks, size = tp * dp * pcp, ["--tp", tp, "--dp", dp, "--pcp", pcp]
        local = LOCAL if dp * pcp == 1 else ()
        forms = [("on", [], (*GATHER, "all_to_all_v", *local)), ("off", [], (*GATHER, *local))]
        if tp > 1 and dp > 1:
            forms.append(("on", ["--sequence-parallel"], (GATHER[1], "all_to_all_v")))
        for parallel, sequence, backends in forms:
            for backend in backends:
                options = [*size, "--expert-parallel", parallel, *sequence, "--backend", backend, *REFERENCE]
                options += ["--chunk", 3] if number % 3 == 0 else []
                options += ["--deal", "random", "--seed", number] if number % 2 else []
                options += ["--shared-overlap", "off"] if number % 4 == 0 else []
                yield ranks, options
                number += 1


def windows():
    """(ranks, options) in bf16 over windows and with the Hopper experts."""
    pairs = (("low_latency", "hopper_masked"), ("low_latency", "cuda_reference"), ("high_throughput", "hopper_contiguous"),
             ("one_sided", "cuda_reference"), ("pplx", "hopper_masked"), ("low_latency_rank_major", "hopper_contiguous"))
    for number, (backend, experts) in enumerate(pairs):
        options = ["--backend", backend, "--experts", experts]
        options += ["--chunk", 4] if number % 2 else []
        yield 2, options
        yield 2, [*options, "--tp", 2]
        yield 4, [*options, "--tp", 2, "--dp", 2, *([] if backend == "pplx" else ["--sequence-parallel"])]
    yield 2, ["--tp", 2, "--expert-parallel", "off", "--backend", "allgather_reduce_scatter", "--experts", "hopper_contiguous"]
    yield 2, ["--tp", 2, "--expert-parallel", "off", "--backend", "no_expert_parallel", "--experts", "hopper_contiguous", "--chunk", 5]


def inside():
    """(ranks, options) of experts that route inside."""
    experts = ["--experts", INSIDE]
    yield 1, experts
    yield 2, [*experts, "--tp", 2, "--backend", "no_expert_parallel"]
    yield 2, [*experts, "--backend", "naive", "--chunk", 3]
    yield 2, [*experts, "--backend", "allgather_reduce_scatter", "--deal", "random", "--seed", 5]
    yield 4, [*experts, "--tp", 2, "--dp", 2, "--backend", "allgather_reduce_scatter", "--sequence-parallel"]


class Runs:
    def __init__(self, folder):
        self.folder = folder
        self.ran = self.failed = 0
        self.number = itertools.count()
        self.over = False   # nothing runs here

    def output(self, file, ranks, options):
        """(what is wrong, report, tensors); all None where this cannot run here."""
        if self.over:
            return None, None, None
        output = self.folder / f"out{next(self.number)}.safetensors"
        run = moe("block", file, "--device", "cuda", "--output", output, "--json", *options, ranks=ranks)
        reason, over = no_gpus(run.stderr.strip(), ranks)
        if reason:
            print(f"skipped, {ranks} ranks: {reason}")
            self.over = over or "each rank needs its own" in reason
            return None, None, None
        self.ran += 1
        if run.returncode != 0 or run.stderr:
            return f"exit code {run.returncode}: {run.stderr}", None, None
        return None, json.loads(run.stdout), read(output)[0]

    def report(self, file, ranks, options, wrong):
        if wrong:
            self.failed += 1
            print(f"FAILED: {file.name} on {ranks} ranks {options}: {wrong}")

    def equals_host(self, file, ranks, options, bound):
        """The output of the file, its routing unless the experts route inside, and the grid that was asked for."""
        wrong, report, got = self.output(file, ranks, options)
        if got is not None:
            want, metadata = read(file)
            skip = int(metadata["num_experts"]) if metadata["routing_family"] == "mlp_router_skip" else None
            wrong = same_output(values(got["output"]), values(want["expected"]), bound) or wrong_report(report, ranks, options)
            if INSIDE in options:
                wrong = wrong or (f"tensors {sorted(got)}" if set(got) != {"output"} else None)
            else:
                wrong = wrong or same_routing(rows(got["topk_ids"]), rows(got["topk_weights"]), rows(want["topk_ids"]),
                                              rows(want["topk_weights"]), skip)
        self.report(file, ranks, options, wrong)

    def same_bits(self, file, ranks, options, ways):
        """Output and routing are the same, bit for bit, with each of the ways."""
        outputs = []
        for way, halves in ways:
            wrong, report, got = self.output(file, ranks, [*options, *way])
            if got is None and wrong is None:
                return
            if not wrong and report["passes_in_halves"] != (report["passes"] if halves else 0):
                wrong = f"{report['passes_in_halves']} of {report['passes']} passes in halves"
            if not wrong and "auto" in way and not report["dual_batch"].startswith(NEVER_SPLIT):
                wrong = f"the reason {report['dual_batch']}"
            self.report(file, ranks, [*options, *way], wrong)
            outputs.append(got)
        self.report(file, ranks, options, None if all(got == outputs[0] for got in outputs) else "the bits differ")


def wrong_report(report, ranks, options):
    """What the report of a run says other than its options."""
    named = dict(zip(map(str, options), options[1:]))
    grid = report["grid"]
    if report["ranks"] != ranks or grid["tp"] != named.get("--tp", 1) or grid["sequence_parallel"] != ("--sequence-parallel" in options):
        return f"report {report}"
    if (grid["ep"], grid["moe_tp"]) != ((1, ranks) if named.get("--expert-parallel") == "off" else (ranks, 1)):
        return f"grid {grid}"
    most = max(report["tokens_per_rank"])
    most = -(-most // grid["tp"]) if grid["sequence_parallel"] else most
    if report["passes"] != (max(-(-most // named["--chunk"]), 1) if "--chunk" in options else 1):
        return f"{report['passes']} passes, the largest rank has {most} rows"
    if not (report["seconds"]["route"] > 0 and report["seconds"]["experts"] > 0 and min(report["seconds"].values()) >= 0):
        return f"times {report['seconds']}"
    return None


def check_log(runs, file):
    """The log names the composition and the tiles of the Hopper experts."""
    run = moe("block", file, "--device", "cuda", "--experts", "hopper_contiguous", "--log", "info", "--output",
              runs.folder / "log.safetensors", ranks=0)
    reason = no_gpus(run.stderr.strip(), 1)[0]
    if reason:
        print(f"skipped: {reason}")
        return
    parts = ("composition: quantization none, backend no_expert_parallel, experts hopper_contiguous, space cuda",
             "experts: hopper_contiguous for 37 rows: Tuning{tile_rows ", "memory besides the weights: runner and layer ")
    missing = [part for part in parts if part not in run.stderr]
    runs.report(file, 1, ["--log", "info"], f"the log lacks {missing}: {run.stderr}" if missing or run.returncode else None)


def jobs_of(runs, folder, files):
    """Calls (function, file, ranks, options, more...) for all numbers of ranks, and the file of check_log()."""
    chosen = [f for family in FAMILIES for f in [f for f in files if f.name.startswith(family + "_")][:1]]
    jobs = [(runs.equals_host, file, 1, [], FLOAT32) for file in files]
    turn = itertools.cycle(chosen)
    jobs += [(runs.equals_host, next(turn), ranks, options, FLOAT32) for ranks, options in grids()]
    jobs += [(runs.equals_host, file, ranks, options, FLOAT32) for (ranks, options), file in
             itertools.product(inside(), [f for f in chosen if not f.name.startswith("longcat")])]
    padded = []
    for family in PADDED:
        raw = next(f for f in files if f.name.startswith(family + "_"))
        padded.append(bf16_rows(padded_block(raw, folder / f"padded_{family}.safetensors", 128, 128), folder, family))
    turn = itertools.cycle(padded)
    jobs += [(runs.equals_host, next(turn), ranks, options, BF16) for ranks, options in windows()]
    # Each row's sums are its own in cuda_reference.
    for ranks, backend in itertools.product((2, 4), ("all_to_all_v", "low_latency", "high_throughput")):
        jobs.append((runs.same_bits, padded[0], ranks, ["--backend", backend, *REFERENCE],
                     [([], False), (["--dual-batch", "auto"], False), (["--dual-batch", "on"], True),
                      (["--shared-overlap", "off"], False)]))
        jobs.append((runs.same_bits, padded[0], ranks, ["--backend", backend, *REFERENCE, "--chunk", 4],
                     [([], False), (["--dual-batch", "on"], True)]))
    for backend, bound in (("all_to_all_v", FLOAT32), ("low_latency", BF16), ("allgather_reduce_scatter", FLOAT32)):
        jobs.append((runs.equals_host, padded[0], 2, ["--backend", backend, *REFERENCE, "--replicas", 2], bound))
    return jobs, padded[0]


def main():
    wanted = int(sys.argv[1])
    files = sorted((DATA / "moe_blocks").glob("*.safetensors"))
    assert files, f"no block files in {DATA}"
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        runs = Runs(folder)
        jobs, logged = jobs_of(runs, folder, files)
        jobs = [job for job in jobs if job[2] == wanted]
        assert jobs, f"no case has {wanted} ranks"
        jobs[0][0](*jobs[0][1:])
        if runs.over:
            return 77
        in_parallel(jobs[1:], AT_A_TIME)
        if wanted == 1:
            check_log(runs, logged)
    print(f"{runs.ran} runs, {runs.failed} failures")
    return int(runs.failed > 0) if runs.ran else 77


if __name__ == "__main__":
    sys.exit(main())
