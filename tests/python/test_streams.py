# SPDX-License-Identifier: Apache-2.0
# tests/python/test_streams.py: which stream wait() and close() wait for. There is no GPU here: a runner on the host takes itself for one on
# a device, arrays of a stand-in for CuPy carry a stream, and a library that passes on what it gets writes down the streams.
import contextlib
import sys
import types

import numpy as np
import pytest
from reference import Layer, distance

import moe
from moe import _arrays, _ffi, _runner
from moe._ffi import library as extension

if not moe.has("onednn"):
    pytest.skip("libmoe was built without oneDNN, so that no experts run on the host", allow_module_level=True)


class Stream:
    def __init__(self, pointer):
        self.ptr = pointer


class CupyArray:
    """An array on a device, as far as the package sees: host memory by DLPack, made ready on the stream that the consumer names."""

    device = contextlib.nullcontext()
    asked: list = []

    def __init__(self, values):
        self.values, self.shape, self.dtype, self.ndim = values, values.shape, values.dtype, values.ndim

    def astype(self, dtype):
        return CupyArray(self.values.astype(dtype))

    def __getitem__(self, rows):
        return CupyArray(self.values[rows])

    def __dlpack__(self, *, stream=None, **options):
        CupyArray.asked.append(stream)
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.values.__dlpack_device__()


CupyArray.__module__ = "cupy"


class Seen:
    """The extension, which also writes down the streams that are waited for."""

    def __init__(self):
        self.waited, self.packed, self.fails = [], [], False

    def __getattr__(self, name):
        return getattr(extension, name)

    def runner_wait(self, handle, stream):
        self.waited.append(("runner", stream))

    def stream_wait(self, device, stream, timeout):
        if self.fails:
            raise moe.TimeoutError("E_TIMEOUT: stream: not finished")
        self.waited.append(("stream", stream))

    def runner_weights_changed(self, handle, stream):
        self.packed.append(stream)


@pytest.fixture
def on_device(monkeypatch):
    """current(pointer): makes a stream CuPy's current one. seen: what was waited for."""
    cupy = types.ModuleType("cupy")
    cupy.current = Stream(0)
    cupy.cuda = types.SimpleNamespace(get_current_stream=lambda: cupy.current)
    cupy.empty = lambda shape, dtype: CupyArray(np.empty(shape, dtype))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    seen = Seen()
    monkeypatch.setattr(_runner, "_library", seen)
    monkeypatch.setattr(_runner, "torch", None)
    # On the host the extension drops the stream.
    monkeypatch.setattr(_runner, "_forward_routed", lambda *call: extension.forward_routed(*call) or call[-1])
    monkeypatch.setattr(_runner._ffi, "forward", lambda *call: extension.forward(*call) or call[-1])

    made = []

    def current(pointer):
        cupy.current = Stream(pointer)
        return cupy.current

    def runner_of(layer, **settings):
        runner = moe.Runner(CupyArray(layer.w13), CupyArray(layer.w2), topk=3, max_tokens=16, **settings)
        runner._cuda = True
        made.append(runner)
        return runner

    yield types.SimpleNamespace(current=current, seen=seen, runner_of=runner_of)
    for runner in made:
        runner._cuda = False
        runner.close()


def call(runner, layer, array=CupyArray):
    return runner.forward_routed(array(layer.hidden), array(layer.ids), array(layer.weights))


def test_wait_is_for_the_stream_of_the_last_call(on_device):
    layer = Layer()
    runner = on_device.runner_of(layer)
    on_device.current(11)
    output = call(runner, layer)
    assert isinstance(output, CupyArray) and distance(output.values, layer.expected()) < 1e-5
    stream = on_device.current(22)
    call(runner, layer)
    on_device.current(33)  # another one has become current since
    runner.wait()
    assert on_device.seen.waited == [("runner", 22)]
    assert runner._stream_owner is stream  # CuPy destroys a stream that nothing refers to
    runner.wait(44)
    assert on_device.seen.waited[1:] == [("runner", 44)]
    assert set(CupyArray.asked) == {None}  # ready on the default stream, by DLPack's rule; CuPy orders its current one after it


@pytest.mark.parametrize("rows", [13, 40])
def test_close_is_for_the_stream_of_the_last_call(on_device, rows):
    layer = Layer(rows=rows)  # in pieces
    runner = on_device.runner_of(layer)
    on_device.current(11)
    call(runner, layer)
    on_device.current(0)
    runner.close()
    assert on_device.seen.waited == [("stream", 11)] and runner._stream_owner is None
    runner.close()
    assert len(on_device.seen.waited) == 1


def test_a_runner_with_a_router(on_device):
    layer = Layer()
    with on_device.runner_of(layer, router={}) as runner:
        on_device.current(55)
        runner.forward(CupyArray(layer.hidden), CupyArray(np.zeros((13, 6), np.float32)))
    assert on_device.seen.waited == [("stream", 55)]


def test_a_runner_that_is_busy_stays_open(on_device):
    layer = Layer()
    runner = on_device.runner_of(layer)
    call(runner, layer)
    on_device.seen.fails = True
    with pytest.raises(moe.TimeoutError):
        runner.close()
    on_device.seen.fails = False
    runner.close()
    assert repr(runner) == "moe.Runner(closed)"


def test_weights_are_packed_on_the_current_stream_of_their_framework(on_device):
    runner = on_device.runner_of(Layer())
    on_device.current(66)
    runner.weights_changed()
    assert on_device.seen.packed == [66]
    runner.wait()
    assert on_device.seen.waited == [("runner", 66)]


def test_jax_runs_on_the_default_stream(on_device):
    jax = pytest.importorskip("jax", reason="jax is not installed")
    layer = Layer()
    runner = on_device.runner_of(layer)
    on_device.current(77)
    call(runner, layer)
    call(runner, layer, jax.numpy.asarray)
    runner.wait()
    assert [stream for _, stream in on_device.seen.waited] == [0, 0]  # the call itself has waited, too
    assert _arrays.stream("jax") == _arrays.stream("dlpack") == (0, None)


def test_graphs_replay_on_the_current_stream_of_torch(on_device, monkeypatch):
    stream = types.SimpleNamespace(cuda_stream=88)
    torch = types.SimpleNamespace(is_grad_enabled=lambda: False, Tensor=(), cuda=types.SimpleNamespace(
        is_initialized=lambda: True, current_stream=lambda device: stream, synchronize=lambda device: None))  # fmt: skip
    layer = Layer()
    runner = on_device.runner_of(layer)
    monkeypatch.setattr(_runner, "torch", torch)
    on_device.current(11)
    call(runner, layer)
    runner.wait()
    assert on_device.seen.waited == [("runner", 11), ("runner", 88)]
    stream.cuda_stream = 11
    runner.wait()
    assert on_device.seen.waited[2:] == [("runner", 11)]


def test_the_extension_returns_the_stream():
    layer = Layer()
    with moe.Runner(layer.w13, layer.w2, topk=3, max_tokens=16) as runner:
        output = np.empty_like(layer.hidden)
        assert _ffi.forward_routed(runner._handle, layer.hidden, layer.ids, layer.weights, output, -1) == 0
