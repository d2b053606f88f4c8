# SPDX-License-Identifier: Apache-2.0
# tests/python/test_numpy.py: the package with numpy arrays on the host.
import builtins
import gc
import threading

import numpy as np
import pytest
import reference
from reference import Layer, distance

import moe

if not moe.has("onednn"):
    pytest.skip("libmoe was built without oneDNN, so that no experts run on the host", allow_module_level=True)


def test_experts_agrees_with_the_definition():
    layer = Layer()
    output = moe.experts(layer.hidden, layer.ids, layer.weights, layer.w13, layer.w2)
    assert type(output) is np.ndarray and output.dtype == np.float32 and output.shape == layer.hidden.shape
    assert distance(output, layer.expected()) < 1e-5


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.int16, np.int8, np.uint16, np.uint8])
def test_ids_and_weights_of_other_dtypes(dtype):
    layer = Layer()
    layer.ids[0, 0] = -1 if np.issubdtype(dtype, np.signedinteger) else layer.ids[0, 0]
    output = moe.experts(layer.hidden, layer.ids.astype(dtype), layer.weights.astype(np.float64), layer.w13, layer.w2)
    assert distance(output, layer.expected()) < 1e-5


@pytest.mark.parametrize("bad", [6, 2**32, 2**32 + 1, -(2**32), 2**63 - 1])
def test_ids_are_checked_before_they_are_narrowed(bad):
    layer = Layer()
    ids = layer.ids.astype(np.int64)
    ids[2, 1] = bad
    with pytest.raises(moe.ArgumentError, match=rf"topk_ids\[2, 1\]: {bad} is out of range \[-1, 6\)"):
        moe.experts(layer.hidden, ids, layer.weights, layer.w13, layer.w2)


@pytest.mark.parametrize("dtype", ["float32", "float64", "uint32", "uint64"])
def test_ids_of_a_dtype_that_loses_values_are_refused(dtype):
    layer = Layer()
    with pytest.raises(moe.ArgumentError, match=f"topk_ids: dtype is {dtype}, expected int32 or int64"):
        moe.experts(layer.hidden, layer.ids.astype(dtype), layer.weights, layer.w13, layer.w2)


def test_bounds_of_situ():
    layer = Layer(seed=3)
    for gate, up in ((4.0, 25.0), (0.5, 0.25)):
        settings = {} if gate == 4.0 else {"situ_gate": gate, "situ_up": up}
        output = moe.experts(layer.hidden, layer.ids, layer.weights, layer.w13, layer.w2, "situ", **settings)
        expected = layer.expected(activation=lambda g, u: reference.situ(g, u, gate, up))
        assert distance(output, expected) < 1e-5
    with pytest.raises(moe.ConfigError, match="situ_gate.*0"):
        moe.experts(layer.hidden, layer.ids, layer.weights, layer.w13, layer.w2, "situ", situ_gate=0.0)


def test_activation_with_constants_and_biases():
    layer = Layer(seed=1)
    random = np.random.default_rng(5)
    w13_bias = random.standard_normal(layer.w13.shape[:2]).astype(np.float32)
    w2_bias = random.standard_normal(layer.w2.shape[:2]).astype(np.float32)
    output = moe.experts(layer.hidden, layer.ids, layer.weights, layer.w13, layer.w2, "swigluoai_halves", alpha=1.5, beta=0.5, limit=1.0,
                         w13_bias=w13_bias, w2_bias=w2_bias)  # fmt: skip
    expected = layer.expected(activation=lambda g, u: reference.swigluoai(g, u, 1.5, 0.5, 1.0), w13_bias=w13_bias, w2_bias=w2_bias)
    assert distance(output, expected) < 1e-5


def test_skipped_slots_and_no_rows():
    layer = Layer()
    layer.ids[0] = -1
    layer.ids[1:, 1] = -1
    output = moe.experts(layer.hidden, layer.ids, layer.weights, layer.w13, layer.w2)
    assert distance(output, layer.expected()) < 1e-5 and not output[0].any()
    empty = Layer(rows=0)
    assert moe.experts(empty.hidden, empty.ids, empty.weights, empty.w13, empty.w2).shape == (0, 64)


def test_rows_with_strides_and_an_output():
    layer = Layer()
    wide = np.zeros((layer.hidden.shape[0], 100), np.float32)
    wide[:, :64] = layer.hidden
    output = np.full((layer.hidden.shape[0], 80), 7, np.float32)
    moe.experts(wide[:, :64], layer.ids, layer.weights, layer.w13, layer.w2, output=output[:, :64])
    assert distance(output[:, :64], layer.expected()) < 1e-5
    assert (output[:, 64:] == 7).all()


