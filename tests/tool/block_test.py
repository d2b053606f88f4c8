# SPDX-License-Identifier: Apache-2.0
# tests/tool/block_test.py: `moe block` reproduces the block files from the command line: every file, all backends and experts, 1 to 4
# ranks. tests/mpi/registry_blocks_test.cpp runs the whole matrix inside one process per rank count; here the tool itself is the subject.
import json
import pathlib
import sys
import tempfile

from tool import DATA, moe, in_parallel, read, rows, same_output, same_routing, values

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe", "deepseek_v2", "deepseek_v3")
BACKENDS = ("naive", "allgather_reduce_scatter", "all_to_all_v")
WINDOWS = ("low_latency", "high_throughput", "one_sided", "two_sided", "pplx")
EXPERTS = ("onednn", "reference")


def cases(files):
    """(file, ranks, options): every file with the defaults on 1 and 4 ranks, and all policies over the families."""
    for file in files:
        yield file, 1, []
        yield file, 4, ["--deal", "random", "--seed", 7] if "e8k2" in file.name else []
    for i, family in enumerate(FAMILIES):
        file = next((f for f in files if f.name.startswith(family + "_")), None)
        assert file, f"no block file of family {family} in {DATA}"
        combination = 0
        yield file, 1, ["--backend", "no_expert_parallel", "--experts", "reference"]
        for backend in BACKENDS:
            for experts in EXPERTS:
                options = ["--backend", backend, "--experts", experts]
                options += ["--placement", "round_robin"] if (combination + i) % 2 else []
                options += ["--deal", "random", "--seed", i] if combination % 3 == 0 else []
                yield file, 1 + (combination + i) % 4, options
                combination += 1
        # Of the products with the window backends one for each family; pplx needs a number of experts that the ranks divide.
        window = WINDOWS[i % len(WINDOWS)]
        yield file, 2 if window == "pplx" else 2 + i % 3, ["--backend", window, "--experts", EXPERTS[i % 2]]


def check(folder, number, file, ranks, options):
    output = folder / f"{number}.safetensors"
    run = moe("block", file, "--output", output, "--expected", f"{file}:expected", "--json", *options, ranks=ranks)
    if run.returncode != 0 or run.stderr:
        return f"exit code {run.returncode}: {run.stderr}"
    report = json.loads(run.stdout)
    want, metadata = read(file)
    got, _ = read(output)
    output.unlink()
    tokens, topk = want["topk_ids"][1]
    named = dict(zip(options[::2], options[1::2]))
    composition = report["composition"]
    if composition["backend"] != named.get("--backend", "no_expert_parallel" if ranks == 1 else "all_to_all_v"):
        return f"backend {composition['backend']}"
    if composition["experts"] != named.get("--experts", "onednn") or composition["quantization"] != "none":
        return f"composition {composition}"
    if report["ranks"] != ranks or report["tokens"] != tokens or sum(report["tokens_per_rank"]) != tokens or report["topk"] != topk:
        return f"report {report}"
    if not report["error"] <= 1e-5:
        return f"reported error {report['error']}"
    if {name: (dtype, shape) for name, (dtype, shape, _) in got.items()} != {
            "output": ("F32", want["expected"][1]), "topk_ids": ("I32", [tokens, topk]), "topk_weights": ("F32", [tokens, topk])}:
        return f"output file holds {[(name, t[:2]) for name, t in got.items()]}"
    # Zaya's gate reports a skipped token as expert 0 with weight 0, the tool as the id behind the experts.
    skip = int(metadata["num_experts"]) if metadata["routing_family"] == "mlp_router_skip" else None
    ids = rows(got["topk_ids"])
    counted = [0] * report["num_experts"]
    for slot in (expert for row in ids for expert in row if expert < report["num_experts"]):
        counted[slot] += 1
    if report["load"] != counted:
        return f"load {report['load']}, the ids give {counted}"
    return (same_output(values(got["output"]), values(want["expected"])) or
            same_routing(ids, rows(got["topk_weights"]), rows(want["topk_ids"]), rows(want["topk_weights"]), skip))


def main():
    files = sorted((DATA / "moe_blocks").glob("*.safetensors"))
    assert files, f"no block files in {DATA}"
    runs = list(cases(files))
    with tempfile.TemporaryDirectory() as folder:
        results = in_parallel([(check, pathlib.Path(folder), i, *run) for i, run in enumerate(runs)])
        left = list(pathlib.Path(folder).iterdir())
    failures = 0
    for (file, ranks, options), problem in zip(runs, results):
        if problem:
            failures += 1
            print(f"FAILED: {file.name} on {ranks} ranks {options}: {problem}")
    if left:
        failures += 1
        print(f"FAILED: files left over: {left}")
    print(f"{len(runs)} runs over {len(files)} files, {failures} failed")
    return 1 if failures else 0


sys.exit(main())
