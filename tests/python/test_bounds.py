# SPDX-License-Identifier: Apache-2.0
# tests/python/test_bounds.py: numbers that no 32 bits hold, outputs over inputs, and names that mean another layout are refused.
import numpy as np
import pytest
import reference
from reference import Layer, distance

import moe
from moe._ffi import library

#: Each of them is a valid number once its upper 32 bits are cut off.
WIDE = [2**32 + 2, 2 - 2**32, -(2**32), 2**31, 2**63 - 1, -(2**63)]
on_host = pytest.mark.skipif(not moe.has("onednn"), reason="libmoe was built without oneDNN, so that no experts run on the host")


def runner_of(layer, **settings):
    return moe.Runner(layer.w13, layer.w2, **{"topk": layer.topk, "max_tokens": 16, **settings})


def out_of_range(name, value):
    return pytest.raises(moe.ArgumentError, match=rf"{name}: {value} is out of range \[-2147483648, 2147483647\]")


@pytest.mark.parametrize("value", WIDE)
@pytest.mark.parametrize("name", ["topk", "num_experts", "num_threads", "weight_on_input", "log"])
def test_settings_of_a_runner_are_checked_before_they_are_narrowed(name, value):
    with out_of_range(f"^E_ARG: {name}", value):
        runner_of(Layer(), **{name: value})


@pytest.mark.parametrize("value", WIDE)
@pytest.mark.parametrize("name", ["topk", "num_experts", "num_expert_group", "topk_group", "num_zero_experts"])
def test_settings_of_a_router(name, value):
    with out_of_range(f"router.{name}", value):
        runner_of(Layer(), router={name: value})


@pytest.mark.parametrize("value", WIDE)
def test_routing_and_placement(value):
    with out_of_range("^E_ARG: topk_group", value):
        moe.route(np.zeros((4, 8), np.float32), 2, num_expert_group=2, topk_group=value)
    load = np.ones((1, 8), np.float32)
    settings = {"num_physical": 8, "num_ranks": 1, "num_nodes": 1, "num_groups": 1}
    for name in settings:
        with out_of_range(f"^E_ARG: {name}", value):
            library.plan({**settings, name: value}, load, np.zeros((1, 8), np.int32), None, None)


@pytest.mark.parametrize("value", WIDE)
def test_groups(value):
    for rank, size, name in ((value, 2, "rank"), (0, value, "size")):
        with out_of_range(name, value):
            moe.Group.nccl(bytes(128), rank, size)

    class Communicator:
        def py2f(self):
            return value

    with out_of_range("communicator", value):
        moe.Group.mpi(Communicator())
    with out_of_range("device", value):
        library.stream_wait(value, 0, 0)


@on_host
@pytest.mark.parametrize("rows", [13, 40])
@pytest.mark.parametrize("shift", [0, 1, 12, 16, 17, 39])
def test_an_output_over_the_input(rows, shift):
    """Also where no piece of the input overlaps its own piece of the output: the output of one is the input of the next."""
    layer = Layer(rows=rows)
    for first, output in ((0, min(shift, rows - 1)), (min(shift, rows - 1), 0)):
        memory = np.zeros((2 * rows, 64), np.float32)
        hidden = memory[first : first + rows]
        hidden[:] = layer.hidden
        with runner_of(layer) as runner:
            with pytest.raises(moe.ArgumentError, match="output: its memory overlaps that of hidden"):
                runner.forward_routed(hidden, layer.ids, layer.weights, output=memory[output : output + rows])
            assert (hidden == layer.hidden).all()


@on_host
def test_columns_beside_each_other_do_not_overlap():
    layer = Layer(rows=40)
    memory = np.zeros((40, 128), np.float32)
    memory[:, :64] = layer.hidden
    with runner_of(layer) as runner:
        runner.forward_routed(memory[:, :64], layer.ids, layer.weights, output=memory[:, 64:])
    assert distance(memory[:, 64:], layer.expected()) < 1e-5


@on_host
def test_an_output_over_anything_else_that_is_read():
    for rows in (13, 40):  # in one piece, and in several
        layer = Layer(rows=rows)
        with runner_of(layer) as runner:
            for name, memory in (("w13", layer.w13), ("w2", layer.w2)):
                with pytest.raises(moe.ArgumentError, match=f"output: its memory overlaps that of {name},"):
                    runner.forward_routed(layer.hidden, layer.ids, layer.weights, output=memory.reshape(-1, 64)[-rows:])
            output = np.zeros((rows, 64), np.float32)
            for name, dtype in (("topk_ids", np.int32), ("topk_weights", np.float32)):
                arrays = {"topk_ids": layer.ids, "topk_weights": layer.weights}
                inside = output.reshape(-1)[-rows * layer.topk :].view(dtype).reshape(rows, layer.topk)
                inside[:] = arrays[name]
                arrays[name] = inside
                with pytest.raises(moe.ArgumentError, match=f"output: its memory overlaps that of {name},"):
                    runner.forward_routed(layer.hidden, arrays["topk_ids"], arrays["topk_weights"], output=output)
    logits = np.zeros((13, 64), np.float32)
    with runner_of(Layer(), router={}) as runner, pytest.raises(moe.ArgumentError, match="overlaps that of router_logits"):
        runner.forward(Layer().hidden, logits[:, :6], output=logits)


@on_host
def test_swigluoai_says_what_to_give_instead():
    """gpt-oss: gate and up rows alternate, with biases, and the limit is 7."""
    layer = Layer(seed=8)
    layer.hidden *= 8  # beyond the limit
    random = np.random.default_rng(9)
    w13_bias = random.standard_normal(layer.w13.shape[:2]).astype(np.float32)
    w2_bias = random.standard_normal(layer.w2.shape[:2]).astype(np.float32)
    with pytest.raises(moe.ConfigError, match="swigluoai is of a w13.*alternate.*swigluoai_halves with limit 7"):
        moe.experts(layer.hidden, layer.ids, layer.weights, layer.w13, layer.w2, "swigluoai", w13_bias=w13_bias, w2_bias=w2_bias)
    w13, bias = (np.ascontiguousarray(np.concatenate([a[:, 0::2], a[:, 1::2]], axis=1)) for a in (layer.w13, w13_bias))
    output = moe.experts(layer.hidden, layer.ids, layer.weights, w13, layer.w2, "swigluoai_halves", limit=7.0, w13_bias=bias,
                         w2_bias=w2_bias)  # fmt: skip
    expected = np.zeros(layer.hidden.shape)
    for token, (ids, weights) in enumerate(zip(layer.ids, layer.weights)):
        for expert, weight in zip(ids, weights):
            rows = layer.w13[expert].astype(np.float64) @ layer.hidden[token] + w13_bias[expert]
            gated = reference.swigluoai(rows[0::2], rows[1::2])
            expected[token] += weight * (layer.w2[expert].astype(np.float64) @ gated + w2_bias[expert])
    assert distance(output, expected) < 1e-5


@on_host
def test_constants_are_reported_by_their_names():
    with pytest.raises(moe.ConfigError, match="router.sparsemixer_eps: nan"):
        runner_of(Layer(topk=2), router={"selection": "sparsemixer", "sparsemixer_eps": float("nan")})
    with pytest.raises(moe.ConfigError, match=r"num_threads: 1073741824 is out of range \[0, 4096\]"):
        runner_of(Layer(), num_threads=2**30)
