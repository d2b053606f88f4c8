# SPDX-License-Identifier: Apache-2.0
# tests/python/test_transformers_bench.py: bench/transformers_models.py with tiny models on the host, and its check of a graph: a step that
# is replayed stands for the graph, a right one and wrong ones.
import argparse
import json
import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import moe  # noqa: E402

if not moe.has("onednn"):
    pytest.skip("libmoe was built without oneDNN, so that no experts run on the host", allow_module_level=True)

BENCH = pathlib.Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))
import transformers_models as bench  # noqa: E402

LENGTH = 24


def run(*arguments):
    done = subprocess.run([sys.executable, BENCH / "transformers_models.py", "--tiny", "--device", "cpu", "--layers", "2", "--rounds", "3",
                           "--batches", "1,3", "--prefills", "8", *arguments], capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode in (0, 1), done.stderr  # 1: "moe" was slower in some point
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("model", ["qwen3", "gpt_oss_mxfp4"])
def test_a_tiny_model_on_the_host(model):
    records = run("--model", model, "--implementations", "moe,grouped_mm,eager")
    assert not [record for record in records if "failed" in record]
    measured = {(record["point"], record["implementation"]) for record in records if "point" in record}
    assert measured == {(point, name) for point in ("decode 1", "decode 3", "prefill 8") for name in ("moe", "grouped_mm", "eager")}
    assert records[-1] == {"model": model, "fallbacks": ["None"]}


def test_an_implementation_that_cannot_run_is_a_line():
    """deepgemm needs a GPU and the package kernels: here it refuses every call."""
    records = run("--model", "qwen3", "--implementations", "moe,deepgemm")
    refused = {record["point"] for record in records if "failed" in record and record["implementation"] == "deepgemm"}
    assert refused == {"check", "decode 1", "decode 3", "prefill 8"}
    assert {record["point"] for record in records if record.get("ms")} == refused - {"check"}


@pytest.fixture(params=["qwen3", "gpt_oss"])  # gpt_oss: layers with a sliding window
def step(request):
    """A step over a StaticCache that has a prompt and a step in it."""
    with torch.no_grad():
        model = bench.make(request.param, 2, "cpu", True, "moe")
        ids = bench.tokens(argparse.Namespace(device="cpu"), 3, 8)
        found = bench.Step.__new__(bench.Step)
        found.model, found.token = model, ids[:, :1].clone()
        found.cache = bench.fill(model, "moe", ids, transformers.StaticCache(config=model.config, max_cache_len=LENGTH))
        found.eager()
        yield found


def check(step, replay):
    """The check of a graph that does what `replay` does and leaves the logits where a graph leaves them."""
    before, logits = bench.state_of(step.cache), torch.empty_like(step.eager())
    bench.restore(step.cache, before)
    step.run = lambda: logits.copy_(replay())
    step.check_replay(logits, before)


def test_a_graph_that_does_an_eager_step_is_taken(step):
    found, distance = [], bench.distance
    bench.distance = lambda got, expected: found.append(distance(got, expected)) or found[-1]
    try:
        addresses = [layer.keys.data_ptr() for layer in step.cache.layers]
        check(step, step.eager)
    finally:
        bench.distance = distance
    assert found[0] == 0  # the same numbers, not nearly the same
    assert [layer.keys.data_ptr() for layer in step.cache.layers] == addresses
    assert int(step.cache.get_seq_length()) == 10  # the prompt, a step, and the one that was checked: a graph goes on from here


def test_other_roundings_change_a_little(step):
    before = bench.state_of(step.cache)
    with bench.other_roundings(step.model):
        rounded = step.eager()
    bench.restore(step.cache, before)
    expected = step.eager()
    assert 0 < bench.distance(rounded, expected) < 2e-2
    bench.restore(step.cache, before)
    assert bench.distance(step.eager(), expected) == 0  # the hooks are gone


def test_masks_made_before_a_step_are_those_of_the_model(step):
    step.masks = bench.masks_of(step.model, step.token, step.cache)
    assert (step.masks is None) == (step.model.config.model_type == "qwen3_moe")  # whose attention is not eager
    before = bench.state_of(step.cache)
    got = step.eager()
    bench.restore(step.cache, before)
    step.masks = None
    assert bench.distance(got, step.eager()) == 0


def other_token(step):
    token, step.token = step.token, step.token + 1
    logits = step.eager()
    step.token = token
    return logits


def late(step):  # a step behind the one that it should be
    step.eager()
    return step.eager()


def empty_cache(step):  # the prompt is not there
    for layer in step.cache.layers:
        layer.keys.zero_()
        layer.values.zero_()
    return step.eager()


def one_layer(step):
    layers, step.model.model.layers = step.model.model.layers, step.model.model.layers[:1]
    logits = step.eager()
    step.model.model.layers = layers
    return logits


@pytest.mark.parametrize("wrong", [other_token, late, empty_cache, one_layer, lambda step: torch.full_like(step.eager(), float("nan"))])
def test_a_wrong_graph_is_refused(step, wrong):
    with pytest.raises(RuntimeError, match="the graph's logits are"):
        check(step, lambda: wrong(step))
