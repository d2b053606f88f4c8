# SPDX-License-Identifier: Apache-2.0
# tests/python/test_transformers.py: transformers models under experts_implementation="moe", on the host where
# libmoe has oneDNN and on a GPU where there is one.
import copy
import inspect
import io
import warnings

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import moe  # noqa: E402

import families  # noqa: E402
import mxfp4  # noqa: E402
import moe.transformers as adapter  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402
from transformers.integrations import finegrained_fp8, moe as integration  # noqa: E402

transformers.logging.set_verbosity_error()


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    """Where the library can run experts. A case without it needs no experts of the library."""
    if request.param == "cpu" and not moe.has("onednn"):
        pytest.skip("libmoe was built without oneDNN, so that no experts run on the host")
    if request.param == "cuda" and not moe.has("cuda"):
        pytest.skip("libmoe was built without CUDA")
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return request.param


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).abs().max() / expected.double().abs().max())


def calls_of(model: torch.nn.Module) -> list[tuple[torch.nn.Module, tuple]]:
    """Runs the model and returns the arguments of every call of an experts module."""
    seen: list[tuple[torch.nn.Module, tuple]] = []
    hooks = [m.register_forward_pre_hook(lambda m, args, kwargs: seen.append((m, (*args, *kwargs.values()))), with_kwargs=True)
             for m in families.experts(model)]  # fmt: skip
    families.logits(model)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("name", families.names())
def test_family(name, device):
    """float32: the logits of the library are those of transformers' eager code. bfloat16: each experts module is no further from its
    float32 result than grouped_mm is, on the inputs that it gets in the model."""
    model = families.build(name).to(device)
    model.set_experts_implementation("eager")
    expected = families.logits(model)
    calls = calls_of(model)
    assert calls, "no experts module ran"

    model.set_experts_implementation("moe")
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        got = families.logits(model)
    assert {adapter.why_not(module) for module, _ in calls} == {None}
    assert distance(got, expected) < 2e-5

    with torch.no_grad():
        for module, (hidden, ids, weights) in calls:
            half = copy.deepcopy(module).to(torch.bfloat16)
            wide = copy.deepcopy(half).float()
            hidden, weights = hidden.to(torch.bfloat16), weights.to(torch.bfloat16)
            truth = integration.grouped_mm_experts_forward(wide, hidden.float(), ids, weights.float())
            ours = adapter.experts_forward(half, hidden, ids, weights)
            theirs = integration.grouped_mm_experts_forward(half, hidden, ids, weights)
            assert ours.dtype == torch.bfloat16 and adapter.why_not(half) is None
            assert distance(ours, truth) <= 1.25 * distance(theirs, truth) + 1e-3


def tiny(name: str, tmp_path, **fields) -> str:
    model = families.build(name)
    for key, value in fields.items():
        setattr(model.config, key, value)
    model.save_pretrained(tmp_path)
    return str(tmp_path)


def test_from_pretrained_and_generate(tmp_path, device):
    path = tiny("qwen3_moe", tmp_path)
    ours = transformers.AutoModelForCausalLM.from_pretrained(path, experts_implementation="moe").to(device)
    eager = transformers.AutoModelForCausalLM.from_pretrained(path, experts_implementation="eager").to(device)
    assert distance(families.logits(ours), families.logits(eager)) < 2e-5
    prompt = torch.tensor([[5, 6, 7, 8]], device=device)
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(ours.generate(prompt, **settings), eager.generate(prompt, **settings))
    assert {adapter.why_not(module) for module in families.experts(ours)} == {None}


@pytest.mark.parametrize("name", ["aria", "gpt_oss", "openai_privacy_filter", "mixtral"])
def test_a_model_that_has_run_is_saved_as_it_was(name, tmp_path, device):
    """Also where the module's parameters became views of the memory that the runner reads."""
    if name not in families.names():
        pytest.skip(f"{name} of transformers {transformers.__version__} does not use the experts interface")
    model = families.build(name).to(device)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model.set_experts_implementation("moe")
    expected = families.logits(model)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    model.save_pretrained(tmp_path / "saved")
    again = type(model).from_pretrained(tmp_path / "saved", experts_implementation="eager", dtype=torch.float32).to(device)
    assert distance(families.logits(again), expected) < 2e-5
    model.set_experts_implementation("grouped_mm")
    assert distance(families.logits(model), expected) < 2e-5


