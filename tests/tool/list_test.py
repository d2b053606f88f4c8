# SPDX-License-Identifier: Apache-2.0
# tests/tool/list_test.py: `moe list` names what `moe block` accepts, and gives a reason for every composition that it refuses.
import re
import sys
import tempfile

from tool import DATA, in_parallel, moe

BLOCK = sorted((DATA / "moe_blocks").glob("mixtral_e8k2*.safetensors"))[0]
WINDOWS = ("low_latency", "high_throughput", "one_sided", "two_sided", "pplx")
failures = 0


def expect(ok, what):
    global failures
    if not ok:
        failures += 1
        print(f"FAILED: {what}")


def listed(what):
    run = moe("list", what, ranks=0)
    expect(run.returncode == 0 and run.stderr == "" and run.stdout.endswith("\n"), f"list {what}: {run}")
    return run.stdout.splitlines()


def names(what):
    return [line.split()[0] for line in listed(what)]


def check_names():
    expect({"no_expert_parallel", "naive", "allgather_reduce_scatter", "all_to_all_v", *WINDOWS} <= set(names("backends")), "backends")
    expect({"reference", "onednn", "cuda_reference", "cublas_grouped", "hopper_contiguous", "hopper_masked", "hopper_w4a16"} <= set(names("experts")), "experts")
    expect({"softmax_topk", "softmax_topk_renormalize", "topk_softmax", "sigmoid_topk"} <= set(names("routers")), "routers")
    quantizations = names("quantizations")
    expect(quantizations[0] == "none" and {"fp8_per_tensor", "fp8_per_token", "fp8_group128", "fp8_block128", "int8_per_token", "int4_group128",
                                           "mxfp8", "mxfp4", "nvfp4"} <= set(quantizations), "quantizations")
    models = "\n".join(listed("models"))
    for family in ("Mixtral", "Qwen2", "Qwen3", "Qwen3-Next", "OLMoE", "DeepSeek-V2", "DeepSeek-V3"):
        expect(family in models, f"models do not name {family}:\n{models}")
    for what, found in (("backends", names("backends")), ("experts", names("experts")), ("quantizations", quantizations)):
        option = "--experts" if what == "experts" else "--" + what.removesuffix("s")
        run = moe("block", BLOCK, "--output", "/dev/null", option, "?", ranks=0)
        known = run.stderr.strip().rpartition("known: ")[2].split(", ")
        expect(set(known) == set(found), f"the error lists {known}, `moe list {what}` {found}")


def check_compositions():
    """Each of the host's without quantisation does what the list says, and a window backend with a scheme that is left out."""
    *lines, total = listed("compositions")
    rows = [re.match(r"(\S+) +(\S+) \((host|cuda)\) +(\S+) +(yes|yes, .*|no: (.*))$", line) for line in lines[1:]]
    expect(all(rows), "a line of the table cannot be read")
    allowed = sum(row.group(5).startswith("yes") for row in rows)
    expect(total.startswith(f"{allowed} of {len(rows)} compositions are allowed"), total)
    expect(len({row.group(1, 2, 3, 4) for row in rows}) == len(rows), "a composition is listed twice")
    for row in rows:
        if not row.group(5).startswith("yes"):
            expect(row.group(6).startswith("moe: ") and "Fix: " in row.group(6) and "docs/errors.md#" in row.group(6), row.group(0))
    jobs = []
    with tempfile.TemporaryDirectory() as folder:
        for i, row in enumerate(rows):
            scheme, backend, space, experts, verdict, _ = row.groups()
            left_out = verdict.startswith("yes, ")
            expect(left_out <= (backend in WINDOWS and space == "host"), row.group(0))
            one_of_those_left_out = (scheme, experts) == ("int8_per_token", "reference")
            if space != "host" or experts.startswith(("cuda", "hopper")) or scheme != "none" and not (left_out and one_of_those_left_out):
                continue
            jobs.append((check_composition, row, left_out, "--output", f"{folder}/{i}", "--backend", backend, "--experts", experts,
                         "--quantization", scheme))
        in_parallel(jobs, 4)


def check_composition(row, left_out, *options):
    run = moe("block", BLOCK, *options)
    if left_out:
        expect("fp8_group128" in run.stderr and "E_UNSUPPORTED" in run.stderr, run)
    expect((run.returncode == 0) == (row.group(5) == "yes"), f"{row.group(0)}: {run}")


check_names()
check_compositions()
print(f"{failures} failed")
sys.exit(1 if failures else 0)
