# SPDX-License-Identifier: Apache-2.0
# tests/tool/check_test.py: `moe check` prints every rule that a composition breaks; its answer for each composition of run-time dimensions
# is that of `moe list compositions`.
import json

from expectations import expect, finish
from tool import moe


def check(composition, code, rules, error=""):
    run = moe("check", composition, ranks=0)
    printed = [line.split(":")[0] for line in run.stdout.splitlines()]
    expect(run.returncode == code and error in run.stderr and len(run.stderr.splitlines()) == (1 if code else 0), f"{composition}: {run}")
    expect(printed == rules, f"{composition}: prints {printed}, expected {rules}")
    return run.stdout


out = check("Qwen3-30B-A3B, softmax_topk_renormalize, fp8_block128, low_latency, hopper_masked",
            0, ["Qwen3-30B-A3B, softmax_topk_renormalize, fp8_block128, low_latency, hopper_masked"])
expect(out.endswith(": yes\n"), out)
out = check("Qwen3-30B-A3B,softmax_topk_renormalize,mxfp8,low_latency,hopper_contiguous", 1,
            ["ActivationFormatMatches", "BackendCarriesQuantization", "ExpertsSupportQuantization"],
            "moe: E_CONFIG: Qwen3-30B-A3B,softmax_topk_renormalize,mxfp8,low_latency,hopper_contiguous: breaks 3 rules")
expect("Fix: pair a standard backend with standard experts" in out, out)
check("Mixtral-8x7B, llama4, none, low_latency, onednn", 1, ["WeightOnInputNeedsTopKOne"], "breaks 1 rule")
check("dynamic, external, none, pplx, cublas_grouped", 0, ["dynamic, external, none, pplx, cublas_grouped"])
out = check("dynamic, external, none, all_to_all_v, monolithic_reference", 1, ["MonolithicTransport", "MonolithicRouter"], "breaks 2 rules")
expect("Fix: no_expert_parallel, naive or allgather_reduce_scatter" in out, out)
check("Mixtral-8x7B, any, none, low_latency, monolithic_cuda_reference", 1, ["ActivationFormatMatches", "MonolithicTransport"])
check("DeepSeek-V3, grouped_topk_sigmoid_top2_renormalize, fp8_block128, naive, monolithic_cuda_reference",
      0, ["DeepSeek-V3, grouped_topk_sigmoid_top2_renormalize, fp8_block128, naive, monolithic_cuda_reference"])

# Bad usage names what is known.
for composition, error in (("dynamic, any, none, naive", "4 names, expected 5 names: Config, Router, Quantization, Backend, Experts"),
                           ("Mixtral, any, none, naive, onednn", 'unknown model (or dynamic) "Mixtral"; known: Mixtral-8x7B'),
                           ("dynamic, some, none, naive, onednn", 'unknown router "some"; known: any, '),
                           ("dynamic, any, fp9, naive, onednn", 'unknown quantization "fp9"; known: none, '),
                           ("dynamic, any, none, fast, onednn", 'unknown backend "fast"; known: '),
                           ("dynamic, any, none, naive, some", 'unknown experts "some"; known: onednn, ')):
    check(composition, 2, [], error)

# The list has every backend with the experts of both spaces; `check` takes the backend of the experts' space.
rows = [row for row in json.loads(moe("list", "compositions", "--json", ranks=0).stdout)
        if row["quantization"] in ("fp8_block128", "int4_group128") and
        row["experts"] in ("onednn", "monolithic_reference", "cublas_grouped", "hopper_masked")]
expect(rows, "no rows")
for row in rows:
    if row["space"] == ("host" if row["experts"] in ("onednn", "monolithic_reference") else "cuda"):
        run = moe("check", f"dynamic, any, {row['quantization']}, {row['backend']}, {row['experts']}", ranks=0)
        legal = row["answer"] != "no"
        expect(run.returncode == (0 if legal else 1), f"{row}: {run}")
        expect(legal or row["why"] in run.stdout, f"{row}: {run.stdout}")

finish()