def test_weights_that_change_are_noticed(device):
    model = families.build("mixtral").to(device)
    model.set_experts_implementation("moe")
    families.logits(model)
    with torch.no_grad():
        for module in families.experts(model):
            module.gate_up_proj.mul_(-0.7)
            module.down_proj.data = module.down_proj.data * 1.5
    got = families.logits(model)
    model.set_experts_implementation("eager")
    assert distance(got, families.logits(model)) < 2e-5


@pytest.mark.parametrize("change", ["assign", "parameter", "bias"])
def test_weights_that_are_replaced_are_noticed(change, device):
    """The module has other tensors than those that were read, which nothing wrote to."""
    name = "gpt_oss" if change == "bias" else "mixtral"
    model = families.build(name).to(device)
    model.set_experts_implementation("moe")
    before = families.logits(model)
    other = {key: value * -0.7 if ".experts." in key else value.clone() for key, value in model.state_dict().items()}
    if change == "assign":
        model.load_state_dict(other, assign=True)
    for module in families.experts(model):
        if change == "parameter":
            module.gate_up_proj = torch.nn.Parameter(module.gate_up_proj.detach() * -0.7)
        elif change == "bias":
            module.down_proj_bias = torch.nn.Parameter(module.down_proj_bias.detach() + 1)
    got = families.logits(model)
    model.set_experts_implementation("eager")
    expected = families.logits(model)
    assert distance(got, expected) < 2e-5 and distance(before, expected) > 1e-3


def test_expert_parallel_ids_of_other_ranks_are_skipped(device):
    model = families.build("mixtral").to(device)
    module, (hidden, ids, weights) = calls_of(model)[0]
    ids = ids.clone()
    ids[::2, 0] = module.num_experts  # what transformers gives for an expert of another rank
    weights = weights.masked_fill(ids == module.num_experts, 0.0)
    module._is_expert_parallel = True
    with torch.no_grad():
        got = adapter.experts_forward(module, hidden, ids, weights)
        expected = integration.grouped_mm_experts_forward(module, hidden, ids, weights)
    assert adapter.why_not(module) is None and distance(got, expected) < 1e-5


