# SPDX-License-Identifier: Apache-2.0
# tests/tool/switch_test.py: `moe layer` on a tiny Switch checkpoint: an expert takes expert_capacity tokens of each sequence, whose length
# --sequence-length gives. Sequences that end elsewhere than the rows of a rank, or of a chunk, are refused.
import json
import pathlib
import sys
import tempfile

from tool import moe, raw, read, values, write

HIDDEN, INTERMEDIATE, EXPERTS = 16, 8, 2
CHOICES = [0, 0, 1, 0]
MLP = "encoder.block.0.layer.1.mlp."
problems = []


def zeros_but(size, at, value):
    return [value if i == at else 0.0 for i in range(size)]


def run(folder, *options, ranks=1, code=0, part=""):
    output = folder / "output.safetensors"
    output.unlink(missing_ok=True)
    done = moe("layer", "--checkpoint", folder, "--layer", 0, "--input", folder / "input.safetensors", "--tensor", "hidden", "--output",
               output, *options, ranks=ranks)
    if done.returncode != code or part not in done.stderr:
        problems.append(f"{options} on {ranks} ranks: exit code {done.returncode}, expected {code} and '{part}': {done.stderr}")
        return None
    return read(output)[0] if code == 0 else None


def expect(folder, kept, *options, ranks=1):
    out = run(folder, *options, ranks=ranks)
    if out is None:
        return
    ids = values(out["topk_ids"])
    rows = values(out["output"])
    got = [any(rows[t * HIDDEN:(t + 1) * HIDDEN]) for t in range(len(CHOICES))]
    if got != kept or ids != [c if k else -1 for c, k in zip(CHOICES, kept)]:
        problems.append(f"{options} on {ranks} ranks: ids {ids}, rows that are not zero {got}, expected {kept}")


with tempfile.TemporaryDirectory() as temporary:
    folder = pathlib.Path(temporary)
    (folder / "config.json").write_text(json.dumps({
        "model_type": "switch_transformers", "d_model": HIDDEN, "d_ff": INTERMEDIATE, "num_experts": EXPERTS, "expert_capacity": 1,
        "num_layers": 1,
        "num_sparse_encoder_layers": 1, "num_decoder_layers": 1, "num_sparse_decoder_layers": 0, "dense_act_fn": "relu",
        "router_bias": False, "encoder_sparse_step": 1}))
    tensors = {MLP + "router.classifier.weight": ("F32", [EXPERTS, HIDDEN],
                                                  raw("f", zeros_but(HIDDEN, 0, 4.0) + zeros_but(HIDDEN, 1, 4.0)))}
    for e in range(EXPERTS):
        tensors[f"{MLP}experts.expert_{e}.wi.weight"] = ("F32", [INTERMEDIATE, HIDDEN], raw("f", [1.0] * (INTERMEDIATE * HIDDEN)))
        tensors[f"{MLP}experts.expert_{e}.wo.weight"] = ("F32", [HIDDEN, INTERMEDIATE], raw("f", [1.0] * (INTERMEDIATE * HIDDEN)))
    write(folder / "model.safetensors", tensors, {"format": "pt"})
    hidden = [x for choice in CHOICES for x in zeros_but(HIDDEN, choice, 1.0)]
    write(folder / "input.safetensors", {"hidden": ("F32", [len(CHOICES), HIDDEN], raw("f", hidden))})

    fours, twos = [True, False, True, False], [True, False, True, True]
    expect(folder, fours, "--sequence-length", 4)
    expect(folder, twos, "--sequence-length", 2)
    expect(folder, twos, "--sequence-length", 2, ranks=2)
    expect(folder, twos, "--sequence-length", 2, "--chunk", 2)
    run(folder, code=1, part="--sequence-length is missing: an expert of this model takes at most 1 tokens of each sequence")
    run(folder, "--sequence-length", 4, ranks=2, code=1, part="is counted over a sequence of 4 rows, and the batch is cut at row 2")
    run(folder, "--sequence-length", 2, "--chunk", 1, code=1, part="is counted over a sequence of 2 rows, and the batch is cut at row 1")
    run(folder, "--sequence-length", 0, code=2, part="--sequence-length")

for problem in problems:
    print("FAILED:", problem)
sys.exit(1 if problems else 0)
