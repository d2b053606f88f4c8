# SPDX-License-Identifier: Apache-2.0
# tests/tool/inside_test.py: `moe block` with experts that route inside gives the bits of `--experts reference` on every kind of grid,
# without a routing to read; what needs routing outside is refused with the rule's sentence.
import itertools
import pathlib
import sys
import tempfile

from tool import DATA, block_refusals, in_parallel, moe, padded_block, report_runs, run_block

INSIDE = ["--experts", "monolithic_reference"]
# Softmax; grouped routing with a selection bias and shared experts; shared experts with a sigmoid gate; expert biases.
FAMILIES = ("mixtral_e8k2", "deepseek_v3_e16k4", "qwen2_moe", "gpt_oss")
PADDED = ("qwen2_moe", "olmoe")  # padded_block() knows their tensors
GATHER = "allgather_reduce_scatter"
LOADS = ("load", "load_imbalance", "load_per_rank", "rank_imbalance")
GRIDS = [(1, []), (1, ["--backend", "naive"]), (2, ["--backend", "naive"]), (2, ["--backend", GATHER, "--deal", "random", "--seed", 3]),
         (2, ["--tp", 2, "--backend", "no_expert_parallel"]), (2, ["--tp", 2, "--backend", "naive", "--expert-parallel", "off"]),
         (2, ["--pcp", 2, "--backend", GATHER, "--chunk", 3]), (4, ["--tp", 2, "--dp", 2, "--backend", GATHER, "--sequence-parallel"]),
         (4, ["--tp", 2, "--dp", 2, "--backend", "naive", "--chunk", 2, "--placement", "round_robin"])]


def check(folder, name, file, ranks, options):
    problem, report, got = run_block(folder, f"{name}_inside", file, ranks, [*options, *INSIDE])
    if problem:
        return problem
    problem, _, want = run_block(folder, f"{name}_routed", file, ranks, [*options, "--experts", "reference"])
    if problem:
        return problem
    if set(got) != {"output"} or set(want) != {"output", "topk_ids", "topk_weights"}:
        return f"tensors {sorted(got)} and {sorted(want)}"
    if report["composition"]["experts"] != INSIDE[1] or any(report[key] is not None for key in LOADS):
        return f"report {report}"
    return None if got["output"] == want["output"] else "the bits differ from routed rows"


def text_report(folder, file):
    run = moe("block", file, "--output", folder / "text.safetensors", *INSIDE, ranks=0)
    parts = ("experts monolithic_reference", "load          not known: the experts route inside")
    return [f"the report as text: {run}"] if run.returncode or any(part not in run.stdout for part in parts) else []


def refusals(files):
    block = next(file for file in files if file.name.startswith("mixtral_e8k2"))
    sentence = ("the experts route inside, and the backend sends rows to the ranks of their experts, which are not known yet. "
                "Fix: no_expert_parallel")
    out = block_refusals(block, [
        (2, INSIDE, "E_CONFIG", sentence),  # the default backend
        (2, [*INSIDE, "--backend", "all_to_all_v"], "E_CONFIG", sentence),
        (1, [*INSIDE, "--backend", "high_throughput"], "E_CONFIG", sentence),
        (1, [*INSIDE, "--backend", "low_latency"], "E_CONFIG", "an activation format that the experts cannot read"),
        (2, [*INSIDE, "--backend", "naive", "--replicas", 2], "E_CONFIG", "monolithic kernel without EPLB"),
        (2, [*INSIDE, "--backend", "naive", "--dual-batch", "on"], "E_CONFIG", "cannot send and wait apart"),
        (1, [*INSIDE, "--quantization", "mxfp4"], "E_UNSUPPORTED", "moe/experts/monolithic.hpp and moe/experts/reference.hpp",
         "This one has experts that route inside with none, fp8_group128; reference has every scheme"),
        (1, [*INSIDE, "--device", "cuda"], "E_CONFIG", "--experts monolithic_reference needs --device host"),
        (1, ["--experts", "monolithic_cuda_reference"], "E_CONFIG", "--experts monolithic_cuda_reference needs --device cuda"),
        (1, ["--experts", "monolithic"], "--experts", "monolithic_reference, ")])
    for family, what in (("longcat", "zero experts"), ("deepseek_v4_hash", "hash routing")):  # only in the complete reference data
        for file in [file for file in files if file.name.startswith(family)][:1]:
            options = [*INSIDE, "--backend", "naive"]
            out += block_refusals(file, [(ranks, options, "E_CONFIG", f"monolithic kernel without {what}") for ranks in (1, 2)])
    return out


def main():
    files = sorted((DATA / "moe_blocks").glob("*.safetensors"))
    chosen = [next(file for file in files if file.name.startswith(family)) for family in FAMILIES]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        turn = itertools.cycle(chosen)
        runs = [(next(turn), ranks, options) for ranks, options in GRIDS for _ in range(2)]
        for family in PADDED:
            file = next(file for file in files if file.name.startswith(family))
            padded = padded_block(file, folder / f"padded_{family}.safetensors", 128, 128)
            runs += [(padded, ranks, [*options, "--quantization", "fp8_group128"]) for ranks, options in GRIDS[:4]]
        results = in_parallel([(check, folder, i, *run) for i, run in enumerate(runs)])
        return report_runs(runs, results, text_report(folder, chosen[0]) + refusals(files), chosen)


sys.exit(main())
