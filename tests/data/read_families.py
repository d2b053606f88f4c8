#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# tests/data/read_families.py: `moe layer` on a tiny checkpoint of every model type with an MoE block, as save_pretrained() of its class in
# transformers writes it here and now: the whole model, with the config.json of its defaults. Exit code 77 where transformers is missing.
#
#     read_families.py TOOL [NAME ...]     the tool's path; the model types named, or all
import contextlib
import io
import json
import pathlib
import re
import subprocess
import sys
import tempfile

from write_families import (BASE, EXPERTS, FAMILIES, GROUPS, HIDDEN, MLA, NARROW, ROOT, SHARED, VERSION, Family, block_of, layers_of,
                            randomise, save_file, torch, transformers)

TOKENS = 9
EXPERTS_4 = {"num_experts": 4, "num_experts_per_tok": 2}
BESIDE_SHARED = BASE | EXPERTS_4 | {"shared_expert_intermediate_size": 24}
LINEAR = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
          "layer_types": ["linear_attention"]}
V3 = BASE | MLA | GROUPS | SHARED | {"n_routed_experts": EXPERTS, "q_lora_rank": 8, "routed_scaling_factor": 1.4}


def without(fields, *names):
    return {k: v for k, v in fields.items() if k not in names}


def family(package, model, config, fields, **options):
    return Family(package, model, config, fields, {}, **options)


