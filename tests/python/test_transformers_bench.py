# SPDX-License-Identifier: Apache-2.0
# tests/python/test_transformers_bench.py: bench/transformers_models.py with tiny models on the host, whose tables go to the folder
# MOE_REPORTS if that is set, its attention of long prompts, and its check of a graph: a step that is replayed stands for the graph, a right
# one and wrong ones.
import argparse
import contextlib
import json
import os
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
import transformers_attention as attention  # noqa: E402
import transformers_models as bench  # noqa: E402
import transformers_table  # noqa: E402

LENGTH = 24


def run(*arguments, size="--tiny", **environment):
    done = subprocess.run([sys.executable, BENCH / "transformers_models.py", size, "--device", "cpu", "--layers", "2", "--rounds", "3",
                           "--batches", "1,3", "--prefills", "8", *arguments], env={**os.environ, **environment}, capture_output=True,
                          text=True, check=False)  # fmt: skip
    assert done.returncode in (0, 1), done.stderr  # 1: "moe" was slower in some point
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


IMPLEMENTATIONS = ("moe", "grouped_mm", "batched_mm", "eager")


def keep(name, text):
    """Prints a table and puts it into the folder MOE_REPORTS."""
    print(text)
    if os.environ.get("MOE_REPORTS"):
        folder = pathlib.Path(os.environ["MOE_REPORTS"])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"transformers_{name}.md").write_text(text + "\n", encoding="utf-8")


@pytest.mark.parametrize("model", ["qwen3", "gpt_oss_mxfp4"])
def test_a_tiny_model_on_the_host(model):
    """Every implementation at every point; the logits of "moe" are no further from a float32 eager run than those of grouped_mm. These
    times decide nothing on a busy host: the table has them."""
    records = run("--model", model, "--implementations", ",".join(IMPLEMENTATIONS))
    keep(model, transformers_table.report(records)[0])
    assert not [record for record in records if "failed" in record]
    measured = {(record["point"], record["implementation"]) for record in records if "point" in record}
    assert measured == {(point, name) for point in ("decode 1", "decode 3", "prefill 8") for name in IMPLEMENTATIONS}
    checks = {record["check"]: record for record in records if "check" in record}
    assert set(checks) == set(IMPLEMENTATIONS)
    assert 0 < checks["moe"]["median_of_tokens"] <= 1.05 * checks["grouped_mm"]["median_of_tokens"] < 0.02
    # The largest is that of a token whose router's rounding gives it other experts, under every implementation.
    assert checks["moe"]["distance"] <= 1.05 * checks["grouped_mm"]["distance"]
    assert records[-1] == {"model": model, "fallbacks": ["None"]}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("model", ["qwen3", "gpt_oss_mxfp4"])
def test_moe_is_the_fastest_on_the_host(model, dtype):
    """A whole step of the model has less processor time under "moe" than under each of the others, at every point: decode of few rows,
    where Python and the dispatch of operators count most, decode of more, prefill. One thread: threads that wait for each other on a busy
    host would count. Sizes at which experts count: of a tiny model's step they are an eighth, the rest is the same code for all."""
    records = run("--model", model, "--dtype", dtype, "--implementations", ",".join(IMPLEMENTATIONS), "--batches", "1,4,16", "--prefills",
                  "16,64", "--processor-time", "10", size="--small", OMP_NUM_THREADS="1")  # fmt: skip
    title = f"### {model}, {dtype}: least processor time, one thread, milliseconds (tokens a second)"
    keep(f"{model}_{dtype}_processor_time", f"{title}\n\n{transformers_table.table(records)}\n")
    assert not [record for record in records if "failed" in record]
    measured = {(record["point"], record["implementation"]) for record in records if "point" in record}
    points = ("decode 1", "decode 4", "decode 16", "prefill 16", "prefill 64")
    assert measured == {(point, name) for point in points for name in IMPLEMENTATIONS}
    verdicts = transformers_table.speeds(records)
    assert len(verdicts) == len(IMPLEMENTATIONS) - 1
    assert not [text for holds, text in verdicts if not holds]
    assert records[-1] == {"model": model, "fallbacks": ["None"]}


def test_an_implementation_that_cannot_run_is_a_line():
    """deepgemm needs a GPU and the package kernels: here it refuses every call."""
    records = run("--model", "qwen3", "--implementations", "moe,deepgemm")
    refused = {record["point"] for record in records if "failed" in record and record["implementation"] == "deepgemm"}
    assert refused == {"check", "decode 1", "decode 3", "prefill 8"}
    assert {record["point"] for record in records if record.get("ms")} == refused - {"check"}


@pytest.fixture(scope="module")
def gpt_oss():
    """In float32, with sinks that matter: the model's own are near 0."""
    with torch.no_grad():
        model = bench.make("gpt_oss", 2, "cpu", "tiny", "eager").float()
        for layer in model.model.layers:
            layer.self_attn.sinks.normal_(std=2)
    return model


