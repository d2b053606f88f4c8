# SPDX-License-Identifier: Apache-2.0
# tests/python/test_compare.py: bench/compare.py on the host: its layers against plain loops, what is wrong or missing is not timed, graphs
# keep what they read, and the forms in which peers get the weights, decoded again.
import json
import pathlib
import subprocess
import sys
import types
import weakref
from contextlib import nullcontext
from unittest import mock

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

BENCH = pathlib.Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))
import compare  # noqa: E402
import compare_layers as layers  # noqa: E402
import compare_library  # noqa: E402
import compare_peers as peers  # noqa: E402
import compare_table as table  # noqa: E402
import compare_timing as timing  # noqa: E402
import compare_vllm  # noqa: E402
import compare_w4 as w4  # noqa: E402

SMALL = (6, 256, 128, 2)
RATES = {"flops": {"bf16": 600e12, "fp8": 1200e12, "int8": 1200e12}, "read": 4e12}


def layer_of(dtype, shape=SMALL, gpt_oss=False):
    return layers.Layer(shape, dtype, device="cpu", gpt_oss=gpt_oss)


def by_loops(layer, batch, activations, sample):
    """The layer by its definition, slot by slot, in float64."""
    out = torch.zeros(len(sample), layer.hidden, dtype=torch.float64)
    for i, t in enumerate(sample):
        for j in range(layer.topk):
            e = int(batch.ids[t, j])
            h = layer.weight("w13", e).double() @ layers.as_read(activations, batch.x[t]).double()
            h = h + (layer.b13[e].double() if layer.b13 is not None else 0)
            gate, up = h[: layer.inter], h[layer.inter :]
            if layer.activation.limit is None:
                a = gate * torch.sigmoid(gate) * up
            else:
                gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
                a = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            y = layer.weight("w2", e).double() @ layers.as_read(activations, a.float()).double()
            out[i] += batch.weights[t, j] * (y + (layer.b2[e].double() if layer.b2 is not None else 0))
    return out


# The relative distance of the weights from the float32 numbers that they were quantised from.
@pytest.mark.parametrize(("dtype", "most"), [("bf16", 3e-3), ("fp8", 3e-2), ("int8", 1e-2), ("mxfp4", 0.15), ("int4", 0.15),
                                             ("int4_32", 0.12), ("nvfp4", 0.13)])  # fmt: skip
def test_weights_are_close_to_the_numbers_they_come_from(dtype, most):
    layer = layer_of(dtype)
    generator = torch.Generator().manual_seed(1)
    want = torch.randn(2 * layer.inter, layer.hidden, generator=generator) * layer.hidden**-0.5
    assert layers.distance(layer.weight("w13", 0), want) < most
    again = layer_of(dtype)
    assert torch.equal(layer.w2.view(torch.uint8), again.w2.view(torch.uint8))


@pytest.mark.parametrize(("dtype", "activations", "gpt_oss"), [("bf16", "bf16", True), ("fp8", "fp8", False), ("int8", "int8", False),
                                                               ("int8", "bf16", False), ("mxfp4", "bf16", True), ("mxfp4", "fp8", True),
                                                               ("nvfp4", "bf16", False)])  # fmt: skip
def test_the_reference_is_the_definition(dtype, activations, gpt_oss):
    layer = layer_of(dtype, gpt_oss=gpt_oss)
    assert (layer.b13 is not None) == (gpt_oss and dtype == "mxfp4")
    batch = layers.Batch(layer, 40, 0)
    want = by_loops(layer, batch, activations, batch.sample())
    # A code of the intermediate that lies midway between two may round the other way.
    assert layers.distance(layers.reference(layer, batch, activations), want.float()) < (1e-5 if activations == "bf16" else 3e-3)


def test_rows_with_a_shorter_last_group():
    x = torch.randn(3, 320)
    codes, scales = layers.quantize_groups(x)
    assert codes.shape == (3, 320) and scales.shape == (3, 3)
    assert layers.distance(layers.as_read("fp8", x), x) < 4e-2
    assert torch.allclose(scales[:, 2], x[:, 256:].abs().amax(dim=1) / 448)


def test_stored_scales_of_nvfp4_end_with_the_global_scale():
    layer = layer_of("nvfp4", (2, 64, 48, 1))
    stored = layer.stored_scales("w2")  # 64 rows of 3 groups
    assert stored.shape == (2, 64 * 3 + 4)
    assert stored[1, -4:].clone().view(torch.float32) == layer.g2[1]
    assert torch.equal(stored[1, :192].view(torch.float8_e4m3fn).float().view(64, 3), layer.s2[1].float())


