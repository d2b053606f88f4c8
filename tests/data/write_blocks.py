#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# tests/data/write_blocks.py: the block files of the presets that transformers has no model class for: Grok-1 and Kimi-K3. Each block is
# computed here by its definition, in double precision, without the library and without other packages.
#
#     write_blocks.py            writes the files into moe_blocks/
#     write_blocks.py --check    computes them again and compares
#
# README.md says where the constants are from. Weights and inputs are random float32 values; what is stored of the results is rounded to
# float32.
import argparse
import array
import json
import math
import pathlib
import random
import struct
import sys

BLOCKS = pathlib.Path(__file__).resolve().parent / "moe_blocks"
TOKENS, WIDTH, EXPERTS = 15, 16, 8
CODES = {"F32": "f", "I32": "i"}
GAP = 2e-3  # least distance of the last chosen expert to the next one: rounding must not change the choice


def f32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


def times(matrix, x):
    return [math.fsum(a * b for a, b in zip(row, x)) for row in matrix]


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def soft_cap(x, cap):
    return cap * math.tanh(x / cap)


def ffn(act, gate, up, down, x):
    return times(down, [act(g, u) for g, u in zip(times(gate, x), times(up, x))])


def weighted_sum(weights, rows):
    return [math.fsum(w * row[i] for w, row in zip(weights, rows)) for i in range(len(rows[0]))]


def choose(scores, k):
    """The experts of the k largest scores, best first, and how far the next one is behind."""
    order = sorted(range(len(scores)), key=lambda e: -scores[e])
    return order[:k], scores[order[k - 1]] - scores[order[k]]


class Weights:
    """Random tensors by their names in the checkpoint."""

    def __init__(self, seed, prefix):
        self.rng, self.prefix, self.tensors = random.Random(seed), prefix, {}

    def draw(self, shape, deviation, mean=0.0):
        if len(shape) == 1:
            return [f32(mean + self.rng.gauss(0, deviation)) for _ in range(shape[0])]
        return [self.draw(shape[1:], deviation, mean) for _ in range(shape[0])]

    def add(self, name, shape, deviation, mean=0.0):
        self.tensors[self.prefix + name] = self.draw(shape, deviation, mean)
        return self.tensors[self.prefix + name]

    def linear(self, name, rows, cols, scale=1.0):
        """A matrix whose product with standard normal values has about this deviation."""
        return self.add(name + ".weight", (rows, cols), scale / math.sqrt(cols))


class Grok1:
    """Grok-1: the softmax of all soft-capped logits, the two largest of it as they are; experts with a gelu gate."""
    name, seed, topk, prefix = "grok_1", 5000, 2, "model.layers.0.moe_block."
    hidden, cap = 32, 30.0
    config = {"model_type": "grok-1", "hidden_size": hidden, "intermediate_size": WIDTH, "num_experts": EXPERTS,
              "num_experts_per_tok": topk, "num_hidden_layers": 1}
    metadata = {"routing_family": "softmax_topk", "scoring_func": "softmax", "logit_softcapping": str(cap), "activation": "gelu"}

    def __init__(self, weights):
        self.router = weights.linear("gate", EXPERTS, self.hidden, 4.0)  # logits large enough for the cap to be seen
        self.experts = []
        for e in range(EXPERTS):
            at = f"experts.{e}."
            self.experts.append((weights.linear(at + "linear", WIDTH, self.hidden), weights.linear(at + "linear_v", WIDTH, self.hidden),
                                 weights.linear(at + "linear_1", self.hidden, WIDTH, 2.0)))

    @staticmethod
    def gelu(gate, up):
        return gate * 0.5 * (1 + math.erf(gate / math.sqrt(2))) * up

    def route(self, x):
        logits = times(self.router, x)
        capped = [soft_cap(z, self.cap) for z in logits]
        exponents = [math.exp(z - max(capped)) for z in capped]
        scores = [v / math.fsum(exponents) for v in exponents]
        ids, gap = choose(capped, self.topk)
        return logits, ids, [scores[e] for e in ids], gap

    def output(self, x, ids, weights):
        return weighted_sum(weights, [ffn(self.gelu, *self.experts[e], x) for e in ids])