def test_read_only_inputs():
    layer = Layer()
    for array in (layer.hidden, layer.ids, layer.weights, layer.w13, layer.w2):
        array.flags.writeable = False
    assert distance(moe.experts(layer.hidden, layer.ids, layer.weights, layer.w13, layer.w2), layer.expected()) < 1e-5


def test_weights_written_in_place_are_noticed():
    layer = Layer()
    moe.experts(layer.hidden, layer.ids, layer.weights, layer.w13, layer.w2)
    layer.w13 *= -0.5
    assert distance(moe.experts(layer.hidden, layer.ids, layer.weights, layer.w13, layer.w2), layer.expected()) < 1e-5


def test_weights_at_an_address_that_was_used_before():
    for seed in range(20):  # each round frees its arrays, and the next gets their memory
        layer = Layer(seed=seed)
        assert distance(moe.experts(layer.hidden, layer.ids, layer.weights, layer.w13, layer.w2), layer.expected()) < 1e-5
        del layer
        gc.collect()


def test_a_long_input_runs_in_pieces():
    layer = Layer(rows=37)
    with moe.Runner(layer.w13, layer.w2, topk=layer.topk, max_tokens=8) as runner:
        whole = runner.forward_routed(layer.hidden, layer.ids, layer.weights)
    assert distance(whole, layer.expected()) < 1e-5


def test_runner_with_a_router():
    layer = Layer()
    logits = np.random.default_rng(3).standard_normal((13, layer.num_experts)).astype(np.float32)
    routing = moe.route(logits, layer.topk, renorm="sum")
    with moe.Runner(layer.w13, layer.w2, topk=layer.topk, max_tokens=16, router={"renorm": "sum"}) as runner:
        output = runner.forward(layer.hidden, logits)
        assert runner.info["backend"] == "no_expert_parallel" and runner.info["num_local_experts"] == layer.num_experts
    expected = reference.experts(layer.hidden, routing.topk_ids, routing.topk_weights, layer.w13, layer.w2)
    assert distance(output, expected) < 1e-5


def test_route():
    logits = np.random.default_rng(4).standard_normal((9, 16)).astype(np.float32)
    ids, weights = moe.route(logits, 4)
    scores = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    order = np.argsort(-scores, axis=1)[:, :4]
    assert ids.dtype == np.int32 and weights.dtype == np.float32
    assert (np.sort(ids, 1) == np.sort(order, 1)).all()
    assert np.abs(np.take_along_axis(scores, ids.astype(np.int64), 1) - weights).max() < 1e-6


def quantized_runner(layer, scheme):
    w13, w2 = moe.quantize(layer.w13, scheme), moe.quantize(layer.w2, scheme)
    runner = moe.Runner(w13.codes, w2.codes, w13_scale=w13.scales, w2_scale=w2.scales, quantization=scheme, dtype="float32",
                        topk=layer.topk,
                        max_tokens=16)  # fmt: skip
    return w13, w2, runner.forward_routed(layer.hidden, layer.ids, layer.weights)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def widened(quantized, scheme):
    """The values of codes: of two in a byte the low nibble is the first. Groups of 32, of 16 in nvfp4, or rows."""
    codes, scales = quantized
    if scheme.startswith("int8"):
        return codes.astype(np.float64) * scales
    if scheme in ("fp8_per_channel", "mxfp8_w8a16"):
        magnitudes = 2.0 ** (np.maximum(codes >> 3 & 15, 1).astype(np.float64) - 7) * ((codes >> 3 & 15 > 0) + (codes & 7) / 8)
        values = np.where(codes > 127, -magnitudes, magnitudes)
        powers = np.repeat(2.0 ** (scales.astype(np.float64) - 127), 32, axis=-1)
        return values * (scales if scheme == "fp8_per_channel" else powers)
    codes = np.stack((codes & 15, codes >> 4), -1).reshape(*codes.shape[:-1], -1).astype(np.int64)
    if scheme.startswith("int4_group32"):
        return (codes - 8) * np.repeat(scales, 32, axis=-1)
    if scheme.startswith("int4_group128_zero"):
        pairs = np.repeat(scales.reshape(*scales.shape[:-1], -1, 2), 128, axis=-2)
        return (codes - pairs[..., 1]) * pairs[..., 0]
    if scheme == "nvfp4_w4a16":
        scales, last = scales.reshape(len(scales), -1)[:, :-4], scales.reshape(len(scales), -1)[:, -4:].copy().view(np.float32)
        powers = 2.0 ** np.maximum((scales >> 3).astype(np.float64) - 7, -6)  # e4m3 without a sign
        values = powers * ((scales >> 3 > 0) + (scales & 7) / 8) * last
        return E2M1[codes] * np.repeat(values.reshape(*codes.shape[:-1], -1), 16, axis=-1)
    return E2M1[codes] * np.repeat(2.0 ** (scales.astype(np.float64) - 127), 32, axis=-1)