def test_batches_are_the_same_for_everyone_and_differ_between_sets():
    layer = layer_of("bf16")
    first, again, other = layers.Batch(layer, 9, 0), layers.Batch(layer, 9, 0), layers.Batch(layer, 9, 1)
    assert torch.equal(first.x, again.x) and torch.equal(first.ids, again.ids) and not torch.equal(first.x, other.x)
    assert not set(layers.Batch(layer, 1, 0).ids[0].tolist()) & set(layers.Batch(layer, 1, 1).ids[0].tolist())


class StandIn(layers.Candidate):
    """The layer by definition, multiplied by `factor`."""

    dtypes = ("bf16", "mxfp4")

    def __init__(self, name, factor=1.0, fails=None):
        self.name, self.factor, self.fails = name, factor, fails

    def prepare(self, layer):
        if self.fails == "prepare":
            raise RuntimeError("no memory\nsecond line")
        return self

    def refuses(self, layer, tokens):
        return "it never does" if self.fails == "refuses" else None

    def call(self, prepared, layer, batch):
        def run():
            out = torch.zeros(batch.x.shape[0], layer.hidden)
            out[batch.sample()] = layers.reference(layer, batch, self.activations(layer.dtype)) * self.factor
            return out

        return run


class FixedTimeGraph:
    """Runs once where a graph is captured."""

    def __init__(self, calls):
        self.calls, self.repeats = calls, 1
        for call in calls:
            call()

    def replay_ms(self):
        return 2.0


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(timing, "long_enough", FixedTimeGraph)
    monkeypatch.setattr(timing.in_turns, "__defaults__", (lambda seconds: None,))


def measured(candidates, dtype="mxfp4", tokens=4):
    prepared = compare.Prepared(layer_of(dtype))
    with mock.patch.dict(table.SHAPES, {"small": SMALL}), mock.patch.dict(compare.SHAPES, {"small": SMALL}):
        return compare.measure(candidates, prepared, "small", tokens, RATES, 5)


def test_a_point(no_gpu):
    point = measured([StandIn(table.OURS), StandIn("a peer", 1.003)])
    assert list(point["us"]) == [table.OURS, "a peer"] and not point["wrong"] and not point["not_timed"]
    assert point["us"][table.OURS] == 2.0 * 1e3 / 8 and point["spread"]["a peer"] == (0, 0, 0, 0)
    assert point["errors"][table.OURS] < 1e-6 and 2e-3 < point["errors"]["a peer"] < 4e-3
    assert point["floors_us"]["a peer"] == point["floor_us"] > 0
    json.dumps(point)
    assert "a peer" in table.line("small", "mxfp4", point)


def test_a_wrong_peer_is_not_timed(no_gpu, capsys):
    nan = StandIn("writes too little")
    nan.call = lambda prepared, layer, batch: lambda: batch.out
    point = measured([StandIn(table.OURS), StandIn("wrong", 1.02), nan])
    assert list(point["us"]) == [table.OURS] and point["wrong"] == ["wrong", "writes too little"]
    assert "Wrong: its result differs from float32 by 2.0e-02, at most 0.01 is right" in point["not_timed"]["wrong"]
    assert "by nan" in point["not_timed"]["writes too little"]
    compare.report("small", "mxfp4", point)
    assert "wrong not timed: Wrong:" in capsys.readouterr().out


def test_a_wrong_result_of_this_library_is_not_timed(no_gpu):
    point = measured([StandIn(table.OURS, 1.01), StandIn("a peer")])
    assert list(point["us"]) == ["a peer"] and point["wrong"] == [table.OURS]
    table.line("small", "mxfp4", point)


def test_what_cannot_be_prepared_or_refuses_is_left_out(no_gpu, capsys):
    point = measured([StandIn(table.OURS), StandIn("fails", fails="prepare"), StandIn("refuses", fails="refuses")])
    assert point["not_timed"] == {"fails": "RuntimeError: preparing: RuntimeError: no memory", "refuses": "Unavailable: it never does"}
    assert not point["wrong"]
    compare.report("small", "mxfp4", point)
    assert "refuses" not in capsys.readouterr().out


