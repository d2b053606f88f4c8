# SPDX-License-Identifier: Apache-2.0
# tests/python/test_second_call.py: moe.experts keeps what it found out in the last call with some weights. The next one, with another
# input, other settings or moved weights, answers as a first one does; a bad one is refused. numpy's and torch's arrays on the host.
import importlib.util

import numpy as np
import pytest
import reference
from reference import Layer, distance

import moe

if not moe.has("onednn"):
    pytest.skip("libmoe was built without oneDNN, so that no experts run on the host", allow_module_level=True)

NO_TORCH = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


@pytest.fixture(params=["numpy", pytest.param("torch", marks=NO_TORCH)])
def of(request):
    """An array of numpy as one of the framework, in the same memory."""
    if request.param == "numpy":
        return lambda array: array
    import torch

    return torch.from_numpy


class Warm:
    """A layer with whose weights a call was made."""

    def __init__(self, of, **sizes) -> None:
        self.of, self.layer = of, Layer(**sizes)
        self.hidden, self.ids, self.weights, self.w13, self.w2 = map(
            of, (self.layer.hidden, self.layer.ids, self.layer.weights, self.layer.w13, self.layer.w2)
        )
        assert distance(self.call(), self.layer.expected()) < 1e-5

    def call(self, **other):
        """With other arguments than those of the first call."""
        arguments = {"hidden": self.hidden, "topk_ids": self.ids, "topk_weights": self.weights, "w13": self.w13, "w2": self.w2}
        return np.asarray(moe.experts(**{**arguments, **other}))


@pytest.mark.parametrize(("rows", "topk"), [(13, 3), (13, 2), (1, 3), (0, 3), (0, 2), (200, 3)])
def test_other_sizes(of, rows, topk):
    warm = Warm(of)
    other = Layer(rows=rows, topk=topk, seed=1)
    got = warm.call(hidden=of(other.hidden), topk_ids=of(other.ids), topk_weights=of(other.weights))
    assert got.shape == other.hidden.shape
    if rows > 0:
        other.w13, other.w2 = warm.layer.w13, warm.layer.w2
        assert distance(got, other.expected()) < 1e-5


def test_inputs_that_need_a_conversion(of):
    warm = Warm(of)
    expected = warm.layer.expected()
    assert distance(warm.call(topk_ids=of(warm.layer.ids.astype(np.int64))), expected) < 1e-5
    assert distance(warm.call(topk_ids=of(warm.layer.ids.astype(np.int8))), expected) < 1e-5
    assert distance(warm.call(topk_weights=of(warm.layer.weights.astype(np.float64))), expected) < 1e-5
    wide = np.zeros((13, 80), np.float32)
    wide[:, :64] = warm.layer.hidden
    assert distance(warm.call(hidden=of(wide)[:, :64]), expected) < 1e-5
    half = warm.call(hidden=of(warm.layer.hidden.astype(np.float16)), w13=of(warm.layer.w13.astype(np.float16)),
                     w2=of(warm.layer.w2.astype(np.float16)))  # fmt: skip
    assert half.dtype == np.float16 and distance(half, expected) < 1e-2


def test_read_only_inputs_of_numpy():
    warm = Warm(lambda array: array)
    for name in ("hidden", "ids", "weights", "w13", "w2"):
        getattr(warm, name).flags.writeable = False
        assert distance(warm.call(), warm.layer.expected()) < 1e-5, name


def test_other_weights_and_settings(of):
    warm = Warm(of, intermediate=32)  # 2I = H: a bias of either product has the other's shape
    layer = warm.layer
    bias, other = np.random.default_rng(2).standard_normal((2, 6, 64)).astype(np.float32)
    given, given_other = of(bias), of(other)
    for _ in range(2):
        assert distance(warm.call(w13_bias=given, w2_bias=given_other), layer.expected(w13_bias=bias, w2_bias=other)) < 1e-5
        assert distance(warm.call(w13_bias=given_other, w2_bias=given), layer.expected(w13_bias=other, w2_bias=bias)) < 1e-5
        assert distance(warm.call(), layer.expected()) < 1e-5
        assert distance(warm.call(w2=of(layer.w2 * -2)), -2 * layer.expected()) < 1e-5
        clamped = layer.expected(activation=lambda gate, up: reference.silu(np.minimum(gate, 0.5), np.clip(up, -0.5, 0.5)))
        assert distance(warm.call(activation="silu_clamped", limit=0.5), clamped) < 1e-5
    bias *= -3  # in place
    assert distance(warm.call(w13_bias=given_other, w2_bias=given), layer.expected(w13_bias=other, w2_bias=bias)) < 1e-5
    with pytest.raises(moe.ArgumentError, match="w2_bias: is None"):
        warm.call(w13_bias=given_other)


def test_weights_of_numpy_that_have_moved():
    """An array takes other memory by __setstate__ only: resize() is refused while something watches it, as the cache does."""
    warm = Warm(lambda array: array)
    for array in (warm.w13, warm.w2):
        before, other = array.ctypes.data, array * -2
        array.__setstate__(other.__reduce__()[2])
        assert before != array.ctypes.data
        assert distance(warm.call(), warm.layer.expected()) < 1e-5
        with pytest.raises(ValueError, match="resize"):
            array.resize((600, *array.shape[1:]), refcheck=False)


BAD = {
    "hidden of one dimension": lambda w: {"hidden": w.hidden.reshape(-1)},
    "hidden of three dimensions": lambda w: {"hidden": w.hidden[None]},
    "hidden of another width": lambda w: {"hidden": w.hidden[:, :32]},
    "hidden of half the width and twice the rows": lambda w: {"hidden": w.hidden.reshape(26, 32)},
    "ids of one dimension": lambda w: {"topk_ids": w.ids.reshape(-1)},
    "ids for other rows": lambda w: {"topk_ids": w.ids[:5]},
    "ids the other way round": lambda w: {"topk_ids": w.of(w.layer.ids.T.copy())},
    "ids in float32": lambda w: {"topk_ids": w.of(w.layer.ids.astype(np.float32))},
    "an id that is none": lambda w: {"topk_ids": w.of(np.full_like(w.layer.ids, 6))},
    "weights for other rows": lambda w: {"topk_weights": w.weights[:5]},
    "an output of other rows": lambda w: {"output": w.of(np.zeros((5, 64), np.float32))},
    "an output in float16": lambda w: {"output": w.of(np.zeros((13, 64), np.float16))},
    "the input as output": lambda w: {"output": w.hidden},
    "no array": lambda w: {"hidden": [1.0, 2.0]},
    "no weights": lambda w: {"w2": 3},
}


@pytest.mark.parametrize("what", BAD)
def test_bad_calls(of, what):
    """They are refused as in a first call, with arrays that no call has seen."""
    warm = Warm(of)
    with pytest.raises((moe.ArgumentError, moe.ConfigError)):
        warm.call(**BAD[what](warm))
    moe.clear_cache()
    with pytest.raises((moe.ArgumentError, moe.ConfigError)):
        warm.call(**BAD[what](warm))
    assert distance(warm.call(), warm.layer.expected()) < 1e-5


def test_an_output_of_numpy_that_is_read_only():
    warm = Warm(lambda array: array)
    output = np.zeros_like(warm.hidden)
    output.flags.writeable = False
    with pytest.raises(moe.ArgumentError, match="output: is read-only"):
        warm.call(output=output)
    assert not output.any()