# The model types that are not among those of write_families.py.
OTHERS = {
    "afmoe": family("afmoe", "AfmoeForCausalLM", "AfmoeConfig", BASE | EXPERTS_4 | {"num_shared_experts": 2, "route_scale": 1.3},
                    dense_first="num_dense_layers"),
    "aria_text": family("aria", "AriaTextForCausalLM", "AriaTextConfig",
                        NARROW | {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 2}, dense_first=None),
    "axk1": family("axk1", "AXK1ForCausalLM", "AXK1Config", V3),
    "cohere2_moe": family("cohere2_moe", "Cohere2MoeForCausalLM", "Cohere2MoeConfig",
                          NARROW | {"num_experts": 4, "num_shared_experts": 1, "prefix_dense_intermediate_size": 24}),
    "dbrx": family("dbrx", "DbrxForCausalLM", "DbrxConfig",
                   {"vocab_size": 32, "d_model": HIDDEN, "n_heads": 2, "max_seq_len": 64, "pad_token_id": 0,
                    "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0},
                    "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2}},
                   dense_first=None, block="ffn", prefix="transformer.blocks"),
    "deepseek_v2": family("deepseek_v2", "DeepseekV2ForCausalLM", "DeepseekV2Config", V3 | {"topk_method": "group_limited_greedy"},
                          dense_first="first_k_dense_replace"),
    "deepseek_v3": family("deepseek_v3", "DeepseekV3ForCausalLM", "DeepseekV3Config", V3, dense_first="first_k_dense_replace"),
    "deepseek_v4": family("deepseek_v4", "DeepseekV4ForCausalLM", "DeepseekV4Config",
                          without(BASE, "intermediate_size", "num_key_value_heads") | {
                              "q_lora_rank": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "o_groups": 2, "o_lora_rank": 4,
                              "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4, "hc_mult": 2, "swiglu_limit": 1.5,
                              "layer_types": ["sliding_attention"], "num_hash_layers": 0}, dense_first=None),
    "ernie4_5_moe": family("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", "Ernie4_5_MoeConfig",
                           without(BASE, "num_experts_per_tok", "head_dim") | {"moe_k": 2, "moe_num_experts": 4,
                                                                               "moe_num_shared_experts": 2},
                           dense_first="moe_layer_start_index"),
    "gemma4_text": family("gemma4", "Gemma4ForCausalLM", "Gemma4TextConfig",
                          without(BASE, "num_experts_per_tok") | {
                              "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "layer_types": ["full_attention"],
                              "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 32, "global_head_dim": 16},
                          dense_first=None, block=None),
    "glm4_moe_lite": family("glm4_moe_lite", "Glm4MoeLiteForCausalLM", "Glm4MoeLiteConfig", without(V3, "head_dim")),
    "gpt_oss": family("gpt_oss", "GptOssForCausalLM", "GptOssConfig",
                      NARROW | {"num_local_experts": 4, "layer_types": ["full_attention"]}, dense_first=None),
    "granitemoe": family("granitemoe", "GraniteMoeForCausalLM", "GraniteMoeConfig", NARROW | {"num_local_experts": 4},
                         dense_first=None, block="block_sparse_moe"),
    "hunyuan_v1_moe": family("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", "HunYuanMoEV1Config",
                             NARROW | {"num_experts": 4, "moe_topk": 2}, dense_first=None),
    "hy_v3": family("hy_v3", "HYV3ForCausalLM", "HYV3Config", BASE | EXPERTS_4 | {"num_shared_experts": 2, "router_scaling_factor": 1.4}),
    "inkling_text": family("inkling", "InklingForCausalLM", "InklingTextConfig",
                           BASE | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 2}),
    "jamba": family("jamba", "JambaForCausalLM", "JambaConfig",
                    NARROW | {"num_experts": 4, "expert_layer_period": 1, "expert_layer_offset": 0, "attn_layer_period": 1,
                              "attn_layer_offset": 0, "use_mamba_kernels": False}, dense_first=None, block="feed_forward"),
    "jetmoe": family("jetmoe", "JetMoeForCausalLM", "JetMoeConfig",
                     without(NARROW, "num_attention_heads", "head_dim") | {"num_local_experts": 4, "kv_channels": 8}, dense_first=None),
    "laguna": family("laguna", "LagunaForCausalLM", "LagunaConfig",
                     BESIDE_SHARED | {"moe_routed_scaling_factor": 1.3, "moe_router_logit_softcapping": 2.0,
                                      "layer_types": ["full_attention"]}),
    "lfm2_moe": family("lfm2_moe", "Lfm2MoeForCausalLM", "Lfm2MoeConfig", BASE | EXPERTS_4 | {"layer_types": ["full_attention"]},
                       dense_first="num_dense_layers", block="feed_forward"),
    "llama4_text": family("llama4", "Llama4ForCausalLM", "Llama4TextConfig",
                          NARROW | {"num_local_experts": 4, "intermediate_size_mlp": 24}, dense_first=None, block="feed_forward"),
    # Its number of hidden layers counts halves: one layer.
    "longcat_flash": family("longcat_flash", "LongcatFlashForCausalLM", "LongcatFlashConfig",
                            without(BASE, "intermediate_size", "moe_intermediate_size", "num_experts_per_tok") | MLA | {
                                "q_lora_rank": 8, "ffn_hidden_size": 24, "expert_ffn_hidden_size": 16, "moe_topk": 3, "n_routed_experts": 6,
                                "zero_expert_num": 2, "routed_scaling_factor": 1.3}, dense_first=None),
    "mimo_v2_flash": family("mimo_v2_flash", "MiMoV2FlashForCausalLM", "MiMoV2FlashConfig",
                            BASE | GROUPS | {"n_routed_experts": EXPERTS, "v_head_dim": 16, "layer_types": ["full_attention"]}),
    "minimax_m2": family("minimax_m2", "MiniMaxM2ForCausalLM", "MiniMaxM2Config", NARROW | {"num_local_experts": 4}, dense_first=None),
    "minimax_m3_vl_text": family("minimax_m3_vl", "MiniMaxM3VLForCausalLM", "MiniMaxM3VLTextConfig",
                                 NARROW | {"num_local_experts": 4, "dense_intermediate_size": 24, "shared_intermediate_size": 24}),
    "mistral4": family("mistral4", "Mistral4ForCausalLM", "Mistral4Config", without(V3, "head_dim"), dense_first="first_k_dense_replace"),
    "mixtral": family("mixtral", "MixtralForCausalLM", "MixtralConfig", NARROW | {"num_local_experts": 4}, dense_first=None),
    "nemotron_h": family("nemotron_h", "NemotronHForCausalLM", "NemotronHConfig",
                         BASE | GROUPS | {"n_routed_experts": EXPERTS, "moe_shared_expert_intermediate_size": 24, "moe_latent_size": 16,
                                          "layers_block_type": ["moe", "moe"], "routed_scaling_factor": 1.3},
                         dense_first=None, block="mixer"),
    "olmoe": family("olmoe", "OlmoeForCausalLM", "OlmoeConfig", NARROW | {"num_experts": 4}, dense_first=None),
    "openai_privacy_filter": family("openai_privacy_filter", "OpenAIPrivacyFilterForTokenClassification", "OpenAIPrivacyFilterConfig",
                                    NARROW | {"num_local_experts": 4}, dense_first=None),
    "phimoe": family("phimoe", "PhimoeForCausalLM", "PhimoeConfig", NARROW | {"num_local_experts": 4}, dense_first=None),
    "qwen2_moe": family("qwen2_moe", "Qwen2MoeForCausalLM", "Qwen2MoeConfig", BESIDE_SHARED, dense_first="mlp_only_layers"),
    "qwen3_5_moe_text": family("qwen3_5_moe", "Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", BESIDE_SHARED | LINEAR, dense_first=None),
    "qwen3_moe": family("qwen3_moe", "Qwen3MoeForCausalLM", "Qwen3MoeConfig", BASE | EXPERTS_4, dense_first="mlp_only_layers"),
    "qwen3_next": family("qwen3_next", "Qwen3NextForCausalLM", "Qwen3NextConfig", BESIDE_SHARED | LINEAR, dense_first="mlp_only_layers"),
    "qwen3_vl_moe_text": family("qwen3_vl_moe", "Qwen3VLMoeTextModel", "Qwen3VLMoeTextConfig", BASE | EXPERTS_4,
                                dense_first="mlp_only_layers", prefix="layers"),
    "step3p5": family("step3p7", "Step3p7TextModel", "Step3p7TextConfig", BASE | {"n_routed_experts": 4, "num_experts_per_tok": 2},
                      prefix="layers"),
    "switch_transformers": family("switch_transformers", "SwitchTransformersForConditionalGeneration", "SwitchTransformersConfig",
                                  {"vocab_size": 32, "d_model": HIDDEN, "d_kv": 16, "d_ff": 16, "num_heads": 2, "num_layers": 2,
                                   "num_decoder_layers": 1, "num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 1,
                                   "num_experts": 4, "pad_token_id": 0}, dense_first=None, block="layer.1.mlp", prefix="encoder.block"),
    "zaya": family("zaya", "ZayaForCausalLM", "ZayaConfig",
                   without(BASE, "intermediate_size") | {"num_experts": 4, "num_experts_per_tok": 1, "router_hidden_size": 16},
                   dense_first=None),
}


def computed(block, hidden):
    """What the block computes from hidden [T, H]."""
    with torch.no_grad():
        out = block(hidden[None])
    return (out[0] if isinstance(out, tuple) else out).reshape(hidden.shape)


def refused(name, family, layer):
    """Part of the error where the tool does not compute the layer."""
    return "its router adds the router states of layer" if name == "zaya" and layer > 0 else None


def problems_of(tool, name, family, number, folder):
    """Writes the checkpoint and lets the tool compute its MoE layers."""
    sparse = [0, 1, 1] if family.dense_first else [1, 1]
    if family.dense_first == "pyramid_num_routed":
        sparse = [0, 4, 1]  # layers with different numbers of experts
    model, _ = family.build(sparse)
    layers = layers_of(family, model)
    blocks = {i: block_of(family, layer) for i, layer in enumerate(layers) if sparse[i]}
    for i, block in blocks.items():
        randomise(family, block, 4400 + 10 * number + i)
    model.bfloat16()
    with contextlib.redirect_stderr(io.StringIO()):
        model.save_pretrained(folder / "model")
    model.float()
    tensors = {"input_ids": torch.arange(TOKENS) % 4}  # ViTPose's data sets
    for i, block in blocks.items():
        hidden = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(504400 + 10 * number + i))
        tensors |= {f"{i}.in": hidden, f"{i}.out": computed(block, hidden)}
    data = folder / "data.safetensors"
    save_file(tensors, data)
    for i in blocks:
        run = subprocess.run([tool, "layer", "--checkpoint", folder / "model", "--layer", str(i), "--input", data, "--tensor", f"{i}.in",
                              "--output", folder / "out.safetensors", "--expected", f"{data}:{i}.out", "--json"],
                             capture_output=True, text=True)
        if part := refused(name, family, i):
            if run.returncode == 0 or part not in run.stderr:
                yield f"{name}, layer {i}: expected '{part}', got {run.stderr or run.stdout}"
        elif run.returncode != 0:
            yield f"{name}, layer {i}: {run.stderr.strip()}"
        elif not json.loads(run.stdout)["error"] <= 1e-5:
            yield f"{name}, layer {i}: error {json.loads(run.stdout)['error']}"