def test_wrong_products_are_not_timed(no_gpu):
    class Two(layers.Candidate):
        name, whole, dtypes = "products", False, ("bf16",)
        factor = 1.0

        def call(self, prepared, layer, batch):
            rows, owners, _ = peers.sorted_rows(batch, layer.experts)
            inner = torch.randn(rows.shape[0], layer.inter)

            def product(v, name):
                return torch.stack([layer.weight(name, int(e)) @ r.float() for r, e in zip(v, owners)])

            return layers.Products(lambda: None, rows, owners, inner,
                                   lambda: (product(rows, "w13"), self.factor * product(inner, "w2")))  # fmt: skip

    right, wrong = Two(), Two()
    wrong.name, wrong.factor = "wrong", 1.03
    point = measured([StandIn(table.OURS), right, wrong], "bf16")
    assert list(point["us"]) == [table.OURS, "products"] and point["wrong"] == ["wrong"]


def test_turns_replay_every_graph_once_in_changing_orders():
    order = []

    class Recorded:
        def __init__(self, name):
            self.name = name

        def replay_ms(self):
            order.append(self.name)
            return 10.0

    times, single = timing.in_turns({name: Recorded(name) for name in "abc"}, 60, 20, lambda seconds: None)
    assert all(len(t) == 20 for t in times.values()) and all(len(t) == 3 for t in single.values())
    turns = ["".join(order[-60:][i : i + 3]) for i in range(0, 60, 3)]
    assert all(sorted(turn) == list("abc") for turn in turns) and len(set(turns)) > 2
    assert timing.in_turns({}, 60, 20) == ({}, {})


