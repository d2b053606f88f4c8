# SPDX-License-Identifier: Apache-2.0
# tests/tool/list_test.py: `moe list` names what `moe block` accepts; every composition of the host space marked "yes" runs, every other
# one is refused with the text of the list. cuda_list_test.py runs those of the CUDA space.
import json
import re
import tempfile
import pathlib

from compositions import BLOCK, run_row
from expectations import expect, finish
from tool import NO_CUDA, in_parallel, moe, padded_block

WINDOWS = ("low_latency", "low_latency_rank_major", "high_throughput", "one_sided", "two_sided", "pplx")
ANSWERS = ("yes", "not in this program", "no")
ROUTE = "moe/routing/device/route.cuh"  # without it a layer of the CUDA space does not link, unless its experts route inside


def listed(*arguments):
    run = moe("list", *arguments, ranks=0)
    expect(run.returncode == 0 and run.stderr == "" and run.stdout.endswith("\n"), f"list {arguments}: {run}")
    return run.stdout.splitlines()


def listed_json(*arguments):
    (line,) = listed(*arguments, "--json")
    return json.loads(line)


def names(what):
    return [line.split()[0] for line in listed(what)]


def check_names():
    expect({"no_expert_parallel", "naive", "allgather_reduce_scatter", "all_to_all_v", *WINDOWS} <= set(names("backends")), "backends")
    spaces = {tuple(line.split()) for line in listed("backends")}
    expect({(name, space) for name in WINDOWS for space in ("host", "cuda")} <= spaces, "windows in both spaces")
    experts = {"reference", "onednn", "cuda_reference", "cublas_grouped", "hopper_contiguous", "hopper_masked", "hopper_w4a16",
               "hopper_w8a16", "hopper_w4a8", "monolithic_reference", "monolithic_cuda_reference"}
    expect(experts <= set(names("experts")), "experts")
    expect({"softmax_topk", "softmax_topk_renormalize", "topk_softmax", "sigmoid_topk"} <= set(names("routers")), "routers")
    quantizations = names("quantizations")
    schemes = {"fp8_per_tensor", "fp8_per_token", "fp8_group128", "fp8_block128", "int8_per_token", "int8_per_channel", "int4_group128",
               "int4_group32", "mxfp8", "mxfp8_w8a16", "mxfp4", "mxfp4_w4a16", "nvfp4", "nvfp4_w4a16", "int4_group64", "int4_group32_zero",
               "int4_group64_zero", "int4_group128_zero", "w4a8_fp8", "w4a8_fp8_group32", "w4a8_int8", "mxfp4_w4a8", "mxfp4_fp8",
               "int4_group32_fp8", "int4_group128_zero_fp8"}
    expect(quantizations[0] == "none" and schemes <= set(quantizations), "quantizations")
    fp8 = "fp8_block128 +sm_80 emulated, sm_89 emulated, sm_90 native, sm_100 emulated"
    expect(any(re.fullmatch(fp8, line) for line in listed("quantizations")), "how a scheme runs on each architecture")
    run = moe("list", ranks=0)
    expect(run.returncode == 2 and "what is required: routers, quantizations, backends" in run.stderr, f"list without a word: {run}")
    models = "\n".join(listed("models"))
    for family in ("Mixtral", "Qwen2", "Qwen3", "Qwen3-Next", "OLMoE", "DeepSeek-V2", "DeepSeek-V3"):
        expect(family in models, f"models do not name {family}:\n{models}")
    for what, found in (("backends", names("backends")), ("experts", names("experts")), ("quantizations", quantizations)):
        option = "--experts" if what == "experts" else "--" + what.removesuffix("s")
        for command in (["block", BLOCK, "--output", "/dev/null"], ["list", "compositions"]):
            run = moe(*command, option, "?", ranks=0)
            known = run.stderr.strip().rpartition("expected one of ")[2].split(", ")
            expect(run.returncode == 2 and set(known) == set(found), f"the error lists {known}, `moe list {what}` {found}")


def check_policies():
    table = listed_json("policies")
    for kind, what in (("router", "routers"), ("quantization", "quantizations"), ("backend", "backends"), ("experts", "experts")):
        expect([row["name"] for row in table if row["kind"] == kind] == names(what), f"policies of kind {kind}")
    for row in table:
        expect(row["type"].startswith("moe::") and row["include"].startswith("moe/") and row["links"].startswith("moe::"), row)
    lines = listed("policies")
    same = all(row["type"] in line and row["include"] in line for row, line in zip(table, lines))
    expect(same and len(lines) == len(table), "policies as text")
    for row, line in zip(table, lines):
        named = [row.get("include_cuda") == ROUTE, line.endswith(f", cuda: also {ROUTE}")]
        expect(named == 2 * [row["kind"] == "router"], f"the header of the routing kernel: {line}")
    expect({row["space"] for row in listed_json("policies", "--space", "cuda")} == {"cuda", "both"}, "policies of one space")


