# SPDX-License-Identifier: Apache-2.0
# tests/tool/check_test.py: `moe check` prints every rule that a composition breaks; its answer for each composition of run-time dimensions
# and each router is that of `moe list compositions`: yes, not in this program, or no, with the same reason. Of a pair that was measured
# with dispatch or combine beside the experts it prints the times and the choice.
import json

from expectations import expect, finish
from tool import moe


def check(composition, code, rules, error=""):
    run = moe("check", composition, ranks=0)
    printed = [line.split(":")[0] for line in run.stdout.splitlines()]
    expect(run.returncode == code and error in run.stderr and len(run.stderr.splitlines()) == (1 if code else 0), f"{composition}: {run}")
    expect(printed == rules, f"{composition}: prints {printed}, expected {rules}")
    return run.stdout


out = check("Qwen3-30B-A3B, softmax_topk_renormalize, none, naive, onednn",
            0, ["Qwen3-30B-A3B, softmax_topk_renormalize, none, naive, onednn"])
expect(out.endswith(": yes\n"), out)
out = check("Qwen3-30B-A3B,softmax_topk_renormalize,mxfp8,low_latency,hopper_contiguous", 1,
            ["ActivationFormatMatches", "ExpertsSupportQuantization", "BackendCarriesQuantization"],
            "moe: E_CONFIG: Qwen3-30B-A3B,softmax_topk_renormalize,mxfp8,low_latency,hopper_contiguous: breaks 3 rules")
expect("Fix: pair a standard backend with standard experts" in out, out)
check("Mixtral-8x7B, llama4, none, low_latency, onednn", 1, ["WeightOnInputNeedsTopKOne", "note"], "breaks 1 rule")
check("dynamic, external, none, pplx, cublas_grouped", 0, ["dynamic, external, none, pplx, cublas_grouped"])
out = check("dynamic, external, none, all_to_all_v, monolithic_reference", 1, ["MonolithicTransport", "MonolithicRouter"], "breaks 2 rules")
expect("Fix: no_expert_parallel, naive or allgather_reduce_scatter" in out, out)
check("Mixtral-8x7B, any, none, low_latency, monolithic_cuda_reference", 1, ["ActivationFormatMatches", "MonolithicTransport"])
check("DeepSeek-V3, grouped_topk_sigmoid_top2_renormalize, fp8_block128, naive, monolithic_cuda_reference",
      0, ["DeepSeek-V3, grouped_topk_sigmoid_top2_renormalize, fp8_block128, naive, monolithic_cuda_reference"])

# A model named with a router that is not its own.
for router, note in (("llama4", "note: Mixtral-8x7B routes with softmax_topk_renormalize, not with llama4\n"), ("any", ""),
                     ("external", ""), ("softmax_topk_renormalize", "")):
    run = moe("check", f"Mixtral-8x7B, {router}, none, naive, onednn", ranks=0)
    expect(run.returncode == 0 and run.stdout.partition(": yes\n")[2] == note, f"{router}: {run}")

# Schedules: a line for each measured point, in JSON the numbers. The choice is the plain layer: no schedule is faster by more than 2 %.
for pair, points, first in (
        ("fp8_block128, low_latency, hopper_masked", 6, "Flash, 8 tokens a rank: dispatch 1.016 of the plain layer's time"),
        ("none, low_latency, hopper_masked", 6, "Flash, 8 tokens a rank: dispatch 1.008 of the plain layer's time"),
        ("fp8_block128, high_throughput, hopper_contiguous", 8, "Flash, 512 tokens a rank: dispatch 1.06 of the plain layer's time"),
        ("none, high_throughput, hopper_contiguous", 10, "Flash, 256 tokens a rank: dispatch 1.029 of the plain layer's time"),
        ("fp8_block128, all_to_all_v, hopper_contiguous", 0, ""), ("fp8_block128, low_latency, cuda_reference", 0, ""),
        ("int4_group128, high_throughput, hopper_w4a16", 0, ""), ("none, low_latency, onednn", 0, "")):
    run = moe("check", f"dynamic, any, {pair}", ranks=0)
    got = json.loads(moe("check", f"dynamic, any, {pair}", "--json", ranks=0).stdout)["schedules"]
    lines = [line for line in run.stdout.splitlines() if line.startswith("schedule: ")]
    expect(run.returncode == 0 and len(lines) == len(got) == points, f"{pair}: {run}, {got}")
    expect(all(line.endswith("; chosen: plain") and "(docs/log/layers.md, 2 x H200, " in line for line in lines), f"{pair}: {lines}")
    expect(not first or lines[0].startswith(f"schedule: {first} ("), f"{pair}: {lines}")
    for row in got:
        ratios = [row[name] for name in ("dispatch", "combine", "both") if row[name] is not None]
        expect(row["choice"] == "plain" and min(ratios) >= 0.98 and row["ranks"] == 2 and row["tokens"] >= 8, f"{pair}: {row}")
