# SPDX-License-Identifier: Apache-2.0
# tests/tool/compositions.py: runs one row of `moe list compositions --json` and checks its answer.
from tool import DATA, NO_GPU, NOT_HOPPER, moe, read, same_output, values

BLOCK = sorted((DATA / "moe_blocks").glob("mixtral_e8k2*.safetensors"))[0]
# Largest error against the unquantised output, relative to its largest value, by the bits of the codes.
BOUNDS = {"none": 2e-2, "fp8": 0.15, "int8": 0.05, "mxfp8": 0.15, "int4": 0.3, "w4a8": 0.3, "mxfp4": 0.6, "nvfp4": 0.5}


class Skipped(str):
    """Why a composition did not run."""


def bound(scheme):
    return BOUNDS[next(name for name in sorted(BOUNDS, key=len, reverse=True) if scheme.startswith(name))]


def run_row(row, block, output):
    """What is wrong with the answer of a row, None if nothing, Skipped if the composition needs a GPU that is not here."""
    run = moe("block", block, "--output", output, "--device", row["space"], "--backend", row["backend"], "--experts", row["experts"],
              "--quantization", row["quantization"], ranks=0)
    if row["answer"] != "yes":
        code = "E_CONFIG" if row["answer"] == "no" else "E_UNSUPPORTED"
        words = run.stderr.startswith(f"moe: {code}: --quantization {row['quantization']} with --experts {row['experts']} and --backend ")
        words = words and run.stderr.strip().endswith(row["why"].removeprefix("moe: "))
        right = run.returncode == 1 and run.stdout == "" and words
        return None if right else f"refused in other words: {run}"
    if row["space"] == "cuda" and (run.stderr.strip() == NO_GPU or run.stderr.startswith(NOT_HOPPER)):
        return Skipped(run.stderr.strip())
    if run.returncode != 0:
        return str(run)
    return same_output(values(read(output)[0]["output"]), values(read(block)[0]["expected"]), bound(row["quantization"]))
