# SPDX-License-Identifier: Apache-2.0
# tests/tool/cuda_nccl_test.py: `moe block --device cuda` between GPUs over NCCL gives the expected output with every backend. Skipped where
# the tool finds no GPU, fewer GPUs than ranks, or no NCCL.
import json
import pathlib
import sys
import tempfile

from tool import DATA, moe, read, same_output, same_routing, rows, values

FILES = ("qwen3_moe", "deepseek_v3_e16k4", "mixtral_e8k2", "olmoe")
BACKENDS = ("all_to_all_v", "allgather_reduce_scatter", "naive")
BOUNDS = {"cuda_reference": 1e-5, "hopper_contiguous": 2e-2}  # float32; bf16


def check(folder, file, ranks, backend, experts, options):
    output = folder / "out.safetensors"
    run = moe("block", file, "--device", "cuda", "--backend", backend, "--experts", experts, "--output", output, "--json", *options, ranks=ranks)
    if run.returncode != 0:
        return run.stderr.strip() or f"exit code {run.returncode}"
    report = json.loads(run.stdout)
    if report["composition"]["backend"] != backend or report["composition"]["device"] != "cuda" or report["ranks"] != ranks:
        return f"report {report}"
    want, got = read(file)[0], read(output)[0]
    wrong = same_output(values(got["output"]), values(want["expected"]), BOUNDS[experts])
    return wrong or same_routing(rows(got["topk_ids"]), rows(got["topk_weights"]), rows(want["topk_ids"]), rows(want["topk_weights"]))


def main():
    failures = 0
    ran = 0
    with tempfile.TemporaryDirectory() as folder:
        for i, name in enumerate(FILES):
            file = next(f for f in sorted((DATA / "moe_blocks").iterdir()) if f.name.startswith(name))
            for ranks in (1, 2, 4):
                for experts in BOUNDS:
                    backend = BACKENDS[(i + ranks) % 3]
                    options = ["--placement", "round_robin", "--deal", "random", "--seed", i] if experts == "cuda_reference" else []
                    wrong = check(pathlib.Path(folder), file, ranks, backend, experts, options)
                    if wrong and ("no usable GPU" in wrong or "each rank needs its own" in wrong or "without" in wrong or "sm_90a" in wrong):
                        print(f"skipped, {ranks} ranks: {wrong}")
                        if "no usable GPU" in wrong or "without" in wrong:
                            return 77
                        continue
                    ran += 1
                    failures += bool(wrong)
                    if wrong:
                        print(f"{file.name}, {ranks} ranks, {backend}, {experts}: {wrong}")
    print(f"{ran} cases, {failures} failures")
    return 77 if ran == 0 else int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
