# SPDX-License-Identifier: Apache-2.0
# tests/python/test_transformers_calls.py: calls of an experts module under "moe" as a model makes them seldom: inputs that are not
# contiguous, what falls back to the class's own loop since grouped_mm refuses it, tracing, torch.func, threads. On the host.
import threading
import warnings

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import moe  # noqa: E402

if not moe.has("onednn"):
    pytest.skip("libmoe was built without oneDNN, so that no experts run on the host", allow_module_level=True)

import families  # noqa: E402
import moe.transformers as adapter  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from transformers.integrations import finegrained_fp8, moe as integration  # noqa: E402

transformers.logging.set_verbosity_error()


def distance(got, expected):
    return float((got.detach().double() - expected.detach().double()).abs().max() / expected.detach().double().abs().max())


class Pair:
    """An experts module of a tiny model, under "moe" and under transformers' eager code."""

    def __init__(self, **fields):
        self.model = families.build("qwen3_moe", **fields)
        self.module = families.experts(self.model)[0]
        torch.manual_seed(3)
        count = self.module.num_experts
        self.hidden = torch.randn(10, self.module.down_proj.shape[1])
        self.ids, self.weights = torch.stack([torch.randperm(count)[:2] for _ in range(10)]), torch.rand(10, 2)

    def under(self, name):
        self.model.set_experts_implementation(name)
        return self.module

    def freeze(self):
        for parameter in self.module.parameters():
            parameter.requires_grad_(False)
        return self


def strided(tensor):
    """The same numbers, the elements of a column beside each other."""
    return tensor.t().contiguous().t()


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("change", [strided, lambda t: t[:1].expand_as(t), lambda t: torch.cat([t, t], 1)[:, : t.shape[1]],
                                    lambda t: t if t.dtype == torch.int64 else torch._neg_view(-t)])  # fmt: skip
def test_inputs_that_are_not_contiguous(change, which):
    pair = Pair()
    given = [pair.hidden, pair.ids, pair.weights]
    given[which] = change(given[which])
    with torch.no_grad():
        expected = pair.under("eager")(*given)
        assert distance(pair.under("moe")(*given), expected) < 2e-6
    assert adapter.why_not(pair.module) is None


def fallback_of(text):
    adapter._layer._warned.clear()
    return pytest.warns(adapter.FallbackWarning, match=text)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float32])
def test_what_grouped_mm_refuses_falls_back_to_the_loop_of_the_class(dtype):
    """float64, and rows of 18 and 10 elements, which are no multiple of 16 bytes."""
    pair = Pair(hidden_size=18, moe_intermediate_size=10)
    pair.module.to(dtype)
    given = pair.hidden.to(dtype), pair.ids, pair.weights.to(dtype)
    gradients = []
    with pytest.raises(RuntimeError):
        pair.under("grouped_mm")(*given)
    for name in ("eager", "moe"):
        pair.module.zero_grad()
        if name == "moe":
            with fallback_of("float64" if dtype == torch.float64 else "gradients are on"):
                output = pair.under(name)(*given)
        else:
            expected = output = pair.under(name)(*given)
        output.square().sum().backward()
        gradients.append(pair.module.down_proj.grad)
    assert torch.equal(output, expected) and torch.equal(*gradients)
    if dtype != torch.float64:  # the library itself takes these sizes
        with torch.no_grad():
            assert distance(pair.module(*given), expected) < (2e-6 if dtype == torch.float32 else 2e-2)
        assert adapter.why_not(pair.module) is None


def test_a_model_in_float64_runs():
    model = families.build("gpt_oss").double()
    model.set_experts_implementation("eager")
    expected = families.logits(model)
    model.set_experts_implementation("moe")
    with fallback_of("float64"):
        assert torch.equal(families.logits(model), expected)


class Fp8Config:
    hidden_size, num_experts, moe_intermediate_size, hidden_act = 256, 4, 128, "silu"
    _experts_implementation = "moe"


def test_fp8_with_static_scales_falls_back_to_the_loop_of_the_class():
    """transformers' grouped_mm refuses them. The product itself needs kernels for a GPU: here it is one that counts."""
    products = []

    class Fp8Static(finegrained_fp8.FP8Experts):
        def linear(self, rows, weight, scale, activation_scale=None):
            products.append(activation_scale is not None)
            return rows.new_zeros(rows.shape[0], weight.shape[0])

    cls = integration.use_experts_implementation(Fp8Static, experts_interface=finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS)
    module = cls(Fp8Config(), block_size=(128, 128), activation_scheme="static")
    given = torch.randn(3, 256), torch.tensor([[0, 1]] * 3), torch.rand(3, 2)
    with torch.no_grad(), fallback_of("activation_scheme"):
        assert not module(*given).any()
    assert products == [True] * 4


