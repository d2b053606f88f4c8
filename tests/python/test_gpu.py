# SPDX-License-Identifier: Apache-2.0
# tests/python/test_gpu.py: the package with torch and CuPy arrays on a GPU: streams, CUDA graphs, transformers' implementation.
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import moe  # noqa: E402
from moe import _experts  # noqa: E402
from reference import Layer, distance  # noqa: E402

if not moe.has("cuda"):
    pytest.skip("libmoe was built without CUDA", allow_module_level=True)


def layer_on_gpu(rows=33):
    layer = Layer(rows=rows, hidden=256, intermediate=128, num_experts=8, topk=2)
    hidden, w13, w2 = (torch.from_numpy(a).cuda().bfloat16() for a in (layer.hidden, layer.w13, layer.w2))
    layer.hidden, layer.w13, layer.w2 = (a.float().cpu().numpy() for a in (hidden, w13, w2))
    return layer, hidden, torch.from_numpy(layer.ids).cuda().long(), torch.from_numpy(layer.weights).cuda(), w13, w2


def test_experts():
    layer, *arguments = layer_on_gpu()
    output = moe.experts(*arguments)
    assert output.is_cuda and output.dtype == torch.bfloat16
    assert distance(output.float().cpu().numpy(), layer.expected()) < 1.5e-2


def test_the_current_stream_is_used():
    layer, hidden, ids, weights, w13, w2 = layer_on_gpu()
    expected = moe.experts(hidden, ids, weights, w13, w2)
    torch.cuda.synchronize()
    late = torch.zeros_like(hidden)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # a call on another stream would read zeros
        late.copy_(hidden)
        output = moe.experts(late, ids, weights, w13, w2)
    stream.synchronize()
    assert torch.equal(output, expected)


