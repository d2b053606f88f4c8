# SPDX-License-Identifier: Apache-2.0
# tests/tool/grid_test.py: `moe block` on grids of tensor, data and context parallel ranks gives what one rank gives, whole and in chunks;
# grids that cannot be are refused with the rule's sentence.
import itertools
import os
import pathlib
import sys
import tempfile

from tool import DATA, block_refusals, in_parallel, report_runs, rows, run_block, same_output, values

# Shared experts with a sigmoid gate; grouped routing with shared experts; expert biases; zero experts; a latent width.
FAMILIES = ("qwen2_moe", "deepseek_v3", "gpt_oss", "longcat", "nemotron_h_latent")
GATHER, ALL_TO_ALL, LOCAL = ("naive", "allgather_reduce_scatter"), ("all_to_all_v", "low_latency",
                                                                    "high_throughput"), ("no_expert_parallel",)
REFUSED = "E_CONFIG"


def grids():
    """(ranks, grid options, backends)"""
    for tp, dp, pcp in ((2, 1, 1), (1, 2, 1), (1, 1, 2), (4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 4, 1), (1, 3, 1)):
        ranks = tp * dp * pcp
        size = ["--tp", tp, "--dp", dp, "--pcp", pcp]
        same_rows = dp * pcp == 1
        yield ranks, [*size, "--expert-parallel", "on"], GATHER + ALL_TO_ALL + (LOCAL if same_rows else ())
        if ranks != 3:  # no expert's columns divide by 3
            yield ranks, [*size, "--expert-parallel", "off"], GATHER + (LOCAL if same_rows else ())
        if tp > 1 and dp > 1:
            yield ranks, [*size, "--sequence-parallel"], GATHER[1:] + ALL_TO_ALL


def cases(files):
    """Every grid and backend with one of the files in turn, every third in chunks of 3 rows, every second with rows dealt unevenly."""
    turn = itertools.cycle(files)
    number = 0
    for ranks, grid, backends in grids():
        for backend in backends:
            options = [*grid, "--backend", backend]
            options += ["--chunk", 3] if number % 3 == 0 else []
            options += ["--deal", "random", "--seed", number] if number % 2 else []
            yield next(turn), ranks, options
            number += 1


def check(folder, name, file, ranks, options, alone):
    problem, report, got = run_block(folder, name, file, ranks, options)
    if problem:
        return problem
    grid = report["grid"]
    named = {key: value for key, value in zip(options, options[1:]) if str(key).startswith("--")}
    if (grid["tp"], grid["dp"], grid["pcp"]) != tuple(named[f"--{size}"] for size in ("tp", "dp", "pcp")):
        return f"grid {grid}"
    if (grid["ep"], grid["moe_tp"]) != ((1, ranks) if named.get("--expert-parallel") == "off" else (ranks, 1)):
        return f"grid {grid}"
    if grid["sequence_parallel"] != ("--sequence-parallel" in options) or report["composition"]["backend"] != named["--backend"]:
        return f"report {report}"
    most = max(report["tokens_per_rank"])
    sliced = -(-most // grid["tp"]) if grid["sequence_parallel"] else most
    if "--chunk" in options and report["passes"] != -(-sliced // 3):
        return f"{report['passes']} passes, the largest rank has {sliced} rows"
    if not report["error"] <= 1e-5:
        return f"error {report['error']}"
    if rows(got["topk_ids"]) != rows(alone["topk_ids"]):
        return "the routing is not that of one rank"
    return same_output(values(got["output"]), values(alone["output"]))


def refusals(file):
    cases = [
        (4, ["--tp", 2, "--dp", 3], REFUSED, "--tp 2, --dp 3 and --pcp 1 make 6 ranks, and there are 4. Fix: mpirun -n 6"),
        (2, ["--tp", 3], REFUSED, "make 3 ranks, and there are 2"),
        (4, ["--dp", 2, "--pcp", 2], REFUSED, "PCP with DP is not possible"),
        (2, ["--dp", 2, "--expert-parallel", "off", "--backend", "all_to_all_v"], REFUSED, "all_to_all_v: this backend sends tokens",
         "enable expert parallelism, or choose naive or allgather_reduce_scatter"),
        (2, ["--backend", "no_expert_parallel"], REFUSED,
         "no_expert_parallel: the ranks hold different tokens, and this backend moves none"),
        (4, ["--tp", 2, "--sequence-parallel", "--backend", "naive"], REFUSED, "--sequence-parallel: naive expects the same rows"),
        (2, ["--tp", 2, "--sequence-parallel"], REFUSED,
         "--sequence-parallel needs --expert-parallel on, --tp and --dp above 1; they are on, 2 and 1"),
        (3, ["--tp", 3, "--expert-parallel", "off"], REFUSED, "tp_size 3 does not divide the intermediate sizes"),
        (2, ["--tp", 2, "--expert-parallel", "off", "--replicas", 2], REFUSED, "2 replicas with --expert-parallel off",
         "enable_expert_parallel must be set to use EPLB"),
        (1, ["--replicas", 2], REFUSED, "2 replicas on 1 rank: EPLB needs more than one rank. Fix: mpirun -n 2"),
        (1, ["--tp", 0], "--tp", "0"),
        (1, ["--chunk", 0], "--chunk", "0"),
        (1, ["--expert-parallel", "maybe"], "--expert-parallel", "maybe"),
    ]
    return block_refusals(file, cases)


def main():
    folder_files = sorted((DATA / "moe_blocks").glob("*.safetensors"))
    files = [f for family in FAMILIES for f in folder_files if f.name.startswith(family + "_")][:12]
    assert files, f"no block files in {DATA}"
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        alone = {}
        for i, file in enumerate(files):
            problem, _, alone[file] = run_block(folder, f"alone{i}", file, 1, [])
            assert problem is None, problem
        runs = list(cases(files))
        results = in_parallel([(check, folder, i, file, ranks, options, alone[file]) for i, (file, ranks, options) in enumerate(runs)])
    normed = next((pathlib.Path(os.environ["MOE_TEST_DATA"]) / "moe_blocks").glob("muse_spark_text_*"))
    parts = block_refusals(normed, [(2, ["--tp", 2, "--expert-parallel", "off"], "E_UNSUPPORTED",
                                     "an expert's output is normalised as a whole, so no part of an expert can be used")])
    return report_runs(runs, results, refusals(files[0]) + parts, files)


sys.exit(main())
