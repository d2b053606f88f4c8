# SPDX-License-Identifier: Apache-2.0
# tests/tool/deepseek_v4_test.py: `moe layer` on a tiny checkpoint in the format of the DeepSeek-V4 release: routed experts in mxfp4 (codes
# I8, exponents in `.scale`), the shared expert in fp8 blocks with exponents, a layer that chooses by token id and one that chooses by
# score. The packing and the expected output are computed here, without the library.
import json
import math
import pathlib
import random
import struct
import sys
import tempfile

from tool import in_parallel, moe, raw, write

HIDDEN, INTERMEDIATE, EXPERTS, TOPK, TOKENS, VOCABULARY = 160, 64, 6, 3, 7, 11
FACTOR, LIMIT = 1.5, 0.5
E2M1 = [0, .5, 1, 1.5, 2, 3, 4, 6, -0.0, -.5, -1, -1.5, -2, -3, -4, -6]
rng = random.Random(4)


def f32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


def e4m3(code):
    exponent, mantissa = code >> 3 & 15, code & 7
    value = (8 + mantissa) * 2.0**(exponent - 10) if exponent else mantissa * 2.0**-9
    return -value if code & 128 else value


def matrix(rows, cols, width):
    return [[f32(rng.gauss(0, width)) for _ in range(cols)] for _ in range(rows)]


def flat(m):
    return [x for row in m for x in row]


