# SPDX-License-Identifier: Apache-2.0
# tests/tool/block_quantization_test.py: `moe block --quantization`: seven schemes on one block file of every family, so that every scheme
# meets more than a quarter of the families. The chosen experts are those without a scheme, the output changes by no more than the scheme's
# rounding, and a shape that the scheme does not support is refused by name.
import itertools
import json
import pathlib
import re
import sys
import tempfile

from tool import DATA, in_parallel, moe, read, rows, same_routing

NUMBER = itertools.count()
# Largest error, as the tool reports it, and the elements that widths must be a multiple of.
SCHEMES = {"fp8_per_tensor": (.1, 1), "fp8_per_token": (.1, 1), "fp8_per_channel": (.1, 1), "fp8_group128": (.1, 1),
           "fp8_block128": (.1, 1),
           "int8_per_token": (.025, 1), "int8_per_channel": (.025, 1), "int4_group128": (.25, 32), "int4_group32": (.25, 32),
           "mxfp8": (.1, 32), "mxfp4": (.4, 32), "mxfp4_w4a16": (.3, 32), "nvfp4": (.35, 16), "nvfp4_w4a16": (.3, 16),
           "int4_group64": (.25, 32)}
# Schemes with the weights of another, and by how much their error on a file may be larger: not at all with zero points, which are always
# the middle here; else by what rounding the rows alone may cost.
SAME_WEIGHTS = {"int4_group32_zero": ("int4_group32", 0), "int4_group64_zero": ("int4_group64", 0),
                "int4_group128_zero": ("int4_group128", 0), "w4a8_fp8": ("int4_group128", .1), "w4a8_fp8_group32": ("int4_group32", .1),
                "w4a8_int8": ("int4_group128", .025), "mxfp4_w4a8": ("mxfp4_w4a16", .1), "mxfp4_fp8": ("mxfp4_w4a16", .1),
                "mxfp8_w8a16": ("mxfp8", .02),
                **{f"{weights}_fp8": (weights.removesuffix("_zero"), .1) for group in (32, 64, 128)
                   for weights in (f"int4_group{group}", f"int4_group{group}_zero")}}
FURTHER = ["int4_group64", *SAME_WEIGHTS]  # the registry's further_quantizations
COMMON = [scheme for scheme in SCHEMES if scheme not in FURTHER]


def run_block(folder, file, scheme):
    output = folder / f"{file.stem}_{scheme}_{next(NUMBER)}.safetensors"
    return moe("block", file, "--output", output, "--quantization", scheme, "--expected", f"{file}:expected", "--json", ranks=0), output


def check(folder, file, scheme):
    weights, more = SAME_WEIGHTS.get(scheme, (scheme, 0))
    limit, multiple = SCHEMES[weights]
    run, output = run_block(folder, file, scheme)
    if run.returncode != 0:
        refused = re.fullmatch(rf"moe: E_CONFIG: {scheme} needs .* to be a multiple of {multiple}, got (\d+)\n", run.stderr)
        return None if refused and int(refused.group(1)) % multiple else f"{file.name}, {scheme}: {run.stderr}"
    report = json.loads(run.stdout)
    if report["composition"]["quantization"] != scheme:
        return f"{file.name}, {scheme}: {report['composition']}"
    (want, metadata), (got, _) = read(file), read(output)
    skip = int(metadata["num_experts"]) if metadata["routing_family"] == "mlp_router_skip" else None  # as in block_test.py
    routing = same_routing(rows(got["topk_ids"]), rows(got["topk_weights"]), rows(want["topk_ids"]), rows(want["topk_weights"]), skip)
    if routing:
        return f"{file.name}, {scheme}: {routing}"
    if weights != scheme:
        limit = json.loads(run_block(folder, file, weights)[0].stdout)["error"] + more
    return None if 1e-5 < report["error"] <= limit else f"{file.name}, {scheme}: error {report['error']}"


listed = [line.split()[0] for line in moe("list", "quantizations", ranks=0).stdout.splitlines()]
failures = [] if set(listed) == {"none", *SCHEMES, *SAME_WEIGHTS} else [f"`moe list quantizations`: {listed}"]
files = {re.sub(r"_e\d.*", "", f.name): f for f in sorted((DATA / "moe_blocks").glob("*.safetensors"), reverse=True)}
with tempfile.TemporaryDirectory() as temporary:
    jobs = [(check, pathlib.Path(temporary), file, scheme) for i, file in enumerate(files.values())
            for schemes, met in ((COMMON, (0, 3, 5, 8)), (FURTHER, (0, 3, 5))) for j, scheme in enumerate(schemes)
            if (i + j) % len(schemes) in met]
    failures += [problem for problem in in_parallel(jobs, 4) if problem]
print("\n".join(f"FAILED: {f}" for f in failures))
sys.exit(1 if failures else 0)
