# SPDX-License-Identifier: Apache-2.0
# tests/python/test_torch.py: the package with torch tensors: caching, gradients, torch.compile. On the host, or on a
# GPU where libmoe has no experts for the host.
import gc

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import moe  # noqa: E402
from moe import _experts  # noqa: E402
from torch import library as torch_library  # noqa: E402

if not moe.has("onednn") and not (moe.has("cuda") and torch.cuda.is_available()):
    pytest.skip("libmoe was built without oneDNN, so that no experts run on the host", allow_module_level=True)
DEVICE = "cpu" if moe.has("onednn") else "cuda"

from reference import Layer, distance  # noqa: E402


def tensors(layer, dtype=torch.float32):
    hidden, w13, w2 = (torch.from_numpy(a).to(DEVICE, dtype) for a in (layer.hidden, layer.w13, layer.w2))
    return hidden, torch.from_numpy(layer.ids).long().to(DEVICE), torch.from_numpy(layer.weights).to(DEVICE), w13, w2


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 1.5e-2), (torch.float16, 2e-3)])
def test_experts_agrees_with_the_definition(dtype, bound):
    layer = Layer()
    arguments = tensors(layer, dtype)
    layer.hidden, layer.w13, layer.w2 = (arguments[i].float().cpu().numpy() for i in (0, 3, 4))
    output = moe.experts(*arguments)
    assert output.dtype == dtype and output.shape == arguments[0].shape
    assert distance(output.float().cpu().numpy(), layer.expected()) < bound
    into = torch.empty_like(arguments[0])
    assert moe.experts(*arguments, output=into) is into and torch.equal(into, output)


def test_weights_written_in_place_or_moved_are_noticed():
    layer = Layer()
    hidden, ids, weights, w13, w2 = tensors(layer)
    parameter = torch.nn.Parameter(w13)
    with torch.no_grad():
        moe.experts(hidden, ids, weights, parameter, w2)
        parameter.mul_(-0.5)
        layer.w13 = parameter.detach().cpu().numpy().copy()
        assert distance(moe.experts(hidden, ids, weights, parameter, w2).cpu().numpy(), layer.expected()) < 1e-5
        parameter.data = parameter.data * 3
        layer.w13 = parameter.detach().cpu().numpy().copy()
        assert distance(moe.experts(hidden, ids, weights, parameter, w2).cpu().numpy(), layer.expected()) < 1e-5


def test_runners_die_with_their_weights():
    layer = Layer()
    hidden, ids, weights, w13, w2 = tensors(layer)
    from moe import _experts

    before = len(_experts._cache)
    moe.experts(hidden, ids, weights, w13, w2)
    assert len(_experts._cache) == before + 1
    del w13
    gc.collect()
    assert len(_experts._cache) == before


def test_scales_of_nvfp4():
    scales = torch.randint(1, 120, (3, 5, 3), dtype=torch.uint8, device=DEVICE)
    last = torch.tensor([0.5, 2.0, 3.0], device=DEVICE)
    expected = moe.nvfp4_scales(scales.cpu().numpy(), last.cpu().numpy())
    for given in (scales, scales.view(torch.float8_e4m3fn)):
        got = moe.nvfp4_scales(given, last)
        assert got.dtype == torch.uint8 and got.device == scales.device and np.array_equal(got.cpu().numpy(), expected)


