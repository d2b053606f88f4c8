# SPDX-License-Identifier: Apache-2.0
# tests/python/test_freed_codes.py: gpt-oss' experts in mxfp4 whose codes are freed when their runner has packed them, on a GPU where there
# is one, and on the host with runners that hold a copy as a GPU's do.
import copy
import io
import warnings

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import moe  # noqa: E402

import families  # noqa: E402
import moe.transformers as adapter  # noqa: E402
import mxfp4  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402

transformers.logging.set_verbosity_error()
CODES = adapter._mxfp4.CODES


class PackingRunner(moe.Runner):
    """On the host no runner packs: this one computes from copies, and says so."""

    weights_packed = True


def packing_runner(scope, **settings):
    for name in ("w13", "w2", "w13_scale", "w2_scale"):
        settings[name] = settings[name].clone()
    return PackingRunner(**settings)


@pytest.fixture(params=["cpu", "cuda"])
def device(request, monkeypatch):
    if request.param == "cuda" and not (moe.has("cuda") and torch.cuda.is_available()):
        pytest.skip("no GPU, or libmoe was built without CUDA")
    if request.param == "cpu":
        if not moe.has("onednn"):
            pytest.skip("libmoe was built without oneDNN, so that no experts run on the host")
        monkeypatch.setattr(adapter._layer, "sharing_runner", packing_runner)
    return request.param


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("mxfp4") / "checkpoint"
    mxfp4.checkpoint(path)
    return path


@pytest.fixture
def keep_codes():
    adapter.configure(keep_codes=True)
    yield
    adapter.configure(keep_codes=False)


@pytest.fixture
def experts(path, device):
    """One experts module that has not run."""
    return families.experts(mxfp4.load(path, device))[0]


def call_of(module, topk=2, rows=7):
    torch.manual_seed(4)
    device = module.down_proj_bias.device
    hidden = torch.randn(rows, module.hidden_size).to(device, torch.float32 if device.type == "cpu" else torch.bfloat16)
    ids = torch.stack([torch.randperm(module.num_experts)[:topk] for _ in range(rows)])
    return hidden, ids.to(device), torch.rand(rows, topk).to(device)


def storages(module):
    return [StorageWeakRef(getattr(module, name).untyped_storage()) for name in CODES]


def run(module, *call):
    with torch.no_grad():
        return module(*call)


def is_near(got, expected):
    bound = 1e-3 if got.device.type == "cpu" else 1.5e-2
    return float((got.double() - expected.double()).abs().max() / expected.double().abs().max()) < bound


def widened(module, *call):
    with torch.no_grad():
        return adapter._mxfp4.dequantized_forward(module, *call)


def test_a_model_frees_its_codes_in_the_first_forward(path, device):
    model = mxfp4.load(path, device)
    modules = families.experts(model)
    before = [ref for module in modules for ref in storages(module)]
    shapes = [(getattr(module, name).shape, getattr(module, name).dtype) for module in modules for name in CODES]
    sizes = model.num_parameters(), model.get_memory_footprint()
    first = families.logits(model)
    assert all(ref.expired() for ref in before)
    now = [getattr(module, name) for module in modules for name in CODES]
    assert all(tensor.is_meta for tensor in now) and [(tensor.shape, tensor.dtype) for tensor in now] == shapes
    assert (model.num_parameters(), model.get_memory_footprint()) == sizes
    assert torch.equal(families.logits(model), first)
    assert {adapter.why_not(module) for module in modules} == {None}


def test_the_second_call_of_a_module_uses_the_runner_of_the_first(experts):
    call = call_of(experts)
    expected, before = widened(experts, *call), storages(experts)
    first = run(experts, *call)
    assert is_near(first, expected) and all(ref.expired() for ref in before)
    runner = experts._moe_layer.runners[2][0]
    assert torch.equal(run(experts, *call), first) and experts._moe_layer.runners == {2: [runner]}


