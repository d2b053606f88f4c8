# SPDX-License-Identifier: Apache-2.0
# tests/python/reference.py: the definition of an MoE layer in float64, with numpy alone.
import numpy as np


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def silu(gate, up):
    return gate * sigmoid(gate) * up


def swigluoai(gate, up, alpha=1.702, beta=1.0, limit=7.0):
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return (up + beta) * gate * sigmoid(alpha * gate)


def situ(gate, up, bound_of_gate, bound_of_up):
    return bound_of_gate * np.tanh(gate / bound_of_gate) * sigmoid(gate) * bound_of_up * np.tanh(up / bound_of_up)


def experts(hidden, ids, weights, w13, w2, activation=silu, w13_bias=None, w2_bias=None):
    hidden, w13, w2 = (np.asarray(a, dtype=np.float64) for a in (hidden, w13, w2))
    half = w13.shape[1] // 2
    output = np.zeros_like(hidden)
    for token in range(hidden.shape[0]):
        for expert, weight in zip(ids[token], weights[token]):
            if expert < 0:
                continue
            rows = w13[expert] @ hidden[token] + (0 if w13_bias is None else w13_bias[expert])
            gated = activation(rows[:half], rows[half:])
            output[token] += weight * (w2[expert] @ gated + (0 if w2_bias is None else w2_bias[expert]))
    return output


def distance(got, expected):
    """max |got - expected| / max |expected|."""
    return float(np.max(np.abs(np.asarray(got, dtype=np.float64) - expected)) / np.max(np.abs(expected)))


class Layer:
    """Random arrays of a layer: hidden [M, H], ids int32 [M, k], weights float32 [M, k], w13 [E, 2I, H], w2 [E, H, I]."""

    def __init__(self, rows=13, hidden=64, intermediate=48, num_experts=6, topk=3, seed=0):
        random = np.random.default_rng(seed)
        self.topk, self.num_experts = topk, num_experts
        self.hidden = random.standard_normal((rows, hidden)).astype(np.float32)
        self.ids = np.stack([random.permutation(num_experts)[:topk] for _ in range(rows)]).astype(np.int32) if rows else np.zeros(
            (0, topk), np.int32)  # fmt: skip
        self.weights = random.random((rows, topk)).astype(np.float32)
        self.w13 = (random.standard_normal((num_experts, 2 * intermediate, hidden)) / 8).astype(np.float32)
        self.w2 = (random.standard_normal((num_experts, hidden, intermediate)) / 8).astype(np.float32)

    def expected(self, **settings):
        return experts(self.hidden, self.ids, self.weights, self.w13, self.w2, **settings)
