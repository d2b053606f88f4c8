# SPDX-License-Identifier: Apache-2.0
# tests/python/test_torch_watches.py: calls that something of torch watches or changes (torch.jit.trace, make_fx, fake tensors, torch.func,
# forward-mode AD), tensors without plain memory, outputs that autograd needs, and several threads. On the host.
import threading

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import moe  # noqa: E402
from reference import Layer, distance  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

if not moe.has("onednn"):
    pytest.skip("libmoe was built without oneDNN, so that no experts run on the host", allow_module_level=True)


class Calls:
    """A layer by `moe.experts` or by a runner, as a function of hidden, ids and weights."""

    def __init__(self, how):
        layer = Layer()
        self.hidden, self.w13, self.w2 = (torch.from_numpy(a) for a in (layer.hidden, layer.w13, layer.w2))
        self.ids, self.weights = torch.from_numpy(layer.ids).long(), torch.from_numpy(layer.weights)
        self.runner = moe.Runner(self.w13, self.w2, topk=3, max_tokens=16)
        self.expected = torch.from_numpy(layer.expected())
        self.how = how
        self.check(self(self.hidden))  # the next call has its runner at hand

    def __call__(self, hidden=None, ids=None, weights=None, output=None):
        hidden = self.hidden if hidden is None else hidden
        ids, weights = self.ids if ids is None else ids, self.weights if weights is None else weights
        if self.how == "runner":
            return self.runner.forward_routed(hidden, ids, weights, output)
        return moe.experts(hidden, ids, weights, self.w13, self.w2, output=output)

    def check(self, got, expected=None):
        assert distance(got.detach().numpy(), (self.expected if expected is None else expected).numpy()) < 1e-5


@pytest.fixture(params=["experts", "runner"])
def call(request):
    return Calls(request.param)


def test_a_trace_has_the_operator(call):
    """A graph without it would return memory that nothing has written."""
    traced = torch.jit.trace(lambda x: call(x), (torch.ones_like(call.hidden),))
    assert "moe::" in str(traced.graph)
    call.check(traced(call.hidden))
    graph = make_fx(call)(torch.ones_like(call.hidden))
    assert any("moe" in str(node.target) for node in graph.graph.nodes)
    call.check(graph(call.hidden))


def test_fake_tensors(call):
    with FakeTensorMode() as mode:
        hidden, ids, weights, w13, w2 = (mode.from_tensor(t) for t in (call.hidden, call.ids, call.weights, call.w13, call.w2))
        got = moe.experts(hidden, ids, weights, w13, w2) if call.how == "experts" else call(hidden, ids, weights)
        assert got.shape == hidden.shape and got.dtype == hidden.dtype


def test_vmap_runs_one_call_for_each(call):
    call.w13.requires_grad_()  # a parameter among the weights is no obstacle
    inputs = torch.stack([call.hidden, 2 * call.hidden])
    got = torch.func.vmap(call)(inputs)
    call.check(got[0])
    call.check(got[1], call(2 * call.hidden))


def test_derivatives_are_refused(call):
    with pytest.raises(moe.UnsupportedError, match="hidden requires a gradient"):
        torch.func.grad(lambda x: call(x).sum())(call.hidden)
    with pytest.raises(moe.UnsupportedError, match="hidden has a tangent"):
        torch.func.jvp(call, (call.hidden,), (call.hidden,))
    with forward_ad.dual_level():
        with pytest.raises(moe.UnsupportedError, match="hidden has a tangent"):
            call(forward_ad.make_dual(call.hidden, call.hidden))
        with pytest.raises(moe.UnsupportedError, match="topk_weights has a tangent"):
            call(weights=forward_ad.make_dual(call.weights, call.weights))
        call.check(call())


