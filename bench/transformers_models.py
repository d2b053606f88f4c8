#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# bench/transformers_models.py: tokens per second of transformers models with random weights under "moe" and the built-in experts
# implementations, decode (eager and in CUDA graphs) and prefill, after a check of the logits against a float32 eager run.
"""python3 bench/transformers_models.py [--model qwen3|gpt_oss|gpt_oss_mxfp4|all] [--layers 8|fit] [--tiny|--small] [--lines FILE]
                                    [--implementations moe,grouped_mm,batched_mm,eager[,sonicmoe,deepgemm]]
                                    [--attention auto|eager|flex_attention|pieces] [--dtype bfloat16|float32] [--processor-time TURNS]
Needs the package of python/, torch and transformers. One JSON line for each point, then the tables of bench/transformers_table.py; the exit
code is 1 if "moe" is not the fastest at every point or its logits are further from float32's than grouped_mm's. `--model all`: qwen3 and
gpt_oss_mxfp4, a process each. `--layers fit`: as many as three quarters of the free memory hold, at most as many as the model has.
`--attention`: of gpt-oss' prefill, the same for every implementation; auto: where eager attention would have more than 2**31 scores,
flex_attention if it runs and agrees with eager attention, else eager attention in pieces of rows (bench/transformers_attention.py). The
lines and the table say which.

Every implementation has a model of its own with the same weights; none is switched. qwen3's models share one copy of the weights, which no
implementation lays out anew. gpt_oss_mxfp4: under "moe" the experts are the 4-bit codes, under the others the same values in bfloat16, as
transformers widens them where its own mxfp4 kernels are missing. Decode in a CUDA graph has a StaticCache, eager decode the default cache.
A graph is measured if its logits are those of an eager step over the same StaticCache from the same state, up to what other roundings of
the layers' outputs change. What an implementation cannot do is a line with "failed" and the place in transformers or torch that refused;
the points after it run. `--processor-time`: on the host, for a busy machine. The implementations take turns, a call each, and a point has
the least processor time of a call, of all threads of the process; OMP_NUM_THREADS=1 leaves no thread that waits for another. The logits are
not checked then."""
import argparse
import contextlib
import copy
import functools
import json
import math
import pathlib
import statistics
import subprocess
import sys
import time
import traceback

import torch
import transformers
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.masking_utils import create_masks_for_generate

import moe.transformers
from moe.transformers import _mxfp4

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import transformers_attention as attention  # noqa: E402
import transformers_table  # noqa: E402

SIZES = {
    "qwen3": dict(hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
                  num_attention_heads=32, num_key_value_heads=4, head_dim=128, vocab_size=32000),
    "gpt_oss": dict(hidden_size=2880, intermediate_size=2880, num_local_experts=128, num_experts_per_tok=4, num_attention_heads=64,
                    num_key_value_heads=8, head_dim=64, vocab_size=32000),
}
SIZES["gpt_oss_mxfp4"] = SIZES["gpt_oss"]
LAYERS = {"qwen3": 48, "gpt_oss": 36, "gpt_oss_mxfp4": 36}  # of the released models
GPT_OSS = ("gpt_oss", "gpt_oss_mxfp4")
SHARED = ("qwen3",)  # models whose weights every implementation uses where they lie
TINY = dict(hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
            vocab_size=256)
# The experts are a large part of a step on the host: of TINY's, Python and the dispatch of the rest of the model are.
SMALL = {**TINY, "hidden_size": 256, "intermediate_size": 128, "moe_intermediate_size": 128}
SMALLER = {"full": {}, "tiny": TINY, "small": SMALL}
# Of decode in a graph. gpt_oss: the layers of a full sliding window copy a number from the host in each step, which a capture refuses.
GRAPH_PROMPT = {"qwen3": 256, "gpt_oss": 32, "gpt_oss_mxfp4": 32}
MORE_TURNS = 3  # times the turns of --processor-time are taken at most
QUIET_TURNS = 5  # turns after which the least times count as found
WARM = 4  # steps before a measurement: first calls load kernels, choose algorithms and, under "moe", make the runners