def test_gradients_fall_back_with_one_warning(device):
    adapter._layer._warned.clear()
    model = families.build("qwen3_moe").to(device).train()
    model.set_experts_implementation("moe")
    ids = torch.tensor([[5, 17, 99, 3]], device=device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
    assert [str(w.message).count("gradients") for w in caught if issubclass(w.category, adapter.FallbackWarning)] == [1]
    ours = [module.gate_up_proj.grad.clone() for module in families.experts(model)]
    model.zero_grad()
    model.set_experts_implementation("grouped_mm")
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
    for got, module in zip(ours, families.experts(model)):
        assert torch.allclose(got, module.gate_up_proj.grad, atol=1e-6)


@pytest.mark.skipif(moe.has("onednn"), reason="libmoe has oneDNN: experts run on the host")
def test_the_host_without_onednn_falls_back():
    adapter._layer._warned.clear()
    model = families.build("qwen3_moe")
    model.set_experts_implementation("grouped_mm")
    expected = families.logits(model)
    model.set_experts_implementation("moe")
    with pytest.warns(adapter.FallbackWarning, match="cpu"):
        assert torch.equal(families.logits(model), expected)
    assert all("cpu" in adapter.why_not(module) for module in families.experts(model))


class Strange(torch.nn.Module):
    """Experts whose activation is nearly silu: no formula of the library gives its numbers."""

    def __init__(self, function, has_gate=True):
        super().__init__()
        self.num_experts, self.has_gate, self.has_bias, self.has_post_expert_norm = 4, has_gate, False, False
        self.is_transposed, self.is_concatenated, self._is_expert_parallel = False, True, False
        torch.manual_seed(1)
        self.gate_up_proj = torch.nn.Parameter(torch.randn(4, 32, 16))
        self.up_proj = torch.nn.Parameter(torch.randn(4, 16, 16))
        self.down_proj = torch.nn.Parameter(torch.randn(4, 16, 16))
        self.act_fn = function

    def _apply_gate(self, rows):
        gate, up = rows.chunk(2, dim=-1)
        return self.act_fn(gate) * up


@pytest.mark.parametrize("function", [
    lambda x: x * torch.sigmoid(1.01 * x), lambda x: x * torch.sigmoid(1.702 * x), torch.tanh, torch.nn.functional.mish,
    lambda x: torch.nn.functional.silu(x) + 1e-3, lambda x: torch.nn.functional.silu(x).clamp(max=1e3) + 0.01 * (x > 30),
])  # fmt: skip
def test_an_unknown_activation_falls_back(function):
    module = Strange(function)
    hidden, ids, weights = torch.randn(5, 16), torch.randint(0, 4, (5, 1)), torch.rand(5, 1)
    with torch.no_grad(), pytest.warns(adapter.FallbackWarning, match="activation"):
        adapter._layer._warned.clear()
        got = adapter.experts_forward(module, hidden, ids, weights)
        assert torch.equal(got, integration.grouped_mm_experts_forward(module, hidden, ids, weights))
    assert "activation" in adapter.why_not(module)


@pytest.mark.parametrize(("function", "has_gate", "kind"), [
    (torch.nn.functional.silu, True, "silu"), (torch.nn.functional.gelu, True, "gelu"),
    (lambda x: torch.nn.functional.gelu(x, approximate="tanh"), True, "gelu_tanh"),
    (torch.relu, False, "relu_no_mul"), (torch.nn.functional.silu, False, "silu_no_mul"),
    (lambda x: torch.relu(x).square(), False, "relu2_no_mul"),
])  # fmt: skip
def test_a_known_activation_is_recognised_by_its_numbers(function, has_gate, kind):
    assert adapter.recognise(Strange(function, has_gate), has_gate, True, "cpu").kind == kind


def test_the_limit_of_an_activation_is_read_from_its_numbers():
    class Limited(Strange):
        def _apply_gate(self, rows):
            gate, up = rows.chunk(2, dim=-1)
            return torch.nn.functional.silu(gate).clamp(max=3.25) * up.clamp(-3.25, 3.25)

    found = adapter.recognise(Limited(None), True, True, "cpu")
    assert (found.kind, found.limit) == ("swiglu_step", 3.25)


class Normalised(Strange):
    def __init__(self):
        super().__init__(torch.nn.functional.silu)
        self.has_post_expert_norm, self.post_expert_norm = True, torch.nn.RMSNorm(16)
        self.post_expert_norm.weight.data.uniform_(0.5, 2)


@pytest.mark.skipif("post_expert_norm" not in inspect.getsource(integration.grouped_mm_experts_forward),
                    reason=f"transformers {transformers.__version__} has no post_expert_norm")
def test_outputs_that_are_normalised_before_the_sum(device):
    """Also ids of other ranks' experts, no rows, and another number of experts per token. A call that trains the norm falls back."""
    module = Normalised().to(device)
    hidden, ids, weights = torch.randn(7, 16), torch.stack([torch.randperm(4)[:3] for _ in range(7)]), torch.rand(7, 3)
    hidden, ids, weights = (tensor.to(device) for tensor in (hidden, ids, weights))
    weights[2, 1] = 0
    with torch.no_grad():
        expected = integration.grouped_mm_experts_forward(module, hidden, ids, weights)
        ids[2, 1] = -1
        assert distance(adapter.experts_forward(module, hidden, ids, weights), expected) < 1e-5
        assert adapter.why_not(module) is None
        assert adapter.experts_forward(module, hidden[:0], ids[:0], weights[:0]).shape == (0, 16)
        got = adapter.experts_forward(module, hidden[:2], ids[:2, :2].contiguous(), weights[:2, :2].contiguous())
        assert distance(got, integration.grouped_mm_experts_forward(module, hidden[:2], ids[:2, :2], weights[:2, :2])) < 1e-5
        assert list(module._moe_layer.runners) == [1]
    for name in ("gate_up_proj", "up_proj", "down_proj"):
        getattr(module, name).requires_grad_(False)
    adapter._layer._warned.clear()
    with pytest.warns(adapter.FallbackWarning, match="gradients"):
        adapter.experts_forward(module, hidden, ids.clamp(min=0), weights).sum().backward()
    assert module.post_expert_norm.weight.grad is not None


@pytest.mark.parametrize("change", ["float64", "meta"])
def test_modules_that_the_library_cannot_take(change):
    module = Strange(torch.nn.functional.silu)
    if change == "float64":
        module.double()
    else:
        module.to("meta")
    adapter._layer._warned.clear()
    hidden = torch.randn(3, 16, dtype=module.down_proj.dtype, device=module.down_proj.device)
    ids, weights = torch.zeros(3, 1, dtype=torch.int64, device=hidden.device), torch.ones(3, 1, device=hidden.device)
    with torch.no_grad(), pytest.warns(adapter.FallbackWarning):
        try:
            adapter.experts_forward(module, hidden, ids, weights)
        except (RuntimeError, NotImplementedError):
            assert change in ("meta", "float64")  # transformers' grouped_mm has no such device and dtype either
    assert adapter.why_not(module)


def test_torch_compile_keeps_the_layer_as_one_operator(device):
    model = families.build("qwen3_moe").to(device)
    model.set_experts_implementation("moe")
    module, (hidden, ids, weights) = calls_of(model)[0]
    with torch.no_grad():
        expected = module(hidden, ids, weights)
        graphs = []

        def backend(graph, _):
            graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
            return graph

        compiled = torch.compile(module, backend=backend, fullgraph=True)
        assert torch.equal(compiled(hidden, ids, weights), expected)
    assert len(graphs) == 1 and torch.ops.moe.transformers_experts in graphs[0]


@pytest.mark.parametrize("how", ["deepcopy", "save"])
def test_torch_compile_of_a_copy_of_a_model_that_has_run(how, device):
    """The operator finds a module by a key: a copy must not have the original's."""
    model = families.build("qwen3_moe").to(device)
    model.set_experts_implementation("moe")
    before = families.logits(model)
    file = io.BytesIO()
    if how == "save":
        torch.save(model, file)
        file.seek(0)
    other = copy.deepcopy(model) if how == "deepcopy" else torch.load(file, weights_only=False)
    with torch.no_grad():
        for module in families.experts(other):
            module.down_proj.mul_(-0.5)
    other.set_experts_implementation("eager")
    expected = families.logits(other)
    other.set_experts_implementation("moe")
    torch._dynamo.reset()
    other.forward = torch.compile(other.forward, backend="eager")
    for _ in range(2):
        assert distance(families.logits(other), expected) < 2e-5
    assert distance(before, expected) > 1e-3 and torch.equal(families.logits(model), before)


@pytest.mark.parametrize("trained", ["gate_up_proj", "down_proj"])
def test_torch_compile_with_gradients_falls_back(trained, device):
    """A module that has run on the library; later one of its parameters is trained."""
    model = families.build("qwen3_moe").to(device)
    model.set_experts_implementation("moe")
    module, (hidden, ids, weights) = calls_of(model)[0]
    hidden, weights = hidden.detach(), weights.detach()
    for name in ("gate_up_proj", "down_proj"):
        getattr(module, name).requires_grad_(name == trained)
    parameter, gradients = getattr(module, trained), []
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    for run in (module, compiled, compiled):
        parameter.grad = None
        if run is module or len(gradients) == 1:
            adapter._layer._warned.clear()
            with pytest.warns(adapter.FallbackWarning, match="Experts runs on transformers' own implementation: gradients are on"):
                output = run(hidden, ids, weights)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("error", adapter.FallbackWarning)  # once
                output = run(hidden, ids, weights)
        output.square().sum().backward()
        gradients.append(parameter.grad)
    model.set_experts_implementation("grouped_mm")
    parameter.grad = None
    module(hidden, ids, weights).square().sum().backward()
    for gradient in gradients:
        assert gradient is not None and torch.allclose(gradient, parameter.grad, atol=1e-6)


def test_torch_compile_of_a_module_that_the_library_cannot_take():
    module = Strange(torch.tanh)
    hidden, ids, weights = torch.randn(5, 16), torch.randint(0, 4, (5, 1)), torch.rand(5, 1)

    def run(hidden, ids, weights):
        return adapter.experts_forward(module, hidden, ids, weights)

    with torch.no_grad():
        with pytest.warns(adapter.FallbackWarning):
            adapter._layer._warned.clear()
            expected = run(hidden, ids, weights)
        adapter._layer._warned.clear()  # as in a process that has loaded a module which ran before
        torch._dynamo.reset()
        with pytest.warns(adapter.FallbackWarning, match="Strange runs on transformers' own implementation: its activation is none"):
            got = torch.compile(run, backend="eager", fullgraph=True)(hidden, ids, weights)
    assert torch.equal(got, expected)


def test_another_number_of_experts_per_token(device):
    """A call with fewer experts per token than the one before, as with router settings that change between two."""
    model = families.build("qwen3_moe").to(device)
    module, (hidden, ids, weights) = calls_of(model)[0]
    assert ids.shape[1] > 1
    with torch.no_grad():
        for topk in (ids.shape[1], 1, ids.shape[1], 1):
            given = hidden, ids[:, :topk].contiguous(), weights[:, :topk].contiguous()
            got = adapter.experts_forward(module, *given)
            assert adapter.why_not(module) is None
            assert distance(got, integration.grouped_mm_experts_forward(module, *given)) < 1e-5
    runners = module._moe_layer.runners
    packed = runners[ids.shape[1]][0].weights_packed  # one copy of the weights serves every call
    assert sorted(runners) == ([ids.shape[1]] if packed else [1, ids.shape[1]]) and all(len(made) == 1 for made in runners.values())


@pytest.mark.parametrize("what", ["model", "layers"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_torch_compile_of_a_model_that_has_not_run(name, what, device):
    """In one graph, as under grouped_mm. Layers that are compiled one by one share their code: each has its own weights. So has a copy."""
    model = families.build(name).to(device)
    model.set_experts_implementation("eager")
    expected = families.logits(model)
    model.set_experts_implementation("moe")
    torch._dynamo.reset()
    if what == "model":
        model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    else:
        for layer in model.model.layers:
            layer.compile(backend="eager", fullgraph=True)
    for _ in range(2):
        assert distance(families.logits(model), expected) < 2e-5
    assert {adapter.why_not(module) for module in families.experts(model)} == {None}


def test_torch_compile_of_a_copy_of_a_model_that_was_compiled(device):
    model = families.build("qwen3_moe").to(device)
    model.set_experts_implementation("moe")
    torch._dynamo.reset()
    for layer in model.model.layers:
        layer.compile(backend="eager", fullgraph=True)
    before = families.logits(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for module in families.experts(other):
            module.down_proj.mul_(-0.5)
    eager = copy.deepcopy(other)  # a copy is not compiled
    eager.set_experts_implementation("eager")
    for layer in other.model.layers:
        layer.compile(backend="eager", fullgraph=True)
    assert distance(families.logits(other), families.logits(eager)) < 2e-5
    assert torch.equal(families.logits(model), before)


def test_a_shallow_copy_has_a_key_of_its_own():
    module = torch.nn.Linear(2, 2)
    adapter._layer.register_while_tracing(id(module))
    other = copy.copy(module)
    adapter._layer.register_while_tracing(id(other))
    for each in (module, other):
        assert adapter._layer.modules[each._moe_key.value] is each


@pytest.mark.parametrize("gradients", [False, True])
def test_torch_compile_of_a_module_that_has_not_run_and_falls_back(gradients):
    """One warning that says why, and the values and gradients of transformers' own code."""
    module = Strange(torch.tanh)
    module.requires_grad_(gradients)
    hidden, ids, weights = torch.randn(5, 16), torch.randint(0, 4, (5, 1)), torch.rand(5, 1)
    adapter._layer._warned.clear()
    torch._dynamo.reset()
    compiled = torch.compile(lambda *given: adapter.experts_forward(module, *given), backend="eager", fullgraph=True)
    expected = integration.grouped_mm_experts_forward(module, hidden, ids, weights)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            got = compiled(hidden, ids, weights)
            assert torch.allclose(got, expected, atol=1e-6) and got.requires_grad == gradients
    reasons = [str(w.message) for w in caught if issubclass(w.category, adapter.FallbackWarning)]
    assert len(reasons) == 1 and ("gradients" if gradients else "activation") in reasons[0]
    if gradients:
        got.square().sum().backward()
        ours, module.down_proj.grad = module.down_proj.grad, None
        expected.square().sum().backward()
        assert torch.allclose(ours, module.down_proj.grad, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss in mxfp4"])
def test_generate_with_a_static_cache(name, tmp_path, device):
    """transformers compiles the steps of decode then: the experts are one operator in them. On a GPU they are CUDA graphs. The tokens and
    logits are those of the default cache, whose steps are not compiled; after a token that differs by rounding the rest does."""
    if device == "cuda":
        pytest.importorskip("triton", reason="triton, which torch.compile needs on a GPU, is not installed")
    if name == "qwen3_moe":
        model = families.build(name).to(device)
        model.set_experts_implementation("moe")
    else:
        mxfp4.checkpoint(tmp_path / "checkpoint")
        model = mxfp4.load(tmp_path / "checkpoint", device)
    operators: list[set] = []

    def backend(graph, _, **settings):
        operators.append({node.target for node in graph.graph.nodes if node.op == "call_function"})
        return graph

    prompt = torch.tensor([[5, 6, 7, 8], [9, 3, 3, 1]], device=device)
    settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "output_logits": True,
                "return_dict_in_generate": True}  # fmt: skip
    expected = model.generate(prompt, **settings)
    torch._dynamo.reset()
    compiled = None if device == "cuda" else transformers.CompileConfig(backend=backend)
    if compiled is not None:
        compiled._compile_all_devices = True
    skipped = counters["inductor"]["cudagraph_skips"]
    got = model.generate(prompt, cache_implementation="static", compile_config=compiled, **settings)

    bound = 1e-4 if next(model.parameters()).dtype == torch.float32 else 3e-2
    same = 0
    for step, (ours, theirs) in enumerate(zip(got.logits, expected.logits)):
        assert distance(ours, theirs) < bound, step
        same += 1
        if not torch.equal(got.sequences[:, : 5 + step], expected.sequences[:, : 5 + step]):
            break
    assert same >= 3 and len(got.logits) == 8
    if device == "cpu":
        assert same == 8 and any(torch.ops.moe.transformers_experts in found for found in operators)
    else:
        assert counters["inductor"]["cudagraph_skips"] == skipped
    assert {adapter.why_not(module) for module in families.experts(model)} == {None}


# ---- fp8


class Fp8Config:
    hidden_size, num_experts, moe_intermediate_size, hidden_act = 256, 4, 128, "silu"
    _experts_implementation = "moe"


def fp8_experts(**settings):
    settings = {"block_size": (128, 128), **settings}
    cls = integration.use_experts_implementation(type("Fp8Experts", (finegrained_fp8.FP8Experts,), {}),
                                                 experts_interface=finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS)  # fmt: skip
    module = cls(Fp8Config(), **settings)
    torch.manual_seed(3)
    wide = {}
    with torch.no_grad():
        for name in ("gate_up_proj", "down_proj"):
            weight, scale = getattr(module, name), getattr(module, name + "_scale_inv")
            weight.copy_(torch.randn(weight.shape).clamp(-3, 3).to(weight.dtype))
            scale.copy_((torch.rand(scale.shape) * 0.1 + 0.02).to(scale.dtype))
            blocks = scale.float().repeat_interleave(128, 1).repeat_interleave(128, 2)
            wide[name] = weight.float() * blocks[:, : weight.shape[1], : weight.shape[2]]
    return module, wide


def rounded(x):
    """A row as the scheme quantises it: groups of 128 with a scale of amax / 448."""
    groups = x.float().reshape(x.shape[0], -1, 128)
    scale = groups.abs().amax(-1, keepdim=True) / 448
    return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).reshape(x.shape)


def test_fp8_blocks(device):
    module, wide = fp8_experts()
    hidden = torch.randn(9, 256).to(torch.bfloat16)
    ids = torch.stack([torch.randperm(4)[:2] for _ in range(9)])
    weights = torch.rand(9, 2)
    expected = torch.zeros(9, 256)
    for token in range(9):
        for expert, weight in zip(ids[token], weights[token]):
            gate, up = (rounded(hidden[token][None]) @ wide["gate_up_proj"][expert].T).chunk(2, -1)
            expected[token] += weight * (rounded(torch.nn.functional.silu(gate) * up) @ wide["down_proj"][expert].T)[0]
    module.to(device)
    with torch.no_grad():
        got = module(hidden.to(device), ids.to(device), weights.to(device))
    assert adapter.why_not(module) is None and got.dtype == torch.bfloat16
    assert distance(got.cpu(), expected) < 2e-2


@pytest.mark.parametrize("settings", [{"activation_scheme": "static"}, {"block_size": None}, {"block_size": (64, 128)},
                                      {"expert_dtype": "fp4"}, {"scale_fmt": "ue8m0"}])  # fmt: skip
def test_fp8_forms_that_the_library_does_not_have(settings):
    if settings == {"scale_fmt": "ue8m0"} and finegrained_fp8._get_ue8m0_dtype() == torch.float32:
        pytest.skip("this torch has no float8_e8m0fnu")
    for name in settings:
        if name not in inspect.signature(finegrained_fp8.FP8Experts.__init__).parameters:
            pytest.skip(f"FP8Experts of transformers {transformers.__version__} has no {name}")
    cls = type("Fp8Other", (finegrained_fp8.FP8Experts,), {})
    module = cls(Fp8Config(), **{"block_size": (128, 128), **settings})
    module.is_transposed, module.is_concatenated, module.has_post_expert_norm = False, True, False
    with pytest.raises(adapter._layer.Unsupported):
        adapter._layer.read_fp8_experts(module)


# ---- gpt-oss in mxfp4


def test_gpt_oss_in_mxfp4(tmp_path, device):
    """float32 on the host: the logits of the widened model. bfloat16 on a GPU: no further from them than transformers' own code is with
    the weights widened."""
    wide = mxfp4.checkpoint(tmp_path / "checkpoint")
    wide.set_experts_implementation("eager")
    expected = families.logits(wide)
    bound = 1e-3
    if device == "cuda":
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "checkpoint", experts_implementation="eager", dtype=torch.bfloat16,
            quantization_config=transformers.Mxfp4Config(dequantize=True),
        )  # fmt: skip
        bound += 1.25 * distance(families.logits(theirs.to(device)), expected)
    model = mxfp4.load(tmp_path / "checkpoint", device)
    experts = [m for m in model.modules() if isinstance(m, adapter._mxfp4.Mxfp4Experts)]
    assert len(experts) == 2 and all(e.gate_up_proj.dtype == torch.uint8 for e in experts)
    assert distance(families.logits(model), expected) < bound
    assert {adapter.why_not(e) for e in experts} == {None}

    # what the library cannot take, from the same codes
    module, (hidden, ids, weights) = calls_of(model)[0]
    other = mxfp4.load(tmp_path / "checkpoint", device)  # a GPU's runner has freed those of the first model
    with torch.no_grad():
        widened = adapter._mxfp4.dequantized_forward(families.experts(other)[0], hidden, ids, weights)
        assert distance(widened, module(hidden, ids, weights)) < (1e-3 if device == "cpu" else 1.5e-2)

    other.save_pretrained(tmp_path / "again")
    again = mxfp4.load(tmp_path / "again", device)
    assert distance(families.logits(again), expected) < bound


def test_gpt_oss_in_mxfp4_under_another_implementation_is_untouched(tmp_path):
    wide = mxfp4.checkpoint(tmp_path / "checkpoint")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "checkpoint", experts_implementation="eager", dtype=torch.float32,
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    )  # fmt: skip
    assert not any(isinstance(m, adapter._mxfp4.Mxfp4Experts) for m in model.modules())
    wide.set_experts_implementation("eager")
    assert distance(families.logits(model.float()), families.logits(wide)) < 1e-5  # 5.17 widens the experts to bfloat16, which is exact