@pytest.mark.skipif(not moe.has("onednn"), reason="libmoe was built without oneDNN")
def test_the_host_uses_the_codes_where_they_lie(path):
    module = families.experts(mxfp4.load(path, "cpu"))[0]
    addresses = [getattr(module, name).data_ptr() for name in CODES]
    run(module, *call_of(module))
    assert [getattr(module, name).data_ptr() for name in CODES] == addresses and not any(getattr(module, name).is_meta for name in CODES)
    runner = module._moe_layer.runners[2][0]
    assert not runner.weights_packed and {array.data_ptr() for array in runner._kept[0].values()} >= set(addresses)


def test_the_codes_stay_where_the_user_wants_them(experts, keep_codes):
    call = call_of(experts)
    before = storages(experts)
    state = {name: value.clone() for name, value in experts.state_dict().items()}
    got = run(experts, *call)
    assert not any(ref.expired() for ref in before)
    assert all(torch.equal(value, state[name]) for name, value in experts.state_dict().items())
    assert torch.equal(run(copy.deepcopy(experts), *call), got) and is_near(widened(experts, *call), got)


@pytest.mark.parametrize("first", [2, 1])
def test_one_packed_runner_serves_every_number_of_experts_per_token(first, experts):
    calls = {topk: call_of(experts, topk) for topk in (1, 2, 3, 5)}
    expected = {topk: widened(experts, *call) for topk, call in calls.items()}
    for topk in (first, *calls):
        got = run(experts, *calls[topk])
        assert got.dtype is calls[topk][0].dtype and is_near(got, expected[topk]), topk
    runners = experts._moe_layer.runners
    assert list(runners) == [first] and len(runners[first]) == 1 and adapter.why_not(experts) is None


@pytest.mark.parametrize("what", ["state_dict", "pickle", "stored", "fallback", "move"])
def test_what_needs_the_codes_says_what_to_do(what, experts):
    call = call_of(experts)
    first = run(experts, *call)
    with pytest.raises(moe.StateError, match=r"were freed.*keep_codes=True"):
        if what == "state_dict":
            torch.nn.ModuleList([experts]).state_dict()
        elif what == "pickle":
            torch.save(experts, io.BytesIO())
        elif what == "stored":
            experts.stored("down_proj")
        elif what == "fallback":
            widened(experts, *call)
        else:
            torch.nn.ModuleList([experts]).to("meta")
    assert torch.equal(run(experts, *call), first)


def test_a_model_that_has_run_is_not_saved(path, device, tmp_path):
    model = mxfp4.load(path, device)
    families.logits(model)
    with pytest.raises(moe.StateError, match=r"state_dict: the codes .* were freed"):
        model.save_pretrained(tmp_path / "saved")


def test_moves_that_move_nothing(experts, device):
    """Of the experts alone: .to(dtype) of a whole model rounds what transformers computes the rotary embedding from. Their biases are in
    float32 whatever the model's dtype is."""
    call = call_of(experts)
    first = run(experts, *call)
    biases = experts.down_proj_bias.dtype
    for module in (experts.to(device), experts.to(biases), experts.cuda() if device == "cuda" else experts.cpu()):
        assert torch.equal(run(module, *call), first)


def test_deepcopy_before_the_first_call(experts):
    call = call_of(experts)
    other = copy.deepcopy(experts)
    got = run(experts, *call)
    assert not any(getattr(other, name).is_meta for name in CODES)
    assert torch.equal(run(other, *call), got)
    assert other._moe_layer.runners[2][0] is not experts._moe_layer.runners[2][0]


def test_deepcopy_after_the_first_call_shares_the_runner(experts):
    call = call_of(experts)
    got = run(experts, *call)
    other = copy.deepcopy(experts)
    assert torch.equal(run(other, *call), got) and torch.equal(run(copy.deepcopy(other), *call), got)
    assert other._moe_layer.runners[2][0] is experts._moe_layer.runners[2][0]
    assert other._moe_layer.key == id(other) and experts._moe_layer.key == id(experts)
    with torch.no_grad():
        other.down_proj_bias.add_(1)
    with pytest.raises(moe.StateError, match="w2_bias other than that of the copy"):
        run(other, *call)
    assert torch.equal(run(experts, *call), got)