class KimiK3:
    """Kimi-K3: sigmoid scores chosen with a bias and normalised, experts on a projection of the token, their sum normalised before it is
    projected back, shared experts on the token itself."""
    name, seed, topk, prefix = "kimi_k3", 5100, 3, "language_model.model.layers.0.block_sparse_moe."
    hidden, latent, shared, eps, factor, gate_cap, up_cap = 48, 32, 2, 1e-5, 1.0, 4.0, 25.0
    config = {"model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"], "hidden_act": "situ",
              "activation_situ_beta": gate_cap, "activation_situ_linear_beta": up_cap, "hidden_size": hidden,
              "routed_expert_hidden_size": latent, "latent_moe_use_norm": True, "rms_norm_eps": eps, "moe_intermediate_size": WIDTH,
              "num_experts": EXPERTS, "num_experts_per_token": topk, "num_shared_experts": shared, "num_hidden_layers": 1,
              "first_k_dense_replace": 0, "moe_layer_freq": 1, "moe_renormalize": True, "moe_router_activation_func": "sigmoid",
              "use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "routed_scaling_factor": factor}
    metadata = {"routing_family": "biased_sigmoid", "scoring_func": "sigmoid", "correction_bias": "selection_only",
                "norm_topk_prob": "true", "renorm_eps": "1e-20", "routed_scaling_factor": str(factor), "activation": "silu",
                "glu": "softcap(gate)*sigmoid(gate)*softcap(up)", "gate_softcap": str(gate_cap), "up_softcap": str(up_cap),
                "latent_size": str(latent), "latent_output_norm": "rmsnorm(r)*w", "shared_experts": str(shared),
                "shared_expert_intermediate_size": str(shared * WIDTH)}

    def __init__(self, weights):
        self.router = weights.linear("gate", EXPERTS, self.hidden, 1.5)
        self.bias = weights.add("gate.e_score_correction_bias", (EXPERTS,), 0.3)
        self.into = weights.linear("routed_expert_down_proj", self.latent, self.hidden)
        self.experts = []
        for e in range(EXPERTS):
            at = f"experts.{e}."  # gates and ups of the size of their caps
            self.experts.append((weights.linear(at + "w1", WIDTH, self.latent, 3.0), weights.linear(at + "w3", WIDTH, self.latent, 12.0),
                                 weights.linear(at + "w2", self.latent, WIDTH)))
        self.norm = weights.add("routed_expert_norm.weight", (self.latent,), 0.2, 1.0)
        self.back = weights.linear("routed_expert_up_proj", self.hidden, self.latent, 4.0)
        wide = self.shared * WIDTH
        self.beside = (weights.linear("shared_experts.gate_proj", wide, self.hidden, 2.0),
                       weights.linear("shared_experts.up_proj", wide, self.hidden, 4.0),
                       weights.linear("shared_experts.down_proj", self.hidden, wide))

    def situ(self, gate, up):
        return soft_cap(gate, self.gate_cap) * sigmoid(gate) * soft_cap(up, self.up_cap)

    def route(self, x):
        logits = times(self.router, x)
        scores = [sigmoid(z) for z in logits]
        ids, gap = choose([s + b for s, b in zip(scores, self.bias)], self.topk)
        total = math.fsum(scores[e] for e in ids) + 1e-20
        return logits, ids, [self.factor * scores[e] / total for e in ids], gap

    def output(self, x, ids, weights):
        inner = times(self.into, x)
        routed = weighted_sum(weights, [ffn(self.situ, *self.experts[e], inner) for e in ids])
        scale = 1 / math.sqrt(math.fsum(r * r for r in routed) / len(routed) + self.eps)
        routed = times(self.back, [r * scale * w for r, w in zip(routed, self.norm)])
        return [r + s for r, s in zip(routed, ffn(self.situ, *self.beside, x))]