@pytest.mark.parametrize("scheme", ["int4_group32", "int4_group128_zero", "mxfp4_w4a16", "nvfp4_w4a16", "int8_per_channel",
                                    "fp8_per_channel", "mxfp8_w8a16"])
def test_weights_alone(scheme):
    layer = Layer(hidden=256, intermediate=128, seed=2)
    w13, w2, output = quantized_runner(layer, scheme)
    assert distance(widened(w13, scheme), layer.w13) < 0.3  # coarse, yet the same weights
    assert distance(output, reference.experts(layer.hidden, layer.ids, layer.weights, widened(w13, scheme), widened(w2, scheme))) < 1e-5


@pytest.mark.parametrize(("scheme", "dtype", "bound"), [("fp8_block128", np.uint8, 0.1), ("fp8_per_token", np.uint8, 0.1),
                                                        ("mxfp8", np.uint8, 0.1), ("int8_per_token", np.int8, 0.05)])  # fmt: skip
def test_weights_and_activations(scheme, dtype, bound):
    layer = Layer(hidden=256, intermediate=128, seed=2)
    w13, _, output = quantized_runner(layer, scheme)
    assert w13.codes.dtype == dtype
    assert 1e-4 < distance(output, layer.expected()) < bound


@pytest.mark.parametrize("scheme", ["mxfp4_fp8", "int4_group32_fp8", "int4_group128_zero_fp8"])
def test_four_bit_weights_with_activations_in_e4m3(scheme):
    """Like the weights alone but for the rounding of the activations."""
    layer = Layer(hidden=256, intermediate=128, seed=2)
    w13, w2, output = quantized_runner(layer, scheme)
    expected = reference.experts(layer.hidden, layer.ids, layer.weights, widened(w13, scheme), widened(w2, scheme))
    assert 1e-4 < distance(output, expected) < 0.1