def check_filters(table):
    expect([row["answer"] for row in table].count("yes") > 100 and {row["answer"] for row in table} == set(ANSWERS), "the three answers")
    summary = listed("compositions")
    expect(len(summary) < 40, f"{len(summary)} lines without a filter")
    counts = [sum(row["answer"] == answer for row in table) for answer in ANSWERS]
    words = (f"{counts[0]} of {len(table)} compositions run in this program, {counts[1]} more are in the library, "
             f"the rules forbid {counts[2]}")
    expect(words in summary, f"the summary does not say: {words}")
    for filters in ({"space": "cuda", "backend": "low_latency"}, {"experts": "hopper_masked"}, {"quantization": "none", "space": "host"}):
        options = [word for key, value in filters.items() for word in ("--" + key, value)]
        chosen = [row for row in table if all(row[key] == value for key, value in filters.items()) and
                  not ("space" in filters and "different memory spaces" in row["why"])]  # a space is that of backend and experts
        expect(listed_json("compositions", *options) == chosen, f"{filters}: the same rows")
        *lines, total = listed("compositions", *options)
        right = len(lines) == len(chosen) and f" of {len(chosen)} compositions" in total
        expect(right, f"{filters}: {len(lines)} lines, {len(chosen)} rows")
        for line, row in zip(lines, chosen):
            first = row["answer"] + ("" if row["answer"] == "yes" else ":")
            expect(re.match(rf"{first} +{row['quantization']} +{row['backend']} \({row['space']}\) +{row['experts']}( |$)", line), line)
            expect(line.endswith(row["why"]), line)
    condition = "with topk = 1 only: this router weights the input"
    for row in listed_json("compositions", "--space", "host", "--router", "llama4"):
        batched = row["backend"] in ("low_latency", "pplx")
        expect((condition in row["why"]) == (batched and row["answer"] != "no"), row)
    for router in ("external", "llama4"):
        inside = listed_json("compositions", "--experts", "monolithic_reference", "--router", router)
        answers = {"no"} if router == "external" else set(ANSWERS)
        expect({row["answer"] for row in inside} == answers, f"the answers of experts that route inside, with {router}")
        expect(any("no path for this router" in row["why"] for row in inside) == (router == "external"), f"the reasons with {router}")
    for wrong in (["routers", "--backend", "naive"], ["models", "--space", "host"], ["policies", "--experts", "onednn"], ["sideways"]):
        run = moe("list", *wrong, ranks=0)
        expect(run.returncode == 2 and run.stdout == "" and run.stderr.count("\n") == 1, f"list {wrong}: {run}")


def check_answers(table):
    """Every yes of the host; of the others each kind of reason once for each pair of backend and experts."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        block = padded_block(BLOCK, folder / "block.safetensors", 128, 128)
        seen = set()
        jobs = []
        for i, row in enumerate(table):
            kind = (row["answer"], row["why"], row["space"], row["experts"])
            same_space = "different memory spaces" not in row["why"]
            on_gpu = row["answer"] == "yes" and row["space"] == "cuda"  # cuda_list_test.py
            if same_space and not on_gpu and (row["answer"] == "yes" or kind not in seen):
                jobs.append((run_row, row, block, folder / f"{i}.safetensors"))
            seen.add(kind)
        for job, problem in zip(jobs, in_parallel(jobs, 4)):
            expect(problem is None, f"{job[1]}: {problem}")
        yes = [job for job in jobs if job[1]["answer"] == "yes"]
        print(f"{len(yes)} compositions answered yes, {len(jobs) - len(yes)} others")


def check_build(table):
    """A program without CUDA says so for all of the CUDA space that the rules allow; one with it has window backends and Hopper experts."""
    policies = listed_json("policies")
    for row in table:
        if row["why"].startswith("a program that includes "):
            outside = row["space"] == "cuda" and not row["experts"].startswith("monolithic_")
            expect((f" and {ROUTE} and links the CMake target" in row["why"]) == outside, row)
            links = {policy["links"] for policy in policies if policy["space"] == row["space"] and policy["name"] in
                     (row["backend"], row["experts"])} - {"moe::moe"}
            expect(all(target in row["why"] for target in links), f"{row} does not name {links}")
    cuda = [row for row in table if row["space"] == "cuda" and row["answer"] != "no"]
    if any(NO_CUDA.endswith(row["why"]) for row in cuda if row["why"]):
        expect(not any(row["answer"] == "yes" for row in cuda), "a program without CUDA runs a CUDA composition")
    else:
        expect(any(row["answer"] == "yes" and row["experts"] == "hopper_contiguous" for row in cuda), "no Hopper experts")
        plain = [row for row in cuda if row["backend"] in WINDOWS and row["quantization"] == "none"]
        windows = {(row["backend"], row["experts"], row["answer"]) for row in plain}
        without_nccl = any("without NCCL" in row["why"] for row in cuda)
        answer = "not in this program" if without_nccl else "yes"
        expect({("low_latency", "hopper_masked", answer), ("high_throughput", "hopper_contiguous", answer)} <= windows, windows)


check_names()
check_policies()
COMPOSITIONS = listed_json("compositions")
check_filters(COMPOSITIONS)
check_build(COMPOSITIONS)
check_answers(COMPOSITIONS)
finish()