@pytest.mark.parametrize("first", [True, False])
def test_a_trace_has_the_operator(first):
    """Also of a module that has not run before. A graph without it would return memory that nothing has written."""
    pair = Pair()
    given, other = (pair.hidden, pair.ids, pair.weights), (pair.hidden + 1, pair.ids.flip(0).contiguous(), pair.weights * 2)
    with torch.no_grad():
        expected = pair.under("eager")(*given)
        module = pair.under("moe")
        if not first:
            module(*given)
        traced = torch.jit.trace(module, other)
        assert "moe::transformers_experts" in str(traced.inlined_graph)
        assert distance(traced(*given), expected) < 2e-6
    if first:
        pair = Pair()
        module = pair.under("moe")
    with torch.no_grad():
        graph = make_fx(lambda *inputs: module(*inputs))(*other)
        assert distance(graph(*given), expected) < 2e-6


@pytest.mark.parametrize("first", [True, False])
def test_vmap(first):
    pair = Pair().freeze()
    inputs = torch.stack([pair.hidden, pair.hidden + 1])
    expected = [pair.under("eager")(x, pair.ids, pair.weights) for x in inputs]
    module = pair.under("moe")
    if not first:
        module(pair.hidden, pair.ids, pair.weights)
    got = torch.func.vmap(lambda x: module(x, pair.ids, pair.weights))(inputs)
    assert all(distance(a, b) < 2e-6 for a, b in zip(got, expected)) and adapter.why_not(module) is None


@pytest.mark.parametrize("first", [True, False])
def test_derivatives_fall_back(first):
    """Those of torch.func and forward-mode AD too, which no tensor's requires_grad shows."""
    pair = Pair().freeze()

    def run(x):
        return pair.module(x, pair.ids, pair.weights)

    pair.under("eager")
    tangent = torch.func.jvp(run, (pair.hidden,), (pair.hidden,))[1]
    gradient = torch.func.grad(lambda x: run(x).sum())(pair.hidden)
    pair.under("moe")
    if not first:
        run(pair.hidden)
    with fallback_of("gradients are on"):
        assert distance(torch.func.jvp(run, (pair.hidden,), (pair.hidden,))[1], tangent) < 2e-6
    assert distance(torch.func.grad(lambda x: run(x).sum())(pair.hidden), gradient) < 2e-6
    with forward_ad.dual_level():
        assert distance(forward_ad.unpack_dual(run(forward_ad.make_dual(pair.hidden, pair.hidden))).tangent, tangent) < 2e-6


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_threads_of_one_model(name, monkeypatch):
    """Their first forwards at once: the weights are read and laid out by one of them, and no runner is made twice."""
    model = families.build(name)
    model.set_experts_implementation("eager")
    expected = families.logits(model)
    model.set_experts_implementation("moe")
    reads, original = [], adapter._layer.read_experts

    def slow(module):
        reads.append(module)
        threading.Event().wait(0.05)
        return original(module)

    monkeypatch.setattr(adapter._layer, "read_experts", slow)
    begin, found = threading.Barrier(4), []

    def run():
        begin.wait()
        try:
            found.extend(distance(families.logits(model), expected) for _ in range(20))
        except Exception as error:
            found.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", adapter.FallbackWarning)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 80 and all(isinstance(one, float) and one < 2e-5 for one in found), found
    modules = families.experts(model)
    assert len(reads) == len(modules) and all(len(made) == 1 for m in modules for made in m._moe_layer.runners.values())


def test_why_not_of_what_is_no_experts_module():
    pair = Pair().freeze()
    assert adapter.why_not(pair.module) == "it has not run yet"
    pair.under("moe")(pair.hidden, pair.ids, pair.weights)
    assert adapter.why_not(pair.module) is None
    assert adapter.why_not(pair.model.model.layers[0].mlp) == "it is no experts module, but experts inside it is one"
    with pytest.raises(moe.ArgumentError, match="^E_ARG: module: is of type list, expected a torch.nn.Module$"):
        adapter.why_not([pair.module])


@pytest.mark.parametrize("setting, text", [({"max_rows": 0}, "max_rows: is 0, expected at least 1"),
                                           ({"max_rows": "x"}, "max_rows: is 'x' of type str, expected a whole number"),
                                           ({"keep_codes": "no"}, "keep_codes: is 'no' of type str, expected True or False")])  # fmt: skip
def test_wrong_settings_are_refused(setting, text):
    before = adapter._layer.MAX_ROWS, adapter._layer.KEEP_CODES
    with pytest.raises(moe.ArgumentError, match=f"^E_ARG: {text}$"):
        adapter.configure(**setting)
    assert before == (adapter._layer.MAX_ROWS, adapter._layer.KEEP_CODES)
