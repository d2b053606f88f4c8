# SPDX-License-Identifier: Apache-2.0
# tests/python/test_jax.py: the package with JAX arrays.
import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")

import moe  # noqa: E402
from reference import Layer, distance  # noqa: E402

if jax.default_backend() == "cpu" and not moe.has("onednn"):
    pytest.skip("libmoe was built without oneDNN, so that no experts run on the host", allow_module_level=True)
if jax.default_backend() != "cpu" and not moe.has("cuda"):
    pytest.skip("libmoe was built without CUDA", allow_module_level=True)


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 1.5e-2)])
def test_experts(dtype, bound):
    layer = Layer()
    hidden, w13, w2 = (jax.numpy.asarray(a).astype(dtype) for a in (layer.hidden, layer.w13, layer.w2))
    output = moe.experts(hidden, jax.numpy.asarray(layer.ids), jax.numpy.asarray(layer.weights), w13, w2)
    assert isinstance(output, jax.Array) and output.dtype == dtype and output.devices() == hidden.devices()
    layer.hidden, layer.w13, layer.w2 = (np.asarray(a.astype("float32")) for a in (hidden, w13, w2))
    assert distance(np.asarray(output.astype("float32")), layer.expected()) < bound


def test_route_and_a_long_input():
    if jax.default_backend() != "cpu":
        pytest.skip("a host test")
    layer = Layer(rows=21)
    ids, weights = moe.route(jax.numpy.asarray(np.random.default_rng(1).standard_normal((21, 6)).astype(np.float32)), 3)
    assert isinstance(ids, jax.Array) and ids.shape == (21, 3)
    runner = moe.Runner(jax.numpy.asarray(layer.w13), jax.numpy.asarray(layer.w2), topk=3, max_tokens=8)
    output = runner.forward_routed(jax.numpy.asarray(layer.hidden), jax.numpy.asarray(layer.ids), jax.numpy.asarray(layer.weights))
    assert distance(np.asarray(output), layer.expected()) < 1e-5


def test_scales_of_nvfp4():
    scales, last = np.random.default_rng(2).integers(1, 120, (3, 5, 3), np.uint8), np.array([0.5, 2, 3], np.float32)
    given = jax.numpy.asarray(scales)
    for array in (given, given.view(jax.numpy.float8_e4m3fn)):
        got = moe.nvfp4_scales(array, jax.numpy.asarray(last))
        assert isinstance(got, jax.Array) and np.array_equal(np.asarray(got), moe.nvfp4_scales(scales, last))
