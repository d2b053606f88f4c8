# SPDX-License-Identifier: Apache-2.0
# tests/tool/latent_test.py: `moe layer` on a tiny checkpoint in the layout of Kimi-K3, whose routed experts, in mxfp4, work on a projection
# of the token. The packing and the expected output are computed here, without the library.
import json
import math
import pathlib
import random
import struct
import sys
import tempfile

from tool import in_parallel, layer_problem, raw, write

HIDDEN, LATENT, INTERMEDIATE, EXPERTS, TOPK, SHARED, TOKENS = 96, 64, 32, 6, 3, 2, 7
EPS, FACTOR, GATE_BETA, UP_BETA = 1e-5, 1.5, 4.0, 25.0
LAYER = "language_model.model.layers.1.block_sparse_moe."
E2M1 = [0, .5, 1, 1.5, 2, 3, 4, 6, -0.0, -.5, -1, -1.5, -2, -3, -4, -6]
rng = random.Random(11)


def f32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


def matrix(rows, cols, width):
    return [[f32(rng.gauss(0, width)) for _ in range(cols)] for _ in range(rows)]


def flat(m):
    return [x for row in m for x in row]


def dense(tensors, name, m):
    tensors[name] = ("F32", [len(m), len(m[0])], raw("f", flat(m)))
    return m


def mxfp4(tensors, name, rows, cols):
    codes = [[rng.randrange(16) for _ in range(cols)] for _ in range(rows)]
    exponents = [[rng.randrange(122, 125) for _ in range(cols // 32)] for _ in range(rows)]
    packed = bytes(row[j] | row[j + 1] << 4 for row in codes for j in range(0, cols, 2))
    tensors[f"{name}.weight_packed"] = ("U8", [rows, cols // 2], packed)
    tensors[f"{name}.weight_scale"] = ("U8", [rows, cols // 32], bytes(flat(exponents)))
    return [[E2M1[c] * 2.0**(exponents[i][j // 32] - 127) for j, c in enumerate(row)] for i, row in enumerate(codes)]


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def times(m, x):
    return [sum(a * b for a, b in zip(row, x)) for row in m]


def situ(gate, up):
    return GATE_BETA * math.tanh(gate / GATE_BETA) * sigmoid(gate) * UP_BETA * math.tanh(up / UP_BETA)


def ffn(w, x):
    return times(w["down"], [situ(g, u) for g, u in zip(times(w["gate"], x), times(w["up"], x))])


def checkpoint(folder, normed):
    folder.mkdir()
    tensors, w = {}, {}
    w["router"] = dense(tensors, LAYER + "gate.weight", matrix(EXPERTS, HIDDEN, .2))
    w["bias"] = [f32(rng.gauss(0, .3)) for _ in range(EXPERTS)]
    tensors[LAYER + "gate.e_score_correction_bias"] = ("F32", [EXPERTS], raw("f", w["bias"]))
    w["in"] = dense(tensors, LAYER + "routed_expert_down_proj.weight", matrix(LATENT, HIDDEN, .1))
    w["out"] = dense(tensors, LAYER + "routed_expert_up_proj.weight", matrix(HIDDEN, LATENT, .1))
    w["norm"] = [f32(1 + rng.gauss(0, .2)) for _ in range(LATENT)]
    if normed:
        tensors[LAYER + "routed_expert_norm.weight"] = ("F32", [LATENT], raw("f", w["norm"]))
    w["experts"] = []
    for e in range(EXPERTS):
        base = f"{LAYER}experts.{e}."
        w["experts"].append({"gate": mxfp4(tensors, base + "w1", INTERMEDIATE, LATENT),
                             "up": mxfp4(tensors, base + "w3", INTERMEDIATE, LATENT),
                             "down": mxfp4(tensors, base + "w2", LATENT, INTERMEDIATE)})
    width = SHARED * INTERMEDIATE
    w["shared"] = {name: dense(tensors, f"{LAYER}shared_experts.{name}_proj.weight", matrix(*shape, .1))
                   for name, shape in {"gate": (width, HIDDEN), "up": (width, HIDDEN), "down": (HIDDEN, width)}.items()}
    write(folder / "model.safetensors", tensors)
    text = {"model_type": "kimi_linear", "hidden_act": "situ", "activation_situ_beta": GATE_BETA, "activation_situ_linear_beta": UP_BETA,
            "hidden_size": HIDDEN, "routed_expert_hidden_size": LATENT, "latent_moe_use_norm": normed, "rms_norm_eps": EPS,
            "moe_intermediate_size": INTERMEDIATE, "num_experts": EXPERTS, "num_experts_per_token": TOPK, "num_shared_experts": SHARED,
            "num_hidden_layers": 3, "first_k_dense_replace": 1, "moe_layer_freq": 1, "moe_renormalize": True, "use_grouped_topk": True,
            "num_expert_group": 1, "topk_group": 1, "moe_router_activation_func": "sigmoid", "routed_scaling_factor": FACTOR,
            "quantization_config": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized",
                                    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "strategy": "group",
                                                                              "group_size": 32}}}}}
    (folder / "config.json").write_text(json.dumps({"model_type": "kimi_k3", "text_config": text}))
    x = matrix(TOKENS, HIDDEN, 1)
    y = [block(w, row, normed) for row in x]
    write(folder.parent / f"{folder.name}_io.safetensors", {"x": ("F32", [TOKENS, HIDDEN], raw("f", flat(x))),
                                                            "y": ("F32", [TOKENS, HIDDEN], raw("f", flat(y)))})


def block(w, x, normed):
    scores = [sigmoid(z) for z in times(w["router"], x)]
    chosen = sorted(range(EXPERTS), key=lambda e: -(scores[e] + w["bias"][e]))[:TOPK]
    total = sum(scores[e] for e in chosen)
    inner, routed = times(w["in"], x), [0.0] * LATENT
    for e in chosen:
        routed = [r + FACTOR * scores[e] / total * y for r, y in zip(routed, ffn(w["experts"][e], inner))]
    if normed:
        scale = 1 / math.sqrt(sum(r * r for r in routed) / LATENT + EPS)
        routed = [r * scale * g for r, g in zip(routed, w["norm"])]
    return [a + b for a, b in zip(times(w["out"], routed), ffn(w["shared"], x))]


with tempfile.TemporaryDirectory() as temporary:
    root = pathlib.Path(temporary)
    jobs = []
    for name, normed in (("normed", True), ("plain", False)):
        checkpoint(root / name, normed)
        jobs += [(layer_problem, root / name, ranks, 5e-6) for ranks in (0, 2)]
    failures = [problem for problem in in_parallel(jobs, 4) if problem]
print("\n".join(f"FAILED: {f}" for f in failures))
sys.exit(1 if failures else 0)