def unknown():
    """Packages of transformers with an MoE block that no model type here is of, and model types of the library that are not here."""
    packages = {f.package for f in (FAMILIES | OTHERS).values()} | {"doge"}  # Doge's block is not read
    for path in sorted(pathlib.Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        found = re.search(r"^class \w*(Experts|MoE|Moe|MoeMLP|SparseMLP|SparseMoeBlock|SparseMoEBlock)\(", path.read_text(), re.MULTILINE)
        if found and path.parent.name not in packages:
            yield f"transformers has {found[0]}...) in {path.parent.name}, and no model type here is of that package"
    known = re.findall(r'Family\{"([^"]+)"', (ROOT.parents[1] / "include/moe/io/layer_from_config.hpp").read_text())
    for name in sorted({*known} - {"grok-1", "kimi_k2"} - {*FAMILIES, *OTHERS}):
        yield f"{name} is read by the library and missing here"


def main():
    if transformers.__version__ != VERSION:
        print(f"skipped: transformers {transformers.__version__}, the classes are those of {VERSION}")
        return 77
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    tool, *names = sys.argv[1:]
    every = FAMILIES | OTHERS
    problems = [f"{name}: not a family" for name in names if name not in every] if names else [*unknown()]
    for number, (name, family) in enumerate(every.items()):
        if names and name not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            problems += problems_of(tool, name, family, number, pathlib.Path(folder))
    print("\n".join(f"FAILED: {p}" for p in problems), end="\n" if problems else "")
    print(f"{len(names or every)} model types, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