@pytest.mark.parametrize("name", ["hidden", "topk_weights"])
def test_inputs_that_need_a_gradient_are_refused(name):
    hidden, ids, weights, w13, w2 = tensors(Layer())
    runner = moe.Runner(w13, w2, topk=3, max_tokens=16)
    expected = moe.experts(hidden, ids, weights, w13, w2)  # the next call has its runner at hand
    (hidden if name == "hidden" else weights).requires_grad_()
    calls = [
        lambda: moe.experts(hidden, ids, weights, w13, w2), lambda: moe.experts(hidden, ids, weights, w13.clone(), w2),
        lambda: runner.forward_routed(hidden, ids, weights), lambda: torch.ops.moe.experts(hidden, ids, weights, w13, w2),
        lambda: torch.ops.moe.forward_routed(hidden, ids, weights, runner.key),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(moe.UnsupportedError, match=f"{name} requires a gradient"):
            call()
        with torch.no_grad():
            assert torch.equal(call(), expected)


@pytest.mark.parametrize("name", ["hidden", "router_logits"])
def test_inputs_of_a_routing_runner_that_need_a_gradient_are_refused(name):
    hidden, _, _, w13, w2 = tensors(Layer())
    inputs = {"hidden": hidden, "router_logits": torch.randn(hidden.shape[0], w13.shape[0], device=DEVICE)}
    runner = moe.Runner(w13, w2, topk=3, max_tokens=16, router={"scoring": "softmax"})
    expected = runner.forward(**inputs)
    inputs[name].requires_grad_()
    with pytest.raises(moe.UnsupportedError, match=f"{name} requires a gradient"):
        runner.forward(**inputs)
    with torch.no_grad():
        assert torch.equal(runner.forward(**inputs), expected)


def test_parameters_among_the_weights_get_no_gradient():
    hidden, ids, weights, w13, w2 = tensors(Layer())
    expected = moe.experts(hidden, ids, weights, w13, w2)
    w13, w2 = torch.nn.Parameter(w13), torch.nn.Parameter(w2)
    for _ in range(2):
        output = moe.experts(hidden, ids, weights, w13, w2)
        assert not output.requires_grad and torch.equal(output, expected)
    compiled = torch.compile(lambda x: moe.experts(x, ids, weights, w13, w2) * 2, backend="aot_eager", fullgraph=True)
    output = compiled(hidden)
    assert torch.equal(output, 2 * expected)
    output.sum().backward()
    assert w13.grad is None and w2.grad is None


@pytest.mark.parametrize("dtype", ["int64", "int32", "int16", "int8", "uint16", "uint8"])
def test_ids_of_all_dtypes(dtype):
    hidden, ids, weights, w13, w2 = tensors(Layer())
    expected = moe.experts(hidden, ids, weights, w13, w2)
    ids = ids.to(getattr(torch, dtype))
    assert torch.equal(moe.experts(hidden, ids, weights, w13, w2), expected)
    assert torch.equal(moe.Runner(w13, w2, topk=3, max_tokens=16).forward_routed(hidden, ids, weights), expected)


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU fp8 layers take bfloat16")
def test_quantized_codes_are_of_torch():
    layer = Layer(hidden=256, intermediate=128)
    hidden, ids, weights, w13, w2 = tensors(layer)
    first, second = moe.quantize(w13, "fp8_block128"), moe.quantize(w2, "fp8_block128")
    assert first.codes.dtype == torch.float8_e4m3fn and first.scales.shape == (6, 2, 2)
    output = moe.experts(hidden, ids, weights, first.codes, second.codes, w13_scale=first.scales, w2_scale=second.scales,
                         quantization="fp8_block128")  # fmt: skip
    assert 1e-4 < distance(output.cpu().numpy(), layer.expected()) < 0.1


def test_torch_compile():
    hidden, ids, weights, w13, w2 = tensors(Layer())
    runner = moe.Runner(w13, w2, topk=3, max_tokens=16)

    def block(x):
        return runner.forward_routed(x * 2, ids, weights) + 1

    expected = block(hidden)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(hidden), expected)


class Block(torch.nn.Module):
    """Experts with biases and a clamped activation: every kind of argument of `moe.experts`."""

    def __init__(self, layer):
        super().__init__()
        torch.manual_seed(7)
        _, _, _, w13, w2 = tensors(layer)
        self.w13, self.w2 = torch.nn.Parameter(w13), torch.nn.Parameter(w2)
        self.b13, self.b2 = (torch.nn.Parameter(torch.randn(w.shape[:2], device=DEVICE)) for w in (w13, w2))

    def forward(self, hidden, ids, weights):
        return moe.experts(hidden + 1, ids, weights, self.w13, self.w2, "swigluoai_halves", alpha=1.5, beta=0.5, limit=3.0,
                           w13_bias=self.b13, w2_bias=self.b2) * 2  # fmt: skip


def test_torch_compile_of_experts(runners_made):
    layer = Layer()
    hidden, ids, weights, *_ = tensors(layer)
    block, graphs = Block(layer), []

    def backend(graph, _):
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    with torch.no_grad():
        expected = block(hidden, ids, weights)
        made = len(runners_made)
        compiled = torch.compile(block, backend=backend, fullgraph=True)
        for _ in range(3):
            assert torch.equal(compiled(hidden, ids, weights), expected)
        assert torch.equal(torch.compile(block, backend="aot_eager", fullgraph=True)(hidden, ids, weights), expected)
        assert len(runners_made) == made  # eager and compiled calls have the same runner
        block.w13.mul_(-0.5)
        changed = block(hidden, ids, weights)
        assert not torch.equal(changed, expected) and torch.equal(compiled(hidden, ids, weights), changed)
    assert len(graphs) == 1 and torch.ops.moe.experts in graphs[0]


def test_operators_pass_the_checks_of_torch():
    hidden, ids, weights, w13, w2 = tensors(Layer())
    runner = moe.Runner(w13, w2, topk=3, max_tokens=16)
    utils = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch_library.opcheck(torch.ops.moe.forward_routed.default, (hidden, ids, weights, runner.key), test_utils=utils)
    torch_library.opcheck(torch.ops.moe.experts.default, (hidden, ids, weights, w13, w2), test_utils=utils)
    expected = moe.experts(hidden, ids, weights, w13, w2)
    assert torch.equal(torch.ops.moe.experts(hidden, ids, weights, w13, w2), expected)
    key = runner.key
    del runner
    gc.collect()
    with pytest.raises(moe.StateError, match="closed"):
        torch.ops.moe.forward_routed(hidden, ids, weights, key)


