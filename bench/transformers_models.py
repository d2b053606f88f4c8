#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# bench/transformers_models.py: tokens per second of transformers models with random weights under "moe" and the built-in experts
# implementations, decode and prefill, after a check of the logits against a float32 eager run.
"""python3 bench/transformers_models.py [--model qwen3|gpt_oss] [--layers 8] [--device cuda] [--tiny] [--implementations moe,grouped_mm]
Needs the package of python/, torch and transformers. One JSON line for each point."""
import argparse
import copy
import json
import statistics
import time

import torch
import transformers

import moe.transformers

SIZES = {
    "qwen3": dict(hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
                  num_attention_heads=32, num_key_value_heads=4, head_dim=128, vocab_size=32000),
    "gpt_oss": dict(hidden_size=2880, intermediate_size=2880, num_local_experts=128, num_experts_per_tok=4, num_attention_heads=64,
                    num_key_value_heads=8, head_dim=64, vocab_size=32000),
}
TINY = dict(hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
            vocab_size=256)


def make(name, layers, device, tiny):
    fields = {**SIZES[name], **(TINY if tiny else {}), "num_hidden_layers": layers, "max_position_embeddings": 32768}
    config = transformers.Qwen3MoeConfig(**fields) if name == "qwen3" else transformers.GptOssConfig(**fields)
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():  # large enough that the experts show in the logits
        for layer in model.model.layers:
            for weight in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
                weight.normal_(std=2 * config.hidden_size**-0.5)
    return model.eval()


def clock(device, call, rounds):
    """The median time of a call in seconds."""
    times = []
    for _ in range(rounds):
        if device != "cpu":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def distance(got, expected):
    return float((got.double() - expected.double()).abs().max() / expected.double().abs().max())


@torch.no_grad()
def check(model, implementations, device):
    """The logits of one layer's model beside a float32 eager run: all implementations get the same tokens."""
    wide = copy.deepcopy(model).float()
    ids = torch.randint(0, model.config.vocab_size, (2, 32), device=device)
    wide.set_experts_implementation("eager")
    expected = wide(input_ids=ids, use_cache=False).logits
    del wide
    for name in implementations:
        model.set_experts_implementation(name)
        print(json.dumps({"check": name, "distance": distance(model(input_ids=ids, use_cache=False).logits.float(), expected)}), flush=True)


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SIZES, default="qwen3")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--implementations", default="moe,grouped_mm")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    implementations = arguments.implementations.split(",")
    check(make(arguments.model, 1, arguments.device, arguments.tiny), implementations, arguments.device)

    model = make(arguments.model, arguments.layers, arguments.device, arguments.tiny)
    prompt = 16 if arguments.tiny else 256
    for batch in (1, 16, 64):
        ids = torch.randint(0, 200, (batch, prompt), device=arguments.device)
        token = torch.randint(0, 200, (batch, 1), device=arguments.device)
        for turn in range(2):  # alternating
            for name in implementations:
                model.set_experts_implementation(name)
                cache = model(input_ids=ids).past_key_values  # each begins at the prompt; a step adds a token

                def step():
                    model(input_ids=token, past_key_values=cache)

                step()
                seconds = clock(arguments.device, step, arguments.rounds)
                print(json.dumps({"model": arguments.model, "layers": arguments.layers, "point": f"decode {batch}", "turn": turn,
                                  "implementation": name, "ms": seconds * 1e3, "tokens_per_s": batch / seconds}), flush=True)
    for rows in (64, 128) if arguments.tiny else (4096, 16384):
        ids = torch.randint(0, 200, (1, rows), device=arguments.device)

        def prefill():
            model.model(input_ids=ids, use_cache=False)

        for turn in range(2):
            for name in implementations:
                model.set_experts_implementation(name)
                prefill()
                seconds = clock(arguments.device, prefill, max(arguments.rounds // 3, 1))
                print(json.dumps({"model": arguments.model, "layers": arguments.layers, "point": f"prefill {rows}", "turn": turn,
                                  "implementation": name, "ms": seconds * 1e3, "tokens_per_s": rows / seconds}), flush=True)
    layers = [layer.mlp.experts for layer in model.model.layers]
    print(json.dumps({"fallbacks": sorted({str(moe.transformers.why_not(experts)) for experts in layers})}), flush=True)


if __name__ == "__main__":
    main()