run = moe("check", "dynamic, any, fp8_block128, high_throughput, hopper_contiguous", ranks=0)
expect("\nschedule: Flash, 1024 tokens a rank: dispatch 1.04, combine 1.15, both 1.19 of the plain layer's time (docs/log/layers.md, "
       "2 x H200, 12f809b1); chosen: plain\n" in run.stdout, run)
run = moe("check", "dynamic, any, fp8_block128, low_latency, hopper_contiguous", ranks=0)  # a broken rule
expect(run.returncode == 1 and "schedule" not in run.stdout, run)

# Bad usage names the position, the value and what the position takes.
for composition, error in (("dynamic, any, none, naive", "4 names, expected 5 names: Config, Router, Quantization, Backend, Experts"),
                           ("Mixtral, any, none, naive, onednn", 'position 1 (Config): "Mixtral", expected one of Mixtral-8x7B, '),
                           ("dynamic, some, none, naive, onednn", 'position 2 (Router): "some", expected one of any, '),
                           ("dynamic, any, fp9, naive, onednn", 'position 3 (Quantization): "fp9", expected one of none, '),
                           ("dynamic, any, none, fast, onednn", 'position 4 (Backend): "fast", expected one of '),
                           ("dynamic, any, none, naive, some", 'position 5 (Experts): "some", expected one of onednn, '),
                           ("dynamic, any, naive, none, onednn",
                            'position 3 (Quantization): "naive", a name for position 4 (Backend), expected one of none, ')):
    check(composition, 2, [], error)

# The list has every backend with the experts of both spaces; `check` takes the backend of the experts' space.
rows = [row for row in json.loads(moe("list", "compositions", "--json", ranks=0).stdout)
        if row["quantization"] in ("fp8_block128", "int4_group128", "none") and
        row["experts"] in ("onednn", "monolithic_reference", "cublas_grouped", "hopper_masked")]
expect(rows, "no rows")
answers = set()
for row in rows:
    if row["space"] == ("host" if row["experts"] in ("onednn", "monolithic_reference") else "cuda"):
        composition = f"dynamic, any, {row['quantization']}, {row['backend']}, {row['experts']}"
        run = moe("check", composition, ranks=0)
        expect(run.returncode == (1 if row["answer"] == "no" else 0), f"{row}: {run}")
        if row["answer"] == "no":
            expect(row["why"] in run.stdout, f"{row}: {run.stdout}")
        else:
            lines = [line for line in run.stdout.splitlines() if not line.startswith("schedule: ")]
            expect(lines == [f"{composition}: {row['answer']}{': ' if row['why'] else ''}{row['why']}"], f"{row}: {run.stdout}")
        answers.add(row["answer"])

        as_json = moe("check", composition, "--json", ranks=0)
        got = json.loads(as_json.stdout)
        same = ("answer", "quantization", "backend", "space", "experts")
        expect(as_json.returncode == run.returncode and all(got[key] == row[key] for key in same), f"{row}: {got}")
        expect((got["config"], got["router"], got["note"]) == ("dynamic", "any", ""), got)
        rules = "".join(f"{rule['rule']}: {rule['why']}\n" for rule in got["rules"])
        expect(rules == run.stdout if row["answer"] == "no" else got["rules"] == [] and got["why"] == row["why"], f"{row}: {got}")
expect(answers == {"yes", "not in this program", "no"}, answers)

# Every row with every router.
compared = 0
for router in [line.split()[0] for line in moe("list", "routers", ranks=0).stdout.splitlines()]:
    rows = [row for row in json.loads(moe("list", "compositions", "--router", router, "--json", ranks=0).stdout)
            if "different memory spaces" not in row["why"]]
    names = [f"dynamic, {router}, {row['quantization']}, {row['backend']}, {row['experts']}" for row in rows]
    run = moe("check", "--json", *names, ranks=0)
    checked = [json.loads(line) for line in run.stdout.splitlines()]
    refused = sum(row["answer"] == "no" for row in rows)
    expect(run.returncode == (1 if refused else 0), f"{router}: {run.returncode}, {run.stderr}")
    expect(not refused or f"{refused} of {len(rows)} compositions break rules" in run.stderr, f"{router}: {run.stderr}")
    expect(len(checked) == len(rows) > 1000, f"{router}: {len(checked)} lines for {len(rows)} rows")
    for name, row, got in zip(names, rows, checked):
        why = got["rules"][0]["why"] if got["rules"] else got["why"]
        expect((got["answer"], why, got["space"]) == (row["answer"], row["why"], row["space"]), f"{name}: check {got}, list {row}")
        compared += 1
expect(compared > 50000, f"{compared} rows were compared")
print(f"{compared} rows, the same answer of check and list")

# Several compositions: the text names each.
run = moe("check", "dynamic, llama4, none, pplx, onednn", "dynamic, external, none, naive, monolithic_reference", ranks=0)
condition, name, rule = run.stdout.splitlines()
expect(condition == "dynamic, llama4, none, pplx, onednn: yes: with topk = 1 only: this router weights the input", condition)
expect(name == "dynamic, external, none, naive, monolithic_reference: no" and rule.startswith("MonolithicRouter: "), run.stdout)
expect(run.returncode == 1 and "1 of 2 compositions break rules" in run.stderr, run)

finish()
