# SPDX-License-Identifier: Apache-2.0
# tests/tool/cuda_schemes_test.py: `moe quantize --to` a checkpoint, then `moe layer --quantization` on one GPU and on the host, in every
# scheme that the program has there: both compute with the checkpoint's codes, so the outputs differ by the order of sums and by what the
# device rounds. The host's half runs everywhere; skipped after it where the tool finds no GPU or was built without CUDA.
import json
import math
import pathlib
import random
import struct
import sys
import tempfile

from tool import in_parallel, moe, no_gpus, raw, read, same_routing, values, write
from tool import rows as rows_of

HIDDEN, INTERMEDIATE, EXPERTS, TOPK, TOKENS = 256, 128, 4, 2, 64
LAYER = "model.layers.0.mlp."
PROJECTIONS = {"gate_proj": (INTERMEDIATE, HIDDEN), "up_proj": (INTERMEDIATE, HIDDEN), "down_proj": (HIDDEN, INTERMEDIATE)}
# Largest relative error of the whole output; rows that are not in the scheme's codes would be off by .014 (int8) or .04. Rows as they are:
# the device rounds the intermediate to bf16. Rows in codes: a value of the intermediate that lies between two codes may get either, and
# more do in fp8 with a scale a row, where it is rounded to bf16 before.
PLAIN, CODES, FP8 = .01, .02, .03
BOUNDS = {"fp8_per_tensor": FP8, "fp8_per_token": FP8, "fp8_block128": CODES, "int8_per_token": PLAIN, "mxfp8": CODES}
# Schemes of rows without a checkpoint's form of their own, and one with the same weights.
WEIGHTS = {"fp8_per_token": "fp8_per_channel", "int8_per_token": "int8_per_channel"}
rng = random.Random(31)


def bound(scheme):
    return BOUNDS.get(scheme, CODES if scheme.endswith("_fp8") else PLAIN)


def bf16(count, size):
    """Values of bf16, as float32: bytes."""
    numbers = struct.unpack(f"<{count}I", raw("f", [rng.gauss(0, size) for _ in range(count)]))
    return struct.pack(f"<{count}I", *(bits & 0xFFFF0000 for bits in numbers))


def checkpoint(folder):
    folder.mkdir()
    tensors = {f"{LAYER}gate.weight": ("F32", [EXPERTS, HIDDEN], bf16(EXPERTS * HIDDEN, 1 / 16))}
    for e in range(EXPERTS):
        for name, (rows, cols) in PROJECTIONS.items():
            mean = .5 / math.sqrt(cols) if e % 2 else 0  # asymmetric codes then have zero points beside the middle
            numbers = [v + mean for v in struct.unpack(f"<{rows * cols}f", bf16(rows * cols, 1 / math.sqrt(cols)))]
            tensors[f"{LAYER}experts.{e}.{name}.weight"] = ("F32", [rows, cols], raw("f", numbers))
    write(folder / "model.safetensors", tensors)
    config = {"model_type": "qwen3_moe", "hidden_act": "silu", "hidden_size": HIDDEN, "moe_intermediate_size": INTERMEDIATE,
              "num_experts": EXPERTS, "num_experts_per_tok": TOPK, "num_hidden_layers": 1, "norm_topk_prob": True}
    (folder / "config.json").write_text(json.dumps(config))
    write(folder / "rows.safetensors", {"x": ("F32", [TOKENS, HIDDEN], bf16(TOKENS * HIDDEN, 1))})
    return folder


def layer(folder, rows, scheme, output, *device):
    return moe("layer", "--checkpoint", folder, "--layer", 0, "--input", rows, "--tensor", "x", "--output", output, "--quantization",
               scheme, *device, ranks=0)


def on_host(source, folder, scheme):
    """Quantises the checkpoint and computes the layer on the host: what is wrong, or None."""
    done = moe("quantize", "--to", WEIGHTS.get(scheme, scheme), "--input", source, "--output", folder / scheme, ranks=0)
    if done.returncode != 0:
        return f"{scheme}: moe quantize: {done.stderr}"
    done = layer(folder / scheme, source / "rows.safetensors", scheme, folder / f"{scheme}_host.safetensors")
    return None if done.returncode == 0 else f"{scheme} on the host: {done.stderr}"


def on_device(source, folder, scheme, experts):
    """(what is wrong, why it did not run), each None if nothing."""
    output = folder / f"{scheme}_cuda.safetensors"
    done = layer(folder / scheme, source / "rows.safetensors", scheme, output, "--device", "cuda", "--experts", experts)
    reason = no_gpus(done.stderr.strip(), 1)[0]
    if reason:
        return None, reason
    if done.returncode != 0:
        return f"{scheme}, {experts}: {done.stderr}", None
    got, want = read(output)[0], read(folder / f"{scheme}_host.safetensors")[0]
    routing = same_routing(*(rows_of(tensors[name]) for tensors in (got, want) for name in ("topk_ids", "topk_weights")))
    if routing:
        return f"{scheme}, {experts}: {routing}", None
    pairs = list(zip(values(got["output"]), values(want["output"]), strict=True))
    size = math.sqrt(sum(w * w for _, w in pairs))
    error = math.sqrt(sum((g - w)**2 for g, w in pairs)) / size
    print(f"{scheme}, {experts}: error {error:.1e}, at most {bound(scheme)}")
    return None if size > 1 and error <= bound(scheme) else f"{scheme}, {experts}: error {error}, output {size}", None


listed = moe("list", "compositions", "--space", "cuda", "--json", ranks=0)
if listed.returncode != 0:
    sys.exit(f"moe list: {listed}")
schemes = {row["quantization"]: row["experts"] for row in json.loads(listed.stdout) if row["answer"] == "yes"
           and row["backend"] == "no_expert_parallel" and row["experts"].startswith("hopper") and row["quantization"] != "none"}
if not schemes:
    print("skipped: this program has no scheme in the CUDA space")
    sys.exit(77)
with tempfile.TemporaryDirectory() as temporary:
    root = pathlib.Path(temporary)
    files = checkpoint(root / "source")
    failures = [why for why in in_parallel([(on_host, files, root, scheme) for scheme in schemes], 4) if why]
    results = [] if failures else in_parallel([(on_device, files, root, *pair) for pair in schemes.items()], 4)
failures += [why for why, _ in results if why]
reasons = {reason for _, reason in results if reason}
print("\n".join(f"FAILED: {f}" for f in failures))
if reasons and not failures:
    print(f"skipped: {reasons.pop()}")
    sys.exit(77)
print(f"{len(schemes)} schemes, {len(failures)} failed")
sys.exit(1 if failures or reasons else 0)