def test_a_graph_keeps_what_it_reads(monkeypatch):
    for name in ("Stream", "CUDAGraph", "current_stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda *arguments: nullcontext())

    def call():
        tensor = torch.ones(4)
        return (lambda: tensor + 1), weakref.ref(tensor)

    run, tensor = call()
    graph = timing.Graph([run], 2)
    del run
    assert tensor() is not None and graph.repeats == 2
    del graph
    assert tensor() is None


def test_missing_peers_are_named_with_where_they_come_from():
    class Missing(StandIn):
        modules, obtained = ("no_such_module",), "pip install no_such_module"

    found, said = peers.probe([Missing("absent"), StandIn("there")])
    assert [peer.name for peer in found] == ["there"] and said["there"] == torch.__version__.partition("+")[0]
    assert said["absent"] == "missing: ModuleNotFoundError: No module named 'no_such_module'. It comes with: pip install no_such_module"


@pytest.mark.parametrize("dtype", list(table.DTYPES))
def test_the_script_up_to_the_gpu(dtype, tmp_path, capsys, monkeypatch):
    """Every type has peers, which are named whether they are there or not; without a GPU the script says so."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    peer = {"bf16": "vllm triton", "fp8": "vllm deep_gemm", "int8": "vllm triton", "mxfp4": "triton_kernels"}.get(dtype, "vllm marlin")
    assert compare.main(["--list", "--dtype", dtype, "--peers", peer]) == 0
    assert capsys.readouterr().out.startswith(f"{peer}: ")
    library = tmp_path / "empty.so"
    library.touch()
    assert compare.main([str(library), "--dtype", dtype, "--peers", ""]) == 2
    assert "torch finds no CUDA device" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        compare.main(["--list", "--dtype", dtype, "--peers", "marlon"])
    assert ended.value.code == 2 and f"--peers of {dtype}: no 'marlon'; there are:" in capsys.readouterr().err


def test_the_script_as_a_program():
    command = [sys.executable, "-B", BENCH / "compare.py", "--list", "--dtype", "mxfp4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "vllm marlin: " in done.stdout and "triton_kernels: " in done.stdout, done


def test_absent_serving_modules_become_empty_ones():
    finder = compare_vllm.EmptyModules()
    assert finder.find_spec("numpy") is None
    spec = finder.find_spec("zmq.asyncio")
    module = finder.create_module(spec)
    assert module.Context().anything() is not None and finder.used == {"zmq"}
    with pytest.raises(AttributeError):
        module.__version__  # noqa: B018


def test_the_candidates_of_this_library():
    names = {dtype: [(c.name, c.activations(dtype)) for c in compare_library.candidates(None, dtype)] for dtype in table.DTYPES}
    assert names["bf16"] == [(table.OURS, "bf16")] and names["fp8"] == [(table.OURS, "fp8")]
    assert names["int8"] == [(table.OURS, "int8"), (table.OURS_W8A16, "bf16")]
    assert names["nvfp4"] == [(table.OURS, "bf16")]
    assert names["mxfp4"] == names["int4"] == names["int4_32"] == [(table.OURS, "bf16"), (table.OURS_FP8, "fp8")]


class RecordingCapi:
    """The C interface, which keeps what it was given."""

    def __init__(self):
        self.lib, self.created, self.forwards = self, None, []

    def moe_hopper_create_packed(self, scheme, experts, hidden, inter, topk, weights):
        self.created = (scheme, (experts, hidden, inter, topk), weights._obj)
        return 1

    def moe_hopper_workspace_bytes(self, handle, tokens):
        return 0

    def moe_hopper_forward(self, handle, *rest):
        self.forwards.append(rest)
        return 0


def test_what_the_c_interface_gets(monkeypatch):
    library = RecordingCapi()
    layer = layer_of("mxfp4", (4, 320, 96, 2), gpt_oss=True)
    batch = layers.Batch(layer, 5, 0)
    bf16, e4m3 = compare_library.candidates(library, "mxfp4")
    monkeypatch.setattr(compare_library.Handle, "workspace", lambda self, tokens: torch.zeros(1))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=0))
    prepared = e4m3.prepare(layer)
    scheme, shape, packed = library.created
    assert scheme == b"mxfp4_fp8" and shape == (4, 320, 96, 2) and packed.w13 == layer.w13.data_ptr() and packed.b2 == layer.b2.data_ptr()
    assert (packed.w13_group, packed.w2_group, packed.beta, packed.limit) == (32, 32, 1.0, 7.0)
    e4m3.call(prepared, layer, batch)()
    assert library.forwards[-1][2] == 3  # scales between two rows of 320 columns
    bf16.call(bf16.prepare(layer), layer, batch)()
    assert library.created[0] == b"mxfp4" and library.forwards[-1][:3] == (batch.x.data_ptr(), None, 0)
    layer = layer_of("int8")
    w8a16 = compare_library.candidates(library, "int8")[1]
    w8a16.prepare(layer)
    assert library.created[0] == b"int8" and library.created[2].b13 is None and library.created[2].limit == float("inf")


class VllmStandIn:
    """vLLM's functions that Marlin's peer calls, on the host: words stay as they are, scales in their order; the layer decodes them."""

    def __init__(self, dtype):
        self.dtype, self.shapes = dtype, []

    def gptq_marlin_repack(self, b_q_weight, perm, size_k, size_n, num_bits):
        assert b_q_weight.shape == (size_k * num_bits // 32, size_n) and b_q_weight.dtype == torch.int32
        return b_q_weight

    def marlin_permute_scales(self, s, size_k, size_n, group_size):
        assert s.shape == (1 if group_size == -1 else size_k // group_size, size_n) and s.dtype == torch.bfloat16
        return s

    def modules(self):
        keep = lambda v, *rest, **named: v  # noqa: E731
        layout = types.SimpleNamespace(marlin_permute_scales=self.marlin_permute_scales, marlin_permute_bias=keep,
                                       marlin_make_workspace_new=lambda device, blocks: None)  # fmt: skip
        fp4 = types.SimpleNamespace(mxfp4_marlin_process_scales=keep, nvfp4_marlin_process_global_scale=keep,
                                    nvfp4_marlin_process_scales=lambda s, scale_factor, a_dtype: (s, scale_factor),
                                    _nvfp4_compute_scale_factor=lambda s, dtype: 1.0)  # fmt: skip
        kinds = types.SimpleNamespace(**{name: types.SimpleNamespace(id=name) for name in ("uint8b128", "uint4b8", "float4_e2m1f")})
        activation = types.SimpleNamespace(SILU="silu", SWIGLUOAI_UNINTERLEAVE="swigluoai")
        operators = types.SimpleNamespace(gptq_marlin_repack=self.gptq_marlin_repack, moe_sum=lambda slots, y: y.copy_(slots.sum(dim=1)))
        return [operators, self.layer, layout, fp4, kinds, activation]

    def decoded(self, kind, words, scales, total):
        bits = 8 if kind == "uint8b128" else 4
        codes = torch.stack([(words >> (bits * i)) & (2**bits - 1) for i in range(32 // bits)], dim=1).flatten(0, 1)  # [K, N]
        value = layers.e2m1_values(codes) if kind == "float4_e2m1f" else codes.float() - {"uint8b128": 128, "uint4b8": 8}[kind]
        return (value * scales.float().repeat_interleave(codes.shape[0] // scales.shape[0], 0) * (1 if total is None else total)).t()

    def layer(self, hidden_states, w1, w2, w1_scale, w2_scale, bias1, bias2, topk_weights, topk_ids, quant_type_id, activation, moe_sum,
              output, workspace, global_scale1=None, global_scale2=None, clamp_limit=None, gemm1_alpha=1.0, gemm1_beta=0.0):  # fmt: skip
        self.shapes.append((hidden_states.shape[1], w1.shape[2] // 2))
        act = layers.Activation(gemm1_alpha, gemm1_beta, clamp_limit)
        slots = torch.zeros(*topk_ids.shape, hidden_states.shape[1])
        for t, row in enumerate(topk_ids.tolist()):
            for j, e in enumerate(row):
                first = self.decoded(quant_type_id, w1[e], w1_scale[e], None if global_scale1 is None else global_scale1[e])
                second = self.decoded(quant_type_id, w2[e], w2_scale[e], None if global_scale2 is None else global_scale2[e])
                h = act(first @ hidden_states[t].float() + (0 if bias1 is None else bias1[e].float()))
                slots[t, j] = topk_weights[t, j] * (second @ h + (0 if bias2 is None else bias2[e].float()))
        return moe_sum(slots, output, topk_ids, None)


@pytest.mark.parametrize(("dtype", "shape", "padded"), [("mxfp4", (3, 320, 96, 2), (512, 128)), ("int4", (3, 256, 128, 2), (256, 128)),
                                                        ("int4_32", (3, 192, 96, 2), (256, 128)), ("nvfp4", (3, 192, 96, 2), (256, 128)),
                                                        ("int8", (3, 192, 96, 2), (256, 128))])  # fmt: skip
@pytest.mark.parametrize("gpt_oss", [False, True])
def test_marlin_gets_the_same_weights(monkeypatch, dtype, shape, padded, gpt_oss):
    layer, stand_in = layer_of(dtype, shape, gpt_oss), VllmStandIn(dtype)
    peer = w4.Marlin()
    monkeypatch.setattr(peer, "load", stand_in.modules)
    batch = layers.Batch(layer, 3, 0)
    call = peer.call(peer.prepare(layer), layer, batch)
    assert layers.checked(peer, layer, batch, call, False) < 4e-3  # the output is rounded to bf16
    assert set(stand_in.shapes) == {padded}


@pytest.mark.parametrize("gpt_oss", [False, True])
def test_triton_kernels_get_the_same_weights(monkeypatch, gpt_oss):
    layer = layer_of("mxfp4", (3, 64, 96, 2), gpt_oss)
    stored = types.SimpleNamespace

    def fused(out, x, w1, w2, ids, weights, topk, quant_config, swiglu_alpha, swiglu_limit):
        assert torch.equal(ids, ids.sort(dim=1).values)
        for t in range(x.shape[0]):
            out[t] = 0
            total = torch.zeros(layer.hidden)
            for j in range(topk):
                e = int(ids[t, j])

                def matrix(w):
                    codes, scales = w
                    values = layers.e2m1_values(layers.unpack_nibbles(codes[e]))
                    return values * torch.exp2(scales[e].float() - 127).repeat_interleave(32, -1)

                h = matrix(w1) @ x[t].float() + quant_config.w1_bias[e]
                gate, up = h[0::2].clamp(max=swiglu_limit), h[1::2].clamp(-swiglu_limit, swiglu_limit)
                y = matrix(w2) @ (gate * torch.sigmoid(swiglu_alpha * gate) * (up + 1)) + quant_config.w2_bias[e]
                total += weights[t, j] * y
            out[t] = total
        return out

    modules = [
        stored(make_routing_data=lambda ids, weights, experts: (ids, weights),
               triton_kernel_fused_experts=lambda out, x, w1, w2, ids, weights, **named: fused(out, x, w1, w2, ids, weights, **named)),
        lambda codes, scales: ((codes, scales), None, None),
        lambda **named: stored(**named),
        stored(PrecisionConfig=lambda **named: None, FlexCtx=lambda **named: None),
    ]  # fmt: skip
    peer = w4.TritonKernels()
    monkeypatch.setattr(peer, "load", lambda: modules)
    batch = layers.Batch(layer, 3, 0)
    call = peer.call(peer.prepare(layer), layer, batch)
    assert layers.checked(peer, layer, batch, call, False) < 4e-3


def test_vllm_triton_and_transformers_get_the_layer(monkeypatch):
    given = {}

    def function(x, w13, w2, weights, ids, **options):
        given.update(options)
        return x

    peer = compare_vllm.VllmTriton()
    monkeypatch.setattr(peer, "load", lambda: [types.SimpleNamespace(fused_experts_impl=function)])
    for dtype, names in (("bf16", set()), ("fp8", {"use_fp8_w8a8", "block_shape", "w1_scale", "w2_scale"}),
                         ("int8", {"use_int8_w8a8", "per_channel_quant", "w1_scale", "w2_scale"})):  # fmt: skip
        given.clear()
        layer = layer_of(dtype)
        peer.call(peer.prepare(layer), layer, layers.Batch(layer, 3, 0))()
        assert set(given) == names


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_deep_gemm_products_on_the_host(monkeypatch, dtype):
    """DeepGEMM's functions replaced by their definitions: the peers lay rows out as these expect, and unused rows have the owner -1."""

    def widened(operand):
        if isinstance(operand, tuple):
            codes, scales = operand
            if codes.ndim == 3 and scales.shape[-2] != codes.shape[-2]:  # weights: 128 x 128
                return codes.float() * scales.repeat_interleave(128, 1).repeat_interleave(128, 2)
            return codes.float() * scales.repeat_interleave(128, -1)
        return operand.float()

    def contiguous(a, b, out, owners):
        a, b = widened(a), widened(b)
        for i, e in enumerate(owners.tolist()):
            if e >= 0:
                out[i] = b[e] @ a[i]

    def masked(a, b, out, counts, expected):
        a, b = widened(a), widened(b)
        for e, count in enumerate(counts.tolist()):
            out[e, :count] = a[e, :count] @ b[e].t()

    kinds = {"bf16": "bf16", "fp8": "fp8"}[dtype]
    library = types.SimpleNamespace(get_mn_major_tma_aligned_tensor=lambda v: v, **{
        f"m_grouped_{kinds}_gemm_nt_contiguous": contiguous, f"m_grouped_{kinds}_gemm_nt_masked": masked})  # fmt: skip
    monkeypatch.setattr(compare_vllm, "deep_gemm", lambda: library)
    layer = layer_of(dtype, (4, 256, 128, 2))
    batch = layers.Batch(layer, 30, 0)
    for peer in (peers.DeepGemmContiguous(), peers.DeepGemmMasked()):
        call = peer.call(peer.prepare(layer), layer, batch)
        assert layers.checked(peer, layer, batch, call, False) < 4e-3
    assert peers.DeepGemmContiguous().refuses(layer, 100) and not peers.DeepGemmContiguous().refuses(layer, 128)
    assert peers.DeepGemmMasked().refuses(layer, 1025)


def test_places_of_padded_rows():
    owners = torch.tensor([0, 0, 2, 2, 2], dtype=torch.int32)
    place, indices = peers.padded_places(owners, 3, 4)
    assert place.tolist() == [0, 1, 4, 5, 6] and indices.tolist() == [0, 0, -1, -1, 2, 2, 2, -1]


def test_the_products_of_torch(monkeypatch):
    """Without a GPU: torch's grouped products by definition."""

    def grouped(a, b, offs, **_):
        begin, out = 0, []
        for e, end in enumerate(offs.tolist()):
            out.append(a[begin:end].float() @ b[e].float())
            begin = end
        return torch.cat(out).bfloat16()

    def scaled(a, b, scale_a, scale_b, offs, out_dtype, use_fast_accum):
        wide = grouped(a.float() * scale_a[:, None], b.float() * scale_b[:, None], offs)
        return wide.to(out_dtype)

    monkeypatch.setattr(torch, "_grouped_mm", grouped)
    monkeypatch.setattr(torch, "_scaled_grouped_mm", scaled)
    for peer, dtype in ((peers.GroupedMm(), "bf16"), (peers.ScaledGroupedMm(), "fp8")):
        layer = layer_of(dtype)
        batch = layers.Batch(layer, 20, 0)
        assert layers.checked(peer, layer, batch, peer.call(peer.prepare(layer), layer, batch), False) < 1e-2