def config_of(name, layers, size):
    fields = {**SIZES[name], **SMALLER[size], "num_hidden_layers": layers, "max_position_embeddings": 32768}
    return transformers.Qwen3MoeConfig(**fields) if name == "qwen3" else transformers.GptOssConfig(**fields)


def layers_that_fit(arguments):
    """Three quarters of the free memory, for the layers of all models; embeddings and caches are in the rest."""
    free = torch.cuda.mem_get_info(arguments.device)[0] * 3 // 4
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config_of(arguments.model, 1, arguments.size), dtype=torch.bfloat16)
    layer = sum(p.numel() for p in model.model.layers.parameters()) * 2
    copies = 1 if arguments.model in SHARED else len(arguments.implementations) + 1  # one more while gate and up rows are laid out
    return max(1, min(LAYERS[arguments.model], free // (layer * copies)))


def shared(model, implementation):
    """Another model with the same parameters and an implementation of its own."""
    other = copy.deepcopy(model, {id(p): p for p in [*model.parameters(), *model.buffers()]})
    other.set_experts_implementation(implementation)
    return other.eval()


def make(name, layers, device, size, implementation):
    """A model whose weights depend on its name and sizes alone."""
    config = config_of(name, layers, size)
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.set_experts_implementation(implementation)
    with torch.no_grad():  # large enough that the experts show in the logits
        for number, layer in enumerate(model.model.layers):
            if name == "gpt_oss_mxfp4":
                layer.mlp.experts = mxfp4_experts(layer.mlp.experts, implementation, device, number)
                continue
            for weight in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
                weight.normal_(std=2 * config.hidden_size**-0.5)
    return model.eval()


def mxfp4_experts(experts, implementation, device, seed):
    """gpt-oss' experts with random 4-bit weights: as codes for "moe", else widened."""
    config = experts.config
    generator = torch.Generator(device).manual_seed(seed)
    packed = None
    if implementation == "moe":
        with torch.device(device):
            packed = _mxfp4.Mxfp4Experts(config)
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(experts, name)
        count, columns, rows = weight.shape
        blocks = torch.randint(0, 256, (count, rows, columns // 32, 16), dtype=torch.uint8, device=device, generator=generator)
        exponent = 127 + round(torch.tensor(2 * config.hidden_size**-0.5 / 3.1).log2().item())  # codes have a deviation of 3.1
        scales = torch.full((count, rows, columns // 32), exponent, dtype=torch.uint8, device=device)
        if packed is None:
            weight.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16))
        else:
            packed.load(name, blocks, scales)
            setattr(packed, name + "_bias", getattr(experts, name + "_bias"))
    return experts if packed is None else packed


def distance(got, expected):
    return float((got.double() - expected.double()).abs().max() / expected.double().abs().max())


def synchronize(device):
    if device != "cpu":
        torch.cuda.synchronize()


def clock(device, call, rounds):
    """The times of `rounds` calls in milliseconds."""
    times = []
    for _ in range(rounds):
        synchronize(device)
        begin = time.perf_counter()
        call()
        synchronize(device)
        times.append((time.perf_counter() - begin) * 1e3)
    return times


def failure(error):
    """What an implementation could not do: the first error of the chain and the innermost line of transformers that led to it."""
    while error.__context__ is not None:
        error = error.__context__
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/transformers/" in frame.filename] or frames
    place = f"{ours[-1].filename.rpartition('/')[2]}:{ours[-1].lineno} {ours[-1].name}" if ours else "?"
    return {"failed": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200], "in": place}


@torch.no_grad()
def check(arguments):
    """The logits of a model of one layer beside a float32 eager run: all implementations get the same tokens."""
    ids = tokens(arguments, 2, 32)
    wide = make(arguments.model, 1, arguments.device, arguments.size, "eager").float()
    expected = wide(input_ids=ids, use_cache=False).logits
    del wide
    for name in arguments.implementations:
        model = make(arguments.model, 1, arguments.device, arguments.size, name)
        try:
            logits = model(input_ids=ids, use_cache=False).logits.float()
        except Exception as error:
            refused(arguments, "check", name, error)
            continue
        rows = (logits - expected).norm(dim=-1) / expected.norm(dim=-1)  # the median: of tokens whose experts are the same
        say(arguments, {"model": arguments.model, "check": name, "distance": distance(logits, expected),
                        "median_of_tokens": float(rows.median())})  # fmt: skip


def tokens(arguments, batch, length):
    """Drawn on the host: no capture of a graph, failed or not, has a part in it."""
    generator = torch.Generator().manual_seed(batch * 100003 + length)
    return torch.randint(0, 200, (batch, length), generator=generator).to(arguments.device)


def fill(model, implementation, ids, cache):
    """Runs the prompt. batched_mm copies the weights of every token's experts, so it gets one token a row at a time."""
    for piece in ids.split(1 if implementation == "batched_mm" else ids.shape[1], dim=1):
        cache = model(input_ids=piece, past_key_values=cache, use_cache=True).past_key_values
    return cache


def state_of(cache):
    """A copy of what a cache holds: the tensors and numbers of its layers."""
    return [{name: value.clone() if torch.is_tensor(value) else value for name, value in vars(layer).items()} for layer in cache.layers]


def restore(cache, state):
    """Puts a state back, tensors where they lie: a graph has their addresses."""
    for layer, values in zip(cache.layers, state):
        for name, value in values.items():
            if torch.is_tensor(value):
                getattr(layer, name).copy_(value)
            else:
                setattr(layer, name, value)


@contextlib.contextmanager
def other_roundings(model):
    """Each element of each layer's output moves to a neighbour in bfloat16, up or down as drawn."""

    def nudge(_module, _inputs, output):
        values = output[0] if isinstance(output, tuple) else output
        generator = torch.Generator(values.device).manual_seed(values.shape[0])
        sign = torch.randint(0, 2, values.shape, device=values.device, generator=generator) * 2 - 1
        nudged = (values.float() * (1 + sign * 2.0**-8)).to(values.dtype)
        return (nudged, *output[1:]) if isinstance(output, tuple) else nudged

    handles = [layer.register_forward_hook(nudge) for layer in model.model.layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def masks_of(model, token, cache):
    """The masks of a step where the model's attention is eager: making them copies a number from the host, which a capture refuses. All
    replays have those of the captured step: the same work, of fewer tokens than the cache has. None: the model makes them itself."""
    if model.config._attn_implementation != "eager":
        return None
    return create_masks_for_generate(config=model.config, inputs_embeds=model.get_input_embeddings()(token), attention_mask=None,
                                     past_key_values=cache)


class Step:
    """A step of decode, which adds the same token: eager, or as a CUDA graph over a StaticCache."""

    masks = None

    def __init__(self, model, implementation, ids, token, arguments, graph):
        self.model, self.token = model, token
        config = model.config
        length = ids.shape[1] + 4 * arguments.rounds + 8 * WARM
        self.cache = fill(model, implementation, ids, transformers.StaticCache(config=config, max_cache_len=length) if graph else None)
        self.run = self.eager
        if not graph:
            self.first = clock(arguments.device, self.run, WARM)
            return
        alone = torch.cuda.Stream()
        alone.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(alone):
            self.first = clock(arguments.device, self.run, WARM)
            self.masks = masks_of(model, token, self.cache)
        torch.cuda.current_stream().wait_stream(alone)
        captured = torch.cuda.CUDAGraph()
        before = state_of(self.cache)
        with outcome_of_capture(arguments.device), torch.cuda.graph(captured):
            logits = self.eager()
        self.run = captured.replay
        self.check_replay(logits, before)

    def check_replay(self, logits, before):
        """Refuses a graph whose replay does not give the logits of an eager step over the same cache from the same state `before`. In a
        graph torch may choose other algorithms, which round otherwise: allowed is what other roundings of each layer's output change."""
        self.run()
        got = logits.clone()
        restore(self.cache, before)
        with other_roundings(self.model):
            rounded = self.eager()
        restore(self.cache, before)
        expected = self.eager()
        found, allowed = distance(got, expected), max(2e-2, distance(rounded, expected))
        if not found <= allowed:
            raise RuntimeError(f"the graph's logits are {found:.3g} from those of an eager step, of at most {allowed:.3g}")

    def eager(self):
        return self.model(input_ids=self.token, attention_mask=self.masks, past_key_values=self.cache, use_cache=True).logits


class outcome_of_capture:
    """Around torch.cuda.graph: a capture that fails leaves its stream current and the default generator waiting for its end, so that the
    next random number on the device is an error. Both are put right."""

    def __init__(self, device):
        self.index = torch.device(device).index or 0

    def __enter__(self):
        self.stream = torch.cuda.current_stream()

    def __exit__(self, kind, error, trace):
        if kind is None:
            return
        torch.cuda.set_stream(self.stream)
        fresh = torch.Generator(f"cuda:{self.index}")
        fresh.manual_seed(0)
        torch.cuda.default_generators[self.index].graphsafe_set_state(fresh.graphsafe_get_state())
        torch.cuda.synchronize()


def say(arguments, record):
    arguments.records.append(record)
    print(json.dumps(record), flush=True)


def report(arguments, point, turn, name, rows, times, **more):
    median = statistics.median(times)
    say(arguments, {"model": arguments.model, "layers": arguments.layers, "point": point, "turn": turn, "implementation": name,
                      "ms": round(median, 4), "least_ms": round(min(times), 4), "most_ms": round(max(times), 4),
                    "tokens_per_s": round(rows / median * 1e3, 1), **more})


def refused(arguments, point, name, error):
    say(arguments, {"model": arguments.model, "point": point, "implementation": name, **failure(error)})


def least_times(arguments, point, rows, calls, after=lambda name: None):
    """The least processor time of a call of each implementation, in turns of one call each: other programs only add to it. Turns follow
    until no least time has fallen by 1 % in QUIET_TURNS of them, whoever is first."""
    least = dict.fromkeys(calls, math.inf)
    turn = quiet = 0
    while calls and turn < MORE_TURNS * arguments.processor_time and (turn < arguments.processor_time or quiet < QUIET_TURNS):
        fell = False
        for name, call in calls.items():
            begin = time.process_time()
            call()
            seconds = time.process_time() - begin
            fell = fell or seconds < 0.99 * least[name]
            least[name] = min(least[name], seconds)
            after(name)
        turn, quiet = turn + 1, 0 if fell else quiet + 1
    for name, seconds in least.items():
        report(arguments, point, 0, name, rows, [seconds * 1e3], turns=turn, clock="processor")


@torch.no_grad()
def decode(arguments, models, graph):
    for batch in arguments.batches:
        point = f"decode {batch}{' graph' if graph else ''}"
        prompt = 16 if arguments.size != "full" else GRAPH_PROMPT[arguments.model] if graph else 256
        ids, token = tokens(arguments, batch, prompt), tokens(arguments, batch, 1)
        steps = {}
        if not graph:  # the first step of a process at each length of the default cache takes some 40 ms, whatever its implementation
            name, model = next(iter(models.items()))
            clock(arguments.device, Step(model, name, ids, token, arguments, False).run, 2 * arguments.rounds)
        for name, model in models.items():
            try:
                steps[name] = Step(model, name, ids, token, arguments, graph)
            except Exception as error:
                refused(arguments, point, name, error)
        if arguments.processor_time:
            least_times(arguments, point, batch, {name: step.run for name, step in steps.items()},
                        lambda name: steps[name].cache.crop(-1))  # noqa: B023
            continue
        for turn, names in enumerate((list(steps), list(reversed(steps)))):  # who is first meets each length of the cache first
            for name in names:
                step = steps[name]
                times = clock(arguments.device, step.run, arguments.rounds)
                report(arguments, point, turn, name, batch, times, first_ms=[round(t, 3) for t in step.first])


@torch.no_grad()
def prefill(arguments, models):
    for rows in arguments.prefills:
        ids = tokens(arguments, 1, rows)
        way, more = attention_of(arguments, models, ids)
        with attention.ways()[way](list(models.values())):
            prefill_point(arguments, models, ids, more)


def attention_of(arguments, models, ids):
    """The way of attention, and what the lines say about it."""
    if arguments.model not in GPT_OSS:
        return "eager", {}  # as the model is
    way, why = attention.choose(next(iter(models.values())), ids, arguments.attention, lambda error: failure(error)["failed"])
    if why is not None:
        say(arguments, {"model": arguments.model, "prefill": ids.shape[1], "attention": way, "instead_of": "flex_attention", "why": why})
    return way, {"attention": way}


def prefill_point(arguments, models, ids, more):
    rows = ids.shape[1]
    if arguments.processor_time:
        calls = {name: functools.partial(model.model, input_ids=ids, use_cache=False) for name, model in models.items()}
        least_times(arguments, f"prefill {rows}", rows, calls)
        return
    failed = set()
    for turn in range(2):
        for name, model in models.items():
            if name in failed:
                continue
            call = lambda: model.model(input_ids=ids, use_cache=False)  # noqa: B023, E731
            try:
                first = clock(arguments.device, call, 1 if turn else 2)
            except Exception as error:  # out of memory, kernels that are not installed
                failed.add(name)
                refused(arguments, f"prefill {rows}", name, error)
                continue
            times = clock(arguments.device, call, max(arguments.rounds // 3, 1))
            report(arguments, f"prefill {rows}", turn, name, rows, times, first_ms=[round(t, 3) for t in first], **more)


def measure(arguments):
    if arguments.layers == "fit":
        arguments.layers = layers_that_fit(arguments)
    arguments.layers = int(arguments.layers)
    if not arguments.processor_time:
        check(arguments)
    models = {}
    for name in arguments.implementations:
        if arguments.model in SHARED and models:
            models[name] = shared(next(iter(models.values())), name)
        else:
            model = make(arguments.model, arguments.layers, arguments.device, arguments.size, name)
            models[name] = model.to(getattr(torch, arguments.dtype))
    if arguments.graphs != "only":
        decode(arguments, models, graph=False)
    prefill(arguments, models)
    if arguments.graphs != "none" and arguments.device != "cpu":  # last: what a failed capture leaves behind meets nothing eager
        decode(arguments, models, graph=True)
    if "moe" in models:
        layers = [layer.mlp.experts for layer in models["moe"].model.layers]
        reasons = sorted({str(moe.transformers.why_not(experts)) for experts in layers})
        say(arguments, {"model": arguments.model, "fallbacks": reasons})


def each_model_alone(given):
    """Runs this program for each model, so that each finds the memory free; their records."""
    records = []
    for model in ("qwen3", "gpt_oss_mxfp4"):
        command = [sys.executable, __file__, *given, "--model", model, "--no-table"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
            lines = []
            for line in run.stdout:
                print(line, end="", flush=True)
                lines.append(line)
        records += transformers_table.read(lines)
        if run.returncode != 0:
            records.append({"model": model, "point": "the run", "implementation": "moe", "failed": f"exit code {run.returncode}"})
    return records


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=(*SIZES, "all"), default="qwen3")
    parser.add_argument("--layers", default="8", help="a number, or fit")
    parser.add_argument("--device", default="cuda")
    for name in ("tiny", "small"):
        parser.add_argument(f"--{name}", dest="size", action="store_const", const=name, default="full")
    parser.add_argument("--implementations", default="moe,grouped_mm,batched_mm,eager")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batches", default="1,16,64")
    parser.add_argument("--prefills", default=None, help="rows, 4096,16384 unless given")
    parser.add_argument("--graphs", choices=("both", "only", "none"), default="both")
    parser.add_argument("--attention", choices=("auto", *attention.ways()), default="auto", help="of gpt-oss' prefill")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the models whose times are taken")
    parser.add_argument("--processor-time", type=int, default=0, metavar="TURNS", help="host: least processor time of a call, in turns")
    parser.add_argument("--lines", help="a file for the JSON lines of the run")
    parser.add_argument("--no-table", action="store_true")
    arguments = parser.parse_args()
    if arguments.processor_time and arguments.device != "cpu":
        parser.error("--processor-time: needs --device cpu")
    if arguments.model == "all":
        records = each_model_alone(sys.argv[1:])
    else:
        arguments.records = records = []
        arguments.implementations = arguments.implementations.split(",")
        arguments.batches = [int(n) for n in arguments.batches.split(",") if n]
        given = ("4096,16384" if arguments.size == "full" else "64,128") if arguments.prefills is None else arguments.prefills
        arguments.prefills = [int(n) for n in given.split(",") if n]
        measure(arguments)
    if arguments.lines:
        pathlib.Path(arguments.lines).write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    if arguments.no_table:
        return 0
    text, good = transformers_table.report(records)
    print(text)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