@pytest.mark.parametrize("how", ["in place", "assigned"])
@pytest.mark.parametrize("name", ["gate_up_proj_bias", "down_proj_bias"])
def test_biases_that_change_are_noticed(name, how, experts):
    call = call_of(experts)
    same = copy.deepcopy(experts)
    run(experts, *call)
    with torch.no_grad():
        for module in (experts, same):
            if how == "in place":
                getattr(module, name).mul_(-3)
            else:
                setattr(module, name, torch.nn.Parameter(getattr(module, name) * -3, requires_grad=False))
    assert is_near(run(experts, *call), widened(same, *call)) and list(experts._moe_layer.runners) == [2]


@pytest.mark.parametrize("assign", [False, True])
def test_other_codes_are_loaded_after_the_first_call(assign, experts):
    call = call_of(experts)
    other = copy.deepcopy(experts)
    with torch.no_grad():
        other.down_proj.copy_(other.down_proj.flip(0))
        other.gate_up_proj_scales.add_(1)
    expected, state = widened(other, *call), other.state_dict()
    before = run(experts, *call)
    with pytest.raises(moe.StateError, match="were freed"):
        experts.load_state_dict({"down_proj": state["down_proj"]}, strict=False, assign=assign)
        run(experts, *call)  # of assign it is the next call that sees it
    experts.load_state_dict(state, assign=assign)
    got = run(experts, *call)
    assert is_near(got, expected) and not is_near(got, before)
    assert all(getattr(experts, name).is_meta for name in CODES)


def test_a_forward_with_gradients_on(experts):
    """The first one falls back and frees nothing. Once the codes are freed it computes, and the backward pass says why it cannot."""
    hidden, ids, weights = call_of(experts)
    hidden.requires_grad_()
    adapter._layer._warned.clear()
    with pytest.warns(adapter.FallbackWarning, match="gradients are on"):
        expected = experts(hidden, ids, weights)
    expected.sum().backward()
    assert hidden.grad is not None and not any(getattr(experts, name).is_meta for name in CODES)
    first = run(experts, hidden, ids, weights)
    assert experts.down_proj.is_meta
    torch._dynamo.reset()
    for module in (experts, torch.compile(experts, backend="eager")):
        with warnings.catch_warnings():
            warnings.simplefilter("error", adapter.FallbackWarning)
            got = module(hidden, ids, weights)
        assert torch.equal(got, first) and got.requires_grad
        with pytest.raises(moe.StateError, match="a gradient: the codes"):
            got.sum().backward()
    with pytest.raises(moe.StateError, match="a gradient: the codes"):  # of the biases
        experts.down_proj_bias.requires_grad_()
        experts(hidden.detach(), ids, weights).sum().backward()


def test_torch_compile_after_the_codes_are_freed(experts):
    call = call_of(experts)
    first = run(experts, *call)
    for module in (experts, copy.deepcopy(experts)):
        torch._dynamo.reset()
        compiled = torch.compile(module, backend="eager")
        assert torch.equal(run(compiled, *call), first) and torch.equal(run(compiled, *call), first)


def test_a_module_that_accelerate_offloads_falls_back(path, device):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    module = families.experts(mxfp4.load(path, device))[0]
    call = call_of(module)
    expected = widened(module, *call)
    accelerate.cpu_offload(module, execution_device=torch.device(device))
    adapter._layer._warned.clear()
    with pytest.warns(adapter.FallbackWarning, match="accelerate"):
        assert torch.equal(run(module, *call), expected)
    assert "accelerate" in adapter.why_not(module) and torch.equal(run(module, *call), expected)


def test_the_codes_have_their_own_memory_from_the_driver(path):
    """transformers reserves one block for all weights of a device: codes in it would return nothing when they are freed."""
    model = mxfp4.load(path, "cpu")
    quantizer, (name, module) = model.hf_quantizer, next((n, m) for n, m in model.named_modules() if hasattr(m, "_apply_gate"))
    assert [quantizer.param_element_size(model, f"{name}.{code}", getattr(module, code)) for code in CODES] == [0, 0, 0, 0]
    assert quantizer.param_element_size(model, f"{name}.down_proj_bias", module.down_proj_bias) == module.down_proj_bias.element_size()
    adapter.configure(keep_codes=True)
    try:
        assert quantizer.param_element_size(model, f"{name}.down_proj", module.down_proj) == 1
    finally:
        adapter.configure(keep_codes=False)