def test_the_same_call_again_and_what_ends_it():
    """The second call with the same tensors goes straight to the runner; every argument that differs is seen."""
    layer = Layer()
    hidden, ids, weights, w13, w2 = tensors(layer)
    expected = layer.expected()
    for _ in range(3):
        assert distance(moe.experts(hidden, ids, weights, w13, w2).cpu().numpy(), expected) < 1e-5
    gelu = moe.experts(hidden, ids, weights, w13, w2, "gelu")
    assert distance(gelu.cpu().numpy(), expected) > 1e-2
    assert torch.equal(moe.experts(hidden, ids, weights, w13, w2, "gelu"), gelu)
    assert distance(moe.experts(hidden, ids[:, :2].contiguous(), weights[:, :2].contiguous(), w13, w2).cpu().numpy(), expected) > 1e-2
    longer = moe.experts(hidden.repeat(40, 1), ids.repeat(40, 1), weights.repeat(40, 1), w13, w2)
    assert distance(longer.cpu().numpy(), np.tile(expected, (40, 1))) < 1e-5
    bias = torch.zeros(w13.shape[:2], device=DEVICE), torch.zeros(w2.shape[:2], device=DEVICE)
    for _ in range(2):
        moe.experts(hidden, ids, weights, w13, w2, w13_bias=bias[0], w2_bias=bias[1])
    bias[1].add_(1)
    shifted = moe.experts(hidden, ids, weights, w13, w2, w13_bias=bias[0], w2_bias=bias[1])
    assert distance(shifted.cpu().numpy(), layer.expected(w13_bias=bias[0].cpu().numpy(), w2_bias=bias[1].cpu().numpy())) < 1e-5
    with pytest.raises(ValueError, match="hidden.*1 dimensions"):
        moe.experts(hidden[0], ids, weights, w13, w2)
    with pytest.raises(ValueError, match="topk_ids"):
        moe.experts(hidden, ids[:5], weights, w13, w2)
    with pytest.raises(moe.UnsupportedError, match="gradient"):
        moe.experts(hidden.clone().requires_grad_(), ids, weights, w13, w2)
    moe.clear_cache()
    assert distance(moe.experts(hidden, ids, weights, w13, w2).cpu().numpy(), expected) < 1e-5


@pytest.mark.skipif(DEVICE != "cpu", reason="numpy arrays are on the host")
def test_from_numpy_to_torch_is_the_same():
    layer = Layer()
    by_numpy = moe.experts(layer.hidden, layer.ids, layer.weights, layer.w13, layer.w2)
    assert np.array_equal(moe.experts(*tensors(layer)).cpu().numpy(), by_numpy)


@pytest.fixture
def runners_made(monkeypatch):
    """(max_tokens, whether it was closed) of every runner that moe.experts makes."""
    made = []
    original = _experts.sharing_runner

    def record(**settings):
        made.append(original(**settings))
        return made[-1]

    monkeypatch.setattr(_experts, "sharing_runner", record)
    moe.clear_cache()
    yield made
    moe.clear_cache()


def test_a_runner_that_packs_is_made_once_for_long_inputs(monkeypatch, runners_made):
    """After a call of few rows a long one needs no second copy of the weights and no pieces of 64 rows."""
    monkeypatch.setattr(moe.Runner, "weights_packed", property(lambda self: True))
    layer = Layer(rows=8)
    hidden, ids, weights, w13, w2 = tensors(layer)
    for times in (1, 600, 1100):  # 8, 4800 and 8800 rows: one piece, two, three
        output = moe.experts(hidden.repeat(times, 1), ids.repeat(times, 1), weights.repeat(times, 1), w13, w2)
        assert distance(output.cpu().numpy(), np.tile(layer.expected(), (times, 1))) < 1e-5
    assert [(runner.max_tokens, runner._handle == 0) for runner in runners_made] == [(64, True), (4096, False)]
    moe.experts(hidden, ids, weights, w13, w2.clone())  # another w2: known to pack only when its own runner was made
    assert [runner.max_tokens for runner in runners_made[2:]] == [64, 4096]


def test_the_first_call_of_a_runner_that_packs_may_be_longer(monkeypatch, runners_made):
    monkeypatch.setattr(moe.Runner, "weights_packed", property(lambda self: True))
    hidden, ids, weights, w13, w2 = tensors(Layer(rows=8))
    for times in (600, 2000):
        moe.experts(hidden.repeat(times, 1), ids.repeat(times, 1), weights.repeat(times, 1), w13, w2)
    assert [runner.max_tokens for runner in runners_made] == [8192]


def test_a_runner_that_reads_the_weights_grows(runners_made):
    layer = Layer(rows=8)
    hidden, ids, weights, w13, w2 = tensors(layer)
    for times in (1, 20, 10, 1100):
        output = moe.experts(hidden.repeat(times, 1), ids.repeat(times, 1), weights.repeat(times, 1), w13, w2)
        assert distance(output.cpu().numpy(), np.tile(layer.expected(), (times, 1))) < 1e-5
    if not runners_made[0].weights_packed:
        assert [runner.max_tokens for runner in runners_made] == [64, 256, 8192]
