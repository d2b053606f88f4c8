# SPDX-License-Identifier: Apache-2.0
# tests/python/families.py: a tiny random model of every transformers family whose experts class uses the experts interface.
"""`names()` lists the families of the installed transformers; `build(name)` makes one tiny model of a family with random weights."""

from __future__ import annotations

import glob
import importlib
import os
import re

import torch
import transformers

# What a field becomes where the configuration has it and it is not None.
_SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "max_position_embeddings": 128, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_group": 2, "topk_group": 1, "num_expert_group": 2,
    "first_k_dense_replace": 0, "shared_expert_intermediate_size": 32, "shared_experts_intermediate_size": 32, "sliding_window": 16,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2,
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8,
    "n_groups": 2, "chunk_size": 16, "mamba_dt_rank": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8,
    "n_shared_experts": 1, "num_shared_experts": 1, "global_head_dim": 16, "num_global_key_value_heads": 2,
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 128, "num_nextn_predict_layers": 0, "router_hidden_size": 16,
    "linear_head_dim": 16, "linear_num_heads": 4, "num_experts": 8, "n_routed_experts": 8, "num_local_experts": 8,
    "moe_num_experts": 8, "num_experts_per_tok": 2, "top_k": 2, "moe_topk": 2, "moe_k": 2, "num_experts_per_token": 2,
    "moe_top_k": 2, "num_dense_layers": 0, "mlp_only_layers": [],
}
_MLA = {"num_key_value_heads": 4, "head_dim": None}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
# What a family needs beside it. None: leave the field to the configuration's default. "class": the model class, where it is not
# the family's ForCausalLM.
_FAMILIES: dict[str, dict] = {
    "axk1": _MLA, "axk2": _MLA, "deepseek_v2": {**_MLA, "num_experts_per_tok": 2}, "deepseek_v3": _MLA, "deepseek_v32": _MLA,
    "glm4_moe_lite": _MLA,
    "glm_moe_dsa": _MLA,
    "mistral4": {"num_key_value_heads": 4, "head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                 "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64}},
    "beam": {"mlp_layer_types": ["sparse", "sparse"], "layer_types": ["sliding_attention", "full_attention"]},
    "flint": {"layer_types": ["full_attention", "sliding_attention"]},
    "gemma4": {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32,
               "layer_types": ["sliding_attention", "full_attention"], "per_layer_config": None},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note": {"num_key_value_heads": 4, "mlp_layer_types": ["sparse", "sparse"], "layer_types": ["indexed_attention",
                   "sliding_attention"], "head_dim": None},
    "hunyuan_v1_moe": {"head_dim": 16},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"]},
    "zaya": {"num_experts_per_tok": 1},
    "bailing_hybrid": {"num_key_value_heads": 4, "head_dim": None},
    "deepseek_ocr2": {"class": "DeepseekOcr2TextModel", "num_experts_per_tok": 2, "mlp_layer_types": ["dense", "sparse"],
                      "num_key_value_heads": 4},
    "diffusion_gemma": {"class": "DiffusionGemmaEncoderTextModel", "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32,
                        "layer_types": ["sliding_attention", "full_attention"]},
    "ernie4_5_vl_moe": {"class": "Ernie4_5_VLMoeTextModel", "moe_intermediate_size": [32, 16], "mlp_layer_types": ["dense", "sparse"],
                        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 4]}},
    "glm4v_moe": {"class": "Glm4vMoeTextModel", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                  "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}},
    "glm5_next": {"class": "Glm5NextTextModel", "num_key_value_heads": 4, "qk_rope_head_dim": 0, "head_dim": None,
                  "mlp_layer_types": ["sparse", "sparse"], "layer_types": ["linear_attention", "linear_attention"],
                  "indexer_types": ["full", "full"], "index_kpool": 4},
    "mistral_large4": {"class": "MistralLarge4TextModel", **_MLA, **_ROPE, "mlp_layer_types": ["sparse", "sparse"],
                       "layer_types": ["indexed_attention", "indexed_attention"], "indexer_types": ["full", "full"],
                       "no_rope_layers": [1, 1], "kv_source_layers": [0, 1]},
    "muse_spark": {"class": "MuseSparkTextModel"},
    "openai_privacy_filter": {"class": "OpenAIPrivacyFilterForTokenClassification"},
    "qwen3_omni_moe": {"class": "Qwen3OmniMoeThinkerTextModel"},
    "qwen3_vl_moe": {"class": "Qwen3VLMoeTextModel"},
    "unlimited_ocr": {"class": "UnlimitedOcrTextModel"},
}


def names() -> list[str]:
    """The families that have a class decorated with `use_experts_implementation`, by folder name."""
    base = os.path.dirname(transformers.__file__)
    found = set()
    for path in glob.glob(base + "/models/*/modeling_*.py"):
        with open(path, encoding="utf-8") as source:
            if re.search(r"^@use_experts_implementation", source.read(), re.MULTILINE):
                found.add(os.path.basename(os.path.dirname(path)))
    return sorted(found)


def model_class(name: str) -> type:
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    wanted = _FAMILIES.get(name, {}).get("class")
    if wanted is None:
        wanted = next(c for c in dir(module) if c.endswith("ForCausalLM") and getattr(module, c).__module__ == module.__name__)
    return getattr(module, wanted)


def config(name: str, **fields):
    """A small configuration of the family; fields: others than those above."""
    cls = model_class(name).config_class
    default = cls().to_dict()
    small = {key: value for key, value in _SMALL.items() if default.get(key) is not None}
    small.update(_FAMILIES.get(name, {}), **fields)
    small.pop("class", None)
    return cls(**{key: value for key, value in small.items() if value is not None})


def build(name: str, **fields) -> torch.nn.Module:
    """A tiny float32 model in eval mode. Its expert weights are large enough that an error in the experts shows in the logits."""
    torch.manual_seed(7)
    model = model_class(name)(config(name, **fields)).eval().float()
    with torch.no_grad():
        for module in experts(model):
            for key, parameter in module.named_parameters():
                parameter.copy_(torch.randn_like(parameter) * (0.1 if key.endswith("bias") else 0.3))
        for key, table in model.named_buffers():  # a token's experts by its id: different ones, as in a checkpoint
            if key.endswith("tid2eid"):
                table.copy_(torch.stack([torch.randperm(8)[: table.shape[1]] for _ in range(table.shape[0])]))
    return model


def experts(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [m for m in model.modules() if hasattr(m, "_apply_gate") and hasattr(m, "down_proj")]


def logits(model: torch.nn.Module, sequence: int | None = None) -> torch.Tensor:
    """What the model answers to a fixed input of two sequences, or to one of them: its logits, or its last hidden state where it has no
    head. float32 on the host."""
    ids = torch.tensor([[5, 17, 99, 3, 42, 7, 64, 30, 11], [8, 8, 100, 77, 23, 9, 12, 55, 3]], device=model.device)
    ids = ids if sequence is None else ids[sequence : sequence + 1]
    with torch.no_grad():
        answer = model(input_ids=ids, use_cache=False)
    return (answer.logits if hasattr(answer, "logits") else answer.last_hidden_state).float().cpu()