def mxfp4(tensors, name, rows, cols):
    codes = [[rng.randrange(16) for _ in range(cols)] for _ in range(rows)]
    exponents = [[rng.randrange(121, 124) for _ in range(cols // 32)] for _ in range(rows)]
    packed = bytes(row[j] | row[j + 1] << 4 for row in codes for j in range(0, cols, 2))
    tensors[f"{name}.weight"] = ("I8", [rows, cols // 2], packed)
    tensors[f"{name}.scale"] = ("F8_E8M0", [rows, cols // 32], bytes(flat(exponents)))
    return [[E2M1[c] * 2.0**(exponents[i][j // 32] - 127) for j, c in enumerate(row)] for i, row in enumerate(codes)]


def fp8(tensors, name, rows, cols):
    codes = [[rng.randrange(0x40) | rng.randrange(2) << 7 for _ in range(cols)] for _ in range(rows)]
    exponents = [[rng.randrange(120, 123) for _ in range(-(-cols // 128))] for _ in range(-(-rows // 128))]
    tensors[f"{name}.weight"] = ("F8_E4M3", [rows, cols], bytes(flat(codes)))
    tensors[f"{name}.scale"] = ("F8_E8M0", [len(exponents), len(exponents[0])], bytes(flat(exponents)))
    return [[e4m3(c) * 2.0**(exponents[i // 128][j // 128] - 127) for j, c in enumerate(row)] for i, row in enumerate(codes)]


def expert(make, tensors, base):
    return {"gate": make(tensors, base + "w1", INTERMEDIATE, HIDDEN), "up": make(tensors, base + "w3", INTERMEDIATE, HIDDEN),
            "down": make(tensors, base + "w2", HIDDEN, INTERMEDIATE)}


def layer(tensors, number):
    base, w = f"layers.{number}.ffn.", {"table": None}
    w["router"] = matrix(EXPERTS, HIDDEN, .1)
    tensors[base + "gate.weight"] = ("F32", [EXPERTS, HIDDEN], raw("f", flat(w["router"])))
    if number == 0:
        w["table"] = [rng.sample(range(EXPERTS), TOPK) for _ in range(VOCABULARY)]
        tensors[base + "gate.tid2eid"] = ("I64", [VOCABULARY, TOPK], raw("q", flat(w["table"])))
    else:
        w["bias"] = [f32(rng.gauss(0, .3)) for _ in range(EXPERTS)]
        tensors[base + "gate.bias"] = ("F32", [EXPERTS], raw("f", w["bias"]))
    w["experts"] = [expert(mxfp4, tensors, f"{base}experts.{e}.") for e in range(EXPERTS)]
    w["shared"] = expert(fp8, tensors, base + "shared_experts.")
    return w


def times(m, x):
    return [sum(a * b for a, b in zip(row, x)) for row in m]


def ffn(w, x):
    gate, up = ([*map(f32, times(w[name], x))] for name in ("gate", "up"))
    gate, up = [min(g, LIMIT) for g in gate], [max(-LIMIT, min(u, LIMIT)) for u in up]
    return times(w["down"], [g / (1 + math.exp(-g)) * u for g, u in zip(gate, up)])


def block(w, x, token):
    scores = [math.sqrt(math.log1p(math.exp(z))) for z in times(w["router"], x)]
    chosen = w["table"][token] if w["table"] else sorted(range(EXPERTS), key=lambda e: -(scores[e] + w["bias"][e]))[:TOPK]
    total = sum(scores[e] for e in chosen)
    out = ffn(w["shared"], x)
    for e in chosen:
        out = [o + FACTOR * scores[e] / total * y for o, y in zip(out, ffn(w["experts"][e], x))]
    return out


def run(folder, number, ranks):
    done = moe("layer", "--checkpoint", folder, "--layer", number, "--input", folder / "io.st", "--tensor", "x", "--expected",
               f"{folder / 'io.st'}:y{number}", "--output", folder / f"out{number}_{ranks}.safetensors", "--json", ranks=ranks)
    if done.returncode != 0:
        return f"layer {number} on {ranks} ranks: {done.stderr}"
    error = json.loads(done.stdout)["error"]
    return None if error <= 5e-6 else f"layer {number} on {ranks} ranks: error {error}"


def refused(folder, token, ranks):
    """A token id outside the table of the layer that chooses by it."""
    outside = folder / f"io{token}_{ranks}.st"
    write(outside, {**io, "input_ids": ("I64", [TOKENS], raw("q", [*tokens[:5], token, *tokens[6:]]))})
    done = moe("layer", "--checkpoint", folder, "--layer", 0, "--input", outside, "--tensor", "x", "--output",
               folder / f"none{token}_{ranks}.safetensors", ranks=ranks)
    wanted = f"token id {token} of row 5 is out of range [0, {VOCABULARY})"
    return None if done.returncode == 1 and wanted in done.stderr else f"token {token} on {ranks} ranks: {done.returncode} {done.stderr}"


def unknown_activation(folder):
    copy = folder / "activation"
    copy.mkdir()
    for path in folder.glob("*.s*t*"):
        (copy / path.name).symlink_to(path)
    (copy / "config.json").write_text((folder / "config.json").read_text().replace('"silu"', '"tanh"'))
    done = moe("layer", "--checkpoint", copy, "--layer", 0, "--input", folder / "io.st", "--tensor", "x", "--output",
               folder / "none.safetensors", ranks=0)
    refused = done.returncode == 1 and '\'hidden_act\' is "tanh", known: silu' in done.stderr
    return None if refused else f"hidden_act: {done.returncode} {done.stderr}"


with tempfile.TemporaryDirectory() as temporary:
    folder = pathlib.Path(temporary) / "v4"
    folder.mkdir()
    tensors = {}
    layers = [layer(tensors, 0), layer(tensors, 1)]
    write(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(
        {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "expert_dtype": "fp4", "hidden_act": "silu",
         "hidden_size": HIDDEN, "moe_intermediate_size": INTERMEDIATE, "n_routed_experts": EXPERTS, "n_shared_experts": 1,
         "norm_topk_prob": True, "num_experts_per_tok": TOPK, "num_hidden_layers": 2, "num_hash_layers": 1, "routed_scaling_factor": FACTOR,
         "scoring_func": "sqrtsoftplus", "swiglu_limit": LIMIT, "topk_method": "noaux_tc",
         "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
                                 "weight_block_size": [128, 128]}}))
    x, tokens = matrix(TOKENS, HIDDEN, 1), [rng.randrange(VOCABULARY) for _ in range(TOKENS)]
    io = {"x": ("F32", [TOKENS, HIDDEN], raw("f", flat(x))), "input_ids": ("I64", [TOKENS], raw("q", tokens))}
    for number, w in enumerate(layers):
        io[f"y{number}"] = ("F32", [TOKENS, HIDDEN], raw("f", flat([block(w, row, token) for row, token in zip(x, tokens)])))
    write(folder / "io.st", io)
    jobs = [(run, folder, number, ranks) for number in (0, 1) for ranks in (0, 2)]
    jobs += [(refused, folder, token, ranks) for token in (-1, VOCABULARY) for ranks in (0, 2)]
    jobs.append((unknown_activation, folder))
    failures = [problem for problem in in_parallel(jobs, 4) if problem]
print("\n".join(f"FAILED: {f}" for f in failures))
sys.exit(1 if failures else 0)