def test_a_cuda_graph_follows_its_inputs():
    layer, hidden, ids, weights, w13, w2 = layer_on_gpu()
    ids = ids.int()
    runner = moe.Runner(w13, w2, topk=2, max_tokens=64)
    runner.forward_routed(hidden, ids, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = runner.forward_routed(hidden, ids, weights)
    hidden.mul_(-1)
    ids.copy_(ids.flip(0))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(output, runner.forward_routed(hidden, ids, weights))


def test_torch_compile_with_cuda_graphs():
    """The operator of `moe.experts` inside the graphs that torch.compile captures: replays follow inputs, no call makes a runner."""
    pytest.importorskip("triton", reason="triton, which torch.compile needs on a GPU, is not installed")
    from torch._dynamo.utils import counters

    layer, hidden, ids, weights, w13, w2 = layer_on_gpu()

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w13, self.w2 = torch.nn.Parameter(w13), torch.nn.Parameter(w2)

        def forward(self, hidden, ids, weights):
            return moe.experts(hidden, ids, weights, self.w13, self.w2) * 2

    block = Block()
    compiled = torch.compile(block, mode="reduce-overhead", fullgraph=True)
    skipped = counters["inductor"]["cudagraph_skips"]
    with torch.no_grad():
        expected = block(hidden, ids, weights)
        for factor in (1, -1, 1, 2, -2):  # compiled, captured, replayed three times
            torch.compiler.cudagraph_mark_step_begin()
            got = compiled(hidden * factor, ids.roll(factor, 0), weights).clone()
            assert torch.equal(got, block(hidden * factor, ids.roll(factor, 0), weights)), factor
    assert not torch.equal(got, expected)
    assert counters["inductor"]["cudagraph_skips"] == skipped
    assert sum(len(entry.runners) for entry in _experts._cache.values() if entry.references[0]() is block.w13) == 1


def test_ids_of_int64_are_checked_before_they_are_narrowed():
    layer, hidden, ids, weights, w13, w2 = layer_on_gpu()
    assert ids.dtype == torch.int64
    runner = moe.Runner(w13, w2, topk=2, max_tokens=64)
    output = runner.forward_routed(hidden, ids, weights)
    assert torch.equal(output, runner.forward_routed(hidden, ids.int(), weights))
    ids[3, 1] += 2**32
    without = runner.forward_routed(hidden, ids, weights)
    with pytest.raises(moe.ArgumentError, match=rf"topk_ids\[3, 1\]: {int(ids[3, 1])} is out of range"):
        runner.wait()
    ids[3, 1] = -1
    assert torch.equal(without, runner.forward_routed(hidden, ids, weights))


def test_waiting_for_a_stream():
    from moe._ffi import library

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(400_000_000)
    with pytest.raises(moe.TimeoutError, match="not finished after"):
        library.stream_wait(0, stream.cuda_stream, 10)
    library.stream_wait(0, stream.cuda_stream, 0)
    assert stream.query()
    with pytest.raises(moe.Error, match="cuda:99|device"):
        library.stream_wait(99, 0, 0)


def layers_that_share(count=3, rows=200):
    """Runners of one scope with weights of their own, their inputs, and what runners with memory of their own give."""
    made = []
    for seed in range(count):
        _, hidden, ids, weights, w13, w2 = layer_on_gpu(rows)
        w13, w2 = w13 * (1 + seed), w2.roll(seed, 0)
        runner = moe.Runner(w13, w2, topk=2, max_tokens=4096, workspace_of=made[0][0] if made else None)
        alone = moe.Runner(w13, w2, topk=2, max_tokens=4096)
        made.append((runner, hidden, ids, weights, alone.forward_routed(hidden, ids, weights), alone.info["bytes"]))
    torch.cuda.synchronize()
    return made


def test_runners_that_share_a_workspace():
    made = layers_that_share()
    if made[0][0].info["experts"] != "hopper_contiguous":
        pytest.skip("no Hopper GPU: these experts share nothing")
    assert made[0][0].info["bytes"] >= made[0][5] and all(m[0].info["bytes"] < made[0][5] // 2 for m in made[1:])
    for _ in range(3):
        for runner, hidden, ids, weights, expected, _ in made:
            assert torch.equal(runner.forward_routed(hidden, ids, weights), expected)
    made[0][0].close()  # the others keep the memory
    for runner, hidden, ids, weights, expected, _ in made[1:]:
        assert torch.equal(runner.forward_routed(hidden, ids, weights), expected)


def test_runners_that_share_a_workspace_on_several_streams():
    made = layers_that_share()
    streams = [torch.cuda.Stream() for _ in made]
    outputs = []
    for round_ in range(20):
        for stream, (runner, hidden, ids, weights, _, _) in zip(streams, made):
            with torch.cuda.stream(stream):
                if (round_ + runner.key) % 4 == 0:
                    torch.cuda._sleep(1_000_000)  # the next stream would run ahead
                outputs.append(runner.forward_routed(hidden, ids, weights))
    torch.cuda.synchronize()
    for i, output in enumerate(outputs):
        assert torch.equal(output, made[i % len(made)][4]), i


def test_layers_of_experts_hold_one_workspace():
    inputs = [layer_on_gpu(3000)[1:] for _ in range(3)]
    alone = [moe.Runner(w13, w2, topk=2, max_tokens=4096) for _, _, _, w13, w2 in inputs]
    if alone[0].info["experts"] != "hopper_contiguous":
        pytest.skip("no Hopper GPU: these experts share nothing")
    expected = [runner.forward_routed(h, i, w) for runner, (h, i, w, _, _) in zip(alone, inputs)]
    moe.clear_cache()
    for arguments, want in zip(inputs, expected):
        assert torch.equal(moe.experts(*arguments), want)
    held = sum(runner.info["bytes"] for entry in _experts._cache.values() for runner in entry.runners)
    assert held < 2 * alone[0].info["bytes"], (held, alone[0].info["bytes"])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_a_gpu_that_is_not_the_current_one():
    _, *arguments = layer_on_gpu()
    expected = moe.experts(*arguments).cpu()
    with torch.cuda.device(1):
        there = [tensor.to("cuda:1") for tensor in arguments]
        moe.experts(*there)
    for current in (0, 1, 0):
        with torch.cuda.device(current):
            output = moe.experts(*there)
            assert output.device.index == 1 and torch.equal(output.cpu(), expected) and torch.cuda.current_device() == current


def test_cupy():
    cupy = pytest.importorskip("cupy", reason="cupy is not installed")
    layer = Layer(rows=9, hidden=256, intermediate=128)
    hidden, w13, w2 = (cupy.asarray(a).astype(np.float16) for a in (layer.hidden, layer.w13, layer.w2))
    with cupy.cuda.Stream(non_blocking=True) as stream:
        output = moe.experts(hidden, cupy.asarray(layer.ids), cupy.asarray(layer.weights), w13, w2)
        stream.synchronize()
    assert isinstance(output, cupy.ndarray) and distance(cupy.asnumpy(output), layer.expected()) < 5e-3


def test_transformers_on_a_gpu():
    pytest.importorskip("transformers", reason="transformers is not installed")
    import families
    import moe.transformers as adapter

    model = families.build("qwen3_moe").bfloat16().cuda()
    model.set_experts_implementation("grouped_mm")
    ids = torch.randint(0, 100, (2, 9), device="cuda")
    with torch.no_grad():
        theirs = model(input_ids=ids).logits.float()
        model.set_experts_implementation("moe")
        ours = model(input_ids=ids).logits.float()
    assert {adapter.why_not(module) for module in families.experts(model)} == {None}
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < 5e-2