def compute(kind):
    """The tensors of a block file, name -> nested lists, and its metadata, with the first seed under which no choice is close."""
    for seed in range(kind.seed, kind.seed + 100):
        weights = Weights(seed, kind.prefix)
        block = kind(weights)
        hidden = weights.draw((TOKENS, kind.hidden), 1.0)
        routes = [block.route(x) for x in hidden]
        gap = min(route[3] for route in routes)
        if gap > GAP:
            break
    else:
        raise RuntimeError(f"{kind.name}: a close choice with every seed")
    tensors = {"hidden": hidden, "expected": [block.output(x, ids, w) for x, (_, ids, w, _) in zip(hidden, routes)],
               "router_logits": [route[0] for route in routes], "topk_ids": [route[1] for route in routes],
               "topk_weights": [route[2] for route in routes]} | weights.tensors
    metadata = {
        "case": f"{kind.name}_e{EXPERTS}k{kind.topk}_s{seed}", "model_type": kind.config["model_type"], "num_experts": str(EXPERTS),
        "top_k": str(kind.topk), "hidden_size": str(kind.hidden), "intermediate_size": str(WIDTH), "num_tokens": str(TOKENS),
        "glu": "act(gate)*up", "norm_topk_prob": "false", "renorm_eps": "0", "n_group": "1", "topk_group": "1", "group_score": "none",
        "masked_group_fill": "none", "routed_scaling_factor": "1.0", "output_scaling_factor": "1.0", "weight_applied_on": "expert_output",
        "correction_bias": "none", "shared_experts": "0", "shared_expert_intermediate_size": "0", "shared_expert_gate": "none",
        "expert_bias": "false", "router_bias": "false", "swiglu_alpha": "none", "swiglu_limit": "none", "num_zero_experts": "0",
        "layout": "per_expert", "selection": "topk_of_scores", "tensor_prefix": kind.prefix, "parameter_names": "checkpoint",
        "seed": str(seed), "transformers": "none", "torch": "none", "device": "cpu", "compute_dtype": "float64",
        "min_selection_gap": f"{gap:.6f}", "config_json": json.dumps(kind.config, sort_keys=True),
    } | kind.metadata
    return tensors, metadata


def shape_of(values):
    return [len(values), *shape_of(values[0])] if isinstance(values, list) else []


def flat(values):
    return [x for row in values for x in flat(row)] if isinstance(values, list) else [values]


def packed(tensors, metadata):
    """The bytes of a safetensors file."""
    header, body = {"__metadata__": metadata}, b""
    for name, values in tensors.items():
        kind = "I32" if name == "topk_ids" else "F32"
        data = array.array(CODES[kind], flat(values))
        if sys.byteorder == "big":
            data.byteswap()
        header[name] = {"dtype": kind, "shape": shape_of(values), "data_offsets": [len(body), len(body) + 4 * len(data)]}
        body += data.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + body


def unpacked(data):
    """name -> (dtype, shape, values), and the metadata."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + length])
    metadata, tensors = header.pop("__metadata__"), {}
    for name, entry in header.items():
        start, stop = (8 + length + at for at in entry["data_offsets"])
        code = CODES[entry["dtype"]]
        tensors[name] = (entry["dtype"], entry["shape"], struct.unpack(f"<{(stop - start) // 4}{code}", data[start:stop]))
    return tensors, metadata


def differences(path, data):
    """What the file and the bytes of one that is computed now differ in, beyond rounding."""
    if not path.exists():
        return [f"{path.name} is missing"]
    (ours, metadata), (theirs, theirs_metadata) = unpacked(data), unpacked(path.read_bytes())
    out = [f"{path.name}: metadata '{key}'" for key in sorted(metadata.keys() | theirs_metadata.keys())
           if metadata.get(key) != theirs_metadata.get(key)]
    out += [f"{path.name}: tensor '{name}' is in one only" for name in sorted(ours.keys() ^ theirs.keys())]
    for name in sorted(ours.keys() & theirs.keys()):
        largest = max(map(abs, theirs[name][2]))
        close = all(abs(a - b) <= 1e-6 * largest for a, b in zip(ours[name][2], theirs[name][2]))
        if ours[name][:2] != theirs[name][:2] or not close:
            out.append(f"{path.name}: tensor '{name}' differs")
    return out


def main():
    options = argparse.ArgumentParser(description="writes or checks the block files that no model class computes")
    options.add_argument("--check", action="store_true")
    check = options.parse_args().check
    problems = []
    for kind in (Grok1, KimiK3):
        tensors, metadata = compute(kind)
        path, data = BLOCKS / f"{metadata['case']}.safetensors", packed(tensors, metadata)
        if check:
            problems += differences(path, data)
        else:
            path.write_bytes(data)
            print(f"{path.name}: {len(data)} bytes, gap {metadata['min_selection_gap']}")
    print("\n".join(f"FAILED: {p}" for p in problems), end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