@pytest.mark.parametrize("function", ["route", "quantize", "plan", "forward"])
def test_functions_that_are_no_operators_refuse_what_torch_traces(function):
    """A graph would have memory in it that nothing has written."""
    layer = Layer()
    w13, w2, hidden = (torch.from_numpy(a) for a in (layer.w13, layer.w2, layer.hidden))
    runner = moe.Runner(w13, w2, topk=3, max_tokens=16, router={"scoring": "softmax"})
    call, given = {
        "route": (lambda x: moe.route(x, 2).topk_weights, torch.rand(4, 6)),
        "quantize": (lambda x: moe.quantize(x, "mxfp4_w4a16").codes, torch.rand(64, 64)),
        "plan": (lambda x: moe.plan(x, 8).replica_count, torch.rand(2, 6)),
        "forward": (lambda x: runner.forward(hidden, x), torch.rand(13, 6)),
    }[function]  # fmt: skip
    expected, traces = call(given), "traced or transformed by torch"
    for run in (lambda: torch.jit.trace(lambda x: call(x), (given,)), lambda: make_fx(call)(given),
                lambda: torch.func.vmap(call)(given[None]), lambda: torch.func.jvp(call, (given,), (given,))):  # fmt: skip
        with pytest.raises(moe.UnsupportedError, match=traces):
            run()
    with forward_ad.dual_level():
        with pytest.raises(moe.UnsupportedError, match=traces):
            call(forward_ad.make_dual(given, given))
        assert torch.equal(call(given), expected)
    with FlopCounterMode(display=False):  # a mode that only looks
        assert torch.equal(call(given), expected)


def test_a_compiled_call_writes_to_its_output(call):
    output = torch.zeros_like(call.hidden)
    with torch.no_grad():
        got = torch.compile(lambda x, y: call(x, output=y), backend="eager")(call.hidden, output)
    call.check(output)
    call.check(got)


def test_views_with_the_opposite_sign(call):
    """Their memory has other numbers than they, and DLPack does not say so."""
    negative = torch._neg_view
    call.check(call(negative(-call.hidden)))
    call.check(call(weights=negative(-call.weights)))
    with pytest.raises(moe.ArgumentError, match="output: is a view with the opposite sign"):
        call(output=negative(torch.empty_like(call.hidden)))
    with pytest.raises(moe.ArgumentError, match="w13: is a view with the opposite sign"):
        moe.Runner(negative(-call.w13), call.w2, topk=3, max_tokens=16)


@pytest.mark.parametrize(("change", "text"), [
    (lambda t: t.to("meta"), "is on meta"), (lambda t: t.to_sparse(), "is of layout sparse_coo"),
    (lambda t: t.to_mkldnn(), "is of layout _mkldnn"),
])  # fmt: skip
def test_tensors_without_plain_memory(call, change, text):
    with pytest.raises(moe.ArgumentError, match=f"hidden: {text}"):
        call(change(call.hidden))
    with pytest.raises(moe.ArgumentError, match=f"topk_weights: {text}"):
        call(weights=change(call.weights))
    with pytest.raises(moe.ArgumentError, match=f"w2: {text}"):
        moe.Runner(call.w13, change(call.w2), topk=3, max_tokens=16)


def test_complex_router_weights_are_refused(call):
    with pytest.raises(moe.ArgumentError, match="topk_weights: dtype is complex64, expected real numbers"):
        call(weights=call.weights.to(torch.complex64))


def test_autograd_learns_that_an_output_was_written(call):
    """A backward pass that needs what the output held before is refused."""
    output, factor = torch.ones_like(call.hidden), torch.ones_like(call.hidden, requires_grad=True)
    product = (factor * output).sum()
    call(output=output)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    with pytest.raises(moe.UnsupportedError, match="output requires a gradient"):
        call(output=torch.empty_like(call.hidden, requires_grad=True))
    with torch.inference_mode():
        call.check(call(output=torch.empty_like(call.hidden)))


def in_threads(work, count=4, calls=300):
    errors = []

    def run():
        try:
            for _ in range(calls):
                work()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


@pytest.mark.parametrize("of", ["torch", "numpy"])
def test_threads_take_turns_in_a_runner_that_they_do_not_see(of):
    call = Calls("experts")
    given = (call.hidden, call.ids, call.weights, call.w13, call.w2)
    given = given if of == "torch" else tuple(t.numpy() for t in given)
    wrong = []

    def work():
        got = moe.experts(*given)
        if distance(got, call.expected.numpy()) >= 1e-5:
            wrong.append(got)

    assert in_threads(work) == [] and wrong == []