@pytest.mark.parametrize("cols", [128, 48])  # 48: bytes between an expert's scales and its global one
def test_scales_of_nvfp4(cols):
    random = np.random.default_rng(5)
    scales = random.integers(1, 120, (3, 5, cols // 16), np.uint8)
    together = moe.nvfp4_scales(scales, np.array([0.5, 2.0, -3.0], np.float32))
    assert together.dtype == np.uint8 and together.shape == (3, (5 * cols // 16 + 3) // 4 * 4 + 4)
    assert (together[:, : 5 * cols // 16] == scales.reshape(3, -1)).all() and not together[:, 5 * cols // 16 : -4].any()
    assert (together[:, -4:].copy().view(np.float32)[:, 0] == [0.5, 2.0, -3.0]).all()


def test_scales_of_nvfp4_make_the_layer_of_quantize():
    layer = Layer(hidden=256, intermediate=128, seed=2)
    w13, w2, expected = quantized_runner(layer, "nvfp4_w4a16")
    again = []
    for codes, scales in (w13, w2):
        rows = scales.reshape(len(scales), -1)
        apart = rows[:, :-4].reshape(*codes.shape[:-1], -1), rows[:, -4:].copy().view(np.float32)[:, 0]
        again.append(moe.nvfp4_scales(*apart))
    runner = moe.Runner(w13.codes, w2.codes, w13_scale=again[0], w2_scale=again[1], quantization="nvfp4_w4a16", dtype="float32",
                        topk=layer.topk, max_tokens=16)  # fmt: skip
    assert np.array_equal(runner.forward_routed(layer.hidden, layer.ids, layer.weights), expected)


def test_quantize_mxfp4_gives_the_nearest_codes():
    values = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0] * 4, np.float32)[None] * 4
    codes, scales = moe.quantize(values, "mxfp4_w4a16")
    assert codes.shape == (1, 16) and scales.shape == (1, 1)
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    widened = np.stack([table[codes[0] & 7], table[codes[0] >> 4 & 7]], 1).ravel() * 2.0 ** (int(scales[0, 0]) - 127)
    assert (widened == values[0]).all()


def test_plan():
    load = np.array([[90, 10, 5, 5, 40, 2, 2, 2]], np.float32)
    physical, logical, count = moe.plan(load, 12, num_ranks=4)
    assert physical.shape == (1, 12) and count.sum() == 12 and count.argmax() == 0
    for expert in range(8):
        slots = logical[0, expert][logical[0, expert] >= 0]
        assert len(slots) == count[0, expert] and (physical[0, slots] == expert).all()


# ---- bad input: one exception that says what, the value and what was expected


def runner_of(layer, **settings):
    return moe.Runner(layer.w13, layer.w2, **{"topk": layer.topk, "max_tokens": 16, **settings})


def test_errors_are_exceptions_with_the_text_of_the_library():
    layer = Layer()
    runner = runner_of(layer)
    with pytest.raises(moe.ArgumentError, match="hidden.*63") as caught:
        runner.forward_routed(np.zeros((4, 63), np.float32), layer.ids[:4], layer.weights[:4])
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, moe.Error) and caught.value.code == "E_ARG"
    assert str(caught.value).startswith("E_ARG: ")
    with pytest.raises(moe.ArgumentError, match="float16"):
        runner.forward_routed(layer.hidden.astype(np.float16), layer.ids, layer.weights)
    with pytest.raises(ValueError, match="topk_ids.*6"):
        bad = layer.ids.copy()
        bad[2, 1] = 6
        runner.forward_routed(layer.hidden, bad, layer.weights)
    with pytest.raises(ValueError, match="topk_weights"):
        runner.forward_routed(layer.hidden, layer.ids, layer.weights[:5])
    with pytest.raises(ValueError, match="output"):
        runner.forward_routed(layer.hidden, layer.ids, layer.weights, np.zeros((3, 64), np.float32))


def test_errors_of_the_configuration():
    layer = Layer()
    with pytest.raises(ValueError, match="relu7.*silu"):
        runner_of(layer, activation="relu7")
    with pytest.raises(ValueError, match="scales given"):
        runner_of(layer, w13_scale=layer.w13)
    with pytest.raises(moe.Error, match="nothing"):
        runner_of(layer, quantization="nothing")
    with pytest.raises(ValueError, match="3"):
        moe.Runner(layer.w13[0], layer.w2, topk=2, max_tokens=4)
    with pytest.raises(ValueError, match="w2|intermediate"):
        moe.Runner(layer.w13, layer.w2[:, :, :7], topk=2, max_tokens=4)
    with pytest.raises(moe.Error):
        runner_of(layer, topk=0)
    with pytest.raises(moe.ConfigError, match="colour"):
        runner_of(layer, router={"colour": 3})
    with pytest.raises(moe.ArgumentError, match="str"):
        moe.experts("hidden", layer.ids, layer.weights, layer.w13, layer.w2)
    with pytest.raises(ValueError):
        moe.route(np.zeros((2, 4), np.float32), 5)
    with pytest.raises(moe.ConfigError, match="fp5"):
        moe.quantize(np.zeros((4, 4), np.float32), "fp5")


def test_a_closed_runner_and_a_closed_group():
    layer = Layer()
    group = moe.Group()
    assert (group.rank, group.size) == (0, 1)
    runner = runner_of(layer, group=group)
    group.close()
    assert distance(runner.forward_routed(layer.hidden, layer.ids, layer.weights), layer.expected()) < 1e-5
    handle = runner._handle
    runner.close()
    runner.close()
    for closed in (0, handle):
        runner._handle = closed
        with pytest.raises(moe.Error):
            runner.forward_routed(layer.hidden, layer.ids, layer.weights)
    runner._handle = 0
    with pytest.raises(moe.Error):
        group.rank


def test_a_workspace_of_another_runner():
    """On the host it is accepted and nothing is shared."""
    layer = Layer()
    first = runner_of(layer)
    second = runner_of(layer, workspace_of=first)
    expected = layer.expected()
    for runner in (first, second, first):
        assert distance(runner.forward_routed(layer.hidden, layer.ids, layer.weights), expected) < 1e-5
    first.close()
    assert distance(second.forward_routed(layer.hidden, layer.ids, layer.weights), expected) < 1e-5
    with pytest.raises(moe.StateError, match="workspace_of.*closed"):
        runner_of(layer, workspace_of=first)


def test_exceptions_are_what_they_say():
    assert issubclass(moe.TimeoutError, builtins.TimeoutError) and issubclass(moe.OutOfMemoryError, MemoryError)
    for error in (moe.ConfigError, moe.ArgumentError, moe.CapacityError):
        assert issubclass(error, ValueError)
    assert issubclass(moe.StateError, RuntimeError)


def test_two_runners_in_two_threads():
    layer = Layer(rows=64)
    expected = layer.expected()
    worst = []

    def work():
        runner = runner_of(layer, max_tokens=64, num_threads=1)
        for _ in range(20):
            worst.append(distance(runner.forward_routed(layer.hidden, layer.ids, layer.weights), expected))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(worst) == 40 and max(worst) < 1e-5


def test_bfloat16_of_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    layer = Layer()
    rounded = {name: getattr(layer, name).astype(ml_dtypes.bfloat16) for name in ("hidden", "w13", "w2")}
    output = moe.experts(rounded["hidden"], layer.ids, layer.weights, rounded["w13"], rounded["w2"])
    assert output.dtype == ml_dtypes.bfloat16
    for name, array in rounded.items():
        setattr(layer, name, array.astype(np.float32))
    assert distance(output.astype(np.float32), layer.expected()) < 1e-2