IDS = torch.randint(0, 200, (1, 150), generator=torch.Generator().manual_seed(1))  # more than a sliding window


@pytest.fixture
def few_scores(monkeypatch):
    monkeypatch.setattr(attention, "MOST_SCORES", 1000)
    monkeypatch.setattr(attention, "PIECE", 4 * 150 * 40)  # 40 rows, and 30 in the last piece
    with torch._dynamo.config.patch(disable=True):  # on the host a mask of flex_attention takes minutes to compile
        yield


def test_eager_attention_in_pieces_is_the_same(gpt_oss, monkeypatch, few_scores):
    calls = []
    eager = attention.modeling_gpt_oss.eager_attention_forward
    monkeypatch.setattr(attention.modeling_gpt_oss, "eager_attention_forward", lambda *given, **more: calls.append(given[1].shape[2])
                        or eager(*given, **more))  # fmt: skip
    with torch.no_grad():
        expected = gpt_oss(input_ids=IDS, use_cache=False).logits
        assert calls == [150, 150]
        with attention.pieces([gpt_oss]):
            got = gpt_oss(input_ids=IDS, use_cache=False).logits
        assert calls[2:] == 2 * [40, 40, 40, 30]
    assert bench.distance(got, expected) < 1e-5
    assert torch.equal(gpt_oss(input_ids=IDS, use_cache=False).logits, expected)


def choose(model):
    return attention.choose(model, IDS, "auto", lambda error: str(error))


def test_attention_is_the_models_own_where_all_scores_fit(gpt_oss):
    assert choose(gpt_oss) == ("eager", None)


def test_without_flex_attention_pieces_are_taken(gpt_oss, few_scores):
    """On the host transformers' flex_attention refuses gpt-oss' sinks."""
    way, why = choose(gpt_oss)
    assert way == "pieces" and "sinks" in why
    assert gpt_oss.config._attn_implementation == "eager"


def flex_attention_by(monkeypatch, forward):
    @contextlib.contextmanager
    def replaced(_models):
        with monkeypatch.context() as inner:
            inner.setattr(attention.modeling_gpt_oss, "eager_attention_forward", forward)
            yield

    monkeypatch.setattr(attention, "ways", lambda: {"eager": attention.as_it_is, "flex_attention": replaced, "pieces": attention.pieces})


def test_attention_that_agrees_is_taken(gpt_oss, monkeypatch, few_scores):
    eager = attention.modeling_gpt_oss.eager_attention_forward

    def rounded(*given, **more):
        return eager(*given, **more)[0] * 1.03, None

    flex_attention_by(monkeypatch, rounded)
    assert choose(gpt_oss) == ("flex_attention", None)


def without_sinks(eager, module, *given, **more):
    sinks, module.sinks = module.sinks, torch.nn.Parameter(torch.full_like(module.sinks, -1e4))
    try:
        return eager(module, *given, **more)
    finally:
        module.sinks = sinks


def without_a_mask(eager, module, query, key, value, mask, *given, **more):
    return eager(module, query, key, value, torch.zeros_like(mask), *given, **more)


@pytest.mark.parametrize("wrong", [without_sinks, without_a_mask])
def test_wrong_attention_is_not_taken(gpt_oss, monkeypatch, few_scores, wrong):
    eager = attention.modeling_gpt_oss.eager_attention_forward
    flex_attention_by(monkeypatch, lambda *given, **more: wrong(eager, *given, **more))
    way, why = choose(gpt_oss)
    assert way == "pieces" and "a row is" in why


def test_the_table_says_which_attention(monkeypatch, few_scores):
    """The same for every implementation."""
    arguments = argparse.Namespace(model="gpt_oss", device="cpu", size="tiny", rounds=3, prefills=[16, 150], attention="auto", layers=2,
                                   processor_time=0, records=[])  # fmt: skip
    with torch.no_grad():
        models = {name: bench.make("gpt_oss", 2, "cpu", "tiny", name) for name in ("moe", "grouped_mm")}
    monkeypatch.setattr(attention, "MOST_SCORES", 4 * 16 * 16)
    bench.prefill(arguments, models)
    used = {(record["point"], record["implementation"], record["attention"]) for record in arguments.records if "point" in record}
    assert used == {(point, name, way) for point, way in (("prefill 16", "eager"), ("prefill 150", "pieces")) for name in models}
    text, _ = transformers_table.report(arguments.records)
    assert "prefill 150: attention by pieces under every implementation; flex_attention: ValueError: Attention sinks" in text
    assert "prefill 16: attention" not in text


@pytest.fixture(params=["qwen3", "gpt_oss"])  # gpt_oss: layers with a sliding window
def step(request):
    """A step over a StaticCache that has a prompt and a step in it."""
    with torch.no_grad():
        model = bench.make(request.param, 2, "cpu", "tiny", "moe")
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
