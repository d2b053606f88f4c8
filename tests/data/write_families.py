#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# tests/data/write_families.py: block files, tiny checkpoints and family_fields.json entries, computed by the model classes of transformers.
#
#     write_families.py            writes the files of every family below into this folder
#     write_families.py --check    computes them again and compares; exit code 77 where transformers cannot be imported
#     write_families.py NAME ...   writes those of the families named
#
# The files were written with transformers 5.23.0 and torch 2.15.0. A block file has float32 weights and what the model's own MoE block
# computes from them; a checkpoint holds the MoE layers that save_pretrained() of the whole model wrote in bfloat16, and in
# moe_io.safetensors what the blocks compute from the widened weights.
import argparse
import contextlib
import copy
import importlib
import io
import json
import pathlib
import re
import sys
import tempfile

try:
    import torch
    import transformers
    from safetensors import safe_open
    from safetensors.torch import save_file
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

ROOT = pathlib.Path(__file__).resolve().parent
VERSION = "5.23.0"
TOKENS = 23
HIDDEN, EXPERTS, TOPK = 32, 8, 3

BASE = {"vocab_size": 32, "hidden_size": HIDDEN, "intermediate_size": 48, "moe_intermediate_size": 16, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "num_experts_per_tok": TOPK}
MLA = {"kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
INDEXED = {"index_topk": 4, "index_head_dim": 8, "index_n_heads": 2}
GROUPS = {"n_group": 4, "topk_group": 2}
SHARED = {"n_shared_experts": 2}

# What a block file's metadata says of a family, beside the fields that are read off its configuration.
SIGMOID = {"routing_family": "biased_sigmoid", "scoring_func": "sigmoid", "correction_bias": "selection_only", "renorm_eps": "1e-20"}
GROUPED_SIGMOID = SIGMOID | {"n_group": "4", "topk_group": "2", "group_score": "top2_sum", "masked_group_fill": "-inf"}
DEEPSEEK_V2 = {"routing_family": "deepseek_v2", "scoring_func": "softmax", "norm_topk_prob": "false", "n_group": "4", "topk_group": "2",
               "group_score": "max", "masked_group_fill": "0", "topk_method": "group_limited_greedy", "routed_scaling_factor": "1.6",
               "shared_experts": "2", "shared_expert_intermediate_size": "32"}
SOFTMAX = {"routing_family": "softmax_topk", "scoring_func": "softmax"}
QWEN_SHARED = SOFTMAX | {"norm_topk_prob": "true", "shared_experts": "1", "shared_expert_intermediate_size": "24",
                         "shared_expert_gate": "sigmoid"}
TWO_SHARED = {"shared_experts": "2", "shared_expert_intermediate_size": "32"}
FUSED = {"layout": "fused [E,2I,H] gate rows first; down [E,H,I]"}
UNGATED = {"glu": "none: fc2(act(fc1(x)))", "expert_bias": "true"}
DEEPSEEK_V3 = GROUPED_SIGMOID | TWO_SHARED | {"norm_topk_prob": "true"}
GRANITE = {"routing_family": "topk_softmax", "scoring_func": "softmax", "selection": "topk_of_logits", "norm_topk_prob": "true",
           "layout": "input_linear [E,2I,H] gate rows first; output_linear [E,H,I]", "shared_experts": "1",
           "shared_expert_intermediate_size": "24"}
CLAMPED = {"glu": "silu(min(gate,limit))*clamp(up,-limit,limit)", "swiglu_limit": "1.5"}


class Family:
    """One model type. `dense_first`: how the configuration of the checkpoint makes its first layer dense; None where it cannot."""

    def __init__(self, package, model, config, fields, metadata, dense_first="mlp_layer_types", block="mlp", prefix="model.layers",
                 whole=None, gate_up=1.0, seed=0, wrap=None, narrow=None, experts=EXPERTS, topk=TOPK,
                 described=True):
        self.package, self.model, self.config_class, self.fields, self.metadata = package, model, config, fields, metadata
        self.dense_first, self.block, self.prefix, self.whole, self.gate_up = dense_first, block, prefix, whole, gate_up
        self.wrap = wrap  # name of a class below that makes the block one of hidden states alone, with a router
        self.narrow = narrow  # fields of the checkpoint alone: its experts are narrower than those of the block file
        self.experts, self.topk = experts, topk
        self.described = described  # family_fields.json has an entry that is made here
        self.seed = seed  # the first of the block file's ten seeds that is tried: 4 bits must leave enough of the output

    def module(self, kind):
        return importlib.import_module(f"transformers.models.{self.package}.{kind}_{self.package}")

    def config(self, sparse, narrow=False):
        """A configuration whose layer i is an MoE layer where sparse[i] is."""
        fields = copy.deepcopy(self.fields | (self.narrow or {} if narrow else {}))
        fields["num_hidden_layers"] = len(sparse)
        if self.dense_first == "mlp_layer_types":
            fields["mlp_layer_types"] = ["sparse" if s else "dense" for s in sparse]
        elif self.dense_first == "mlp_only_layers":
            fields["mlp_only_layers"] = [i for i, s in enumerate(sparse) if not s]
        elif self.dense_first in ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"):
            fields[self.dense_first] = sparse.index(1)
        elif self.dense_first == "pyramid_num_routed":
            fields["pyramid_num_routed"] = [(EXPERTS if s == 1 else s) if s else -1 for s in sparse]
        if "layer_types" in fields:
            fields["layer_types"] = fields["layer_types"] * len(sparse)
        return getattr(self.module("configuration"), self.config_class)(**fields)

    def build(self, sparse, narrow=False):
        """The model whose save_pretrained() writes the checkpoint, and its text part's configuration."""
        config = self.config(sparse, narrow)
        if self.whole is not None:
            config = getattr(self.module("configuration"), self.whole["config"])(text_config=config.to_dict(), **self.whole["fields"])
        model = getattr(self.module("modeling"), self.model)(config).eval()
        return model, config.get_text_config() if self.whole is not None else config


FEW = {"experts": 4, "topk": 2}
NARROW = BASE | {"intermediate_size": 16, "num_experts_per_tok": 2}  # the width of an expert
OF_DEEPSEEK = {"narrow": {"moe_intermediate_size": 8}, "described": False}
OF_GRANITE = FEW | {"dense_first": None, "block": None, "wrap": "BesideASharedOne", "narrow": {"intermediate_size": 8}, "described": False}
PIXTRAL = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
           "image_size": 28, "patch_size": 14, "head_dim": 8}
FAMILIES = {
    "bailing_hybrid": Family(
        "bailing_hybrid", "BailingHybridForCausalLM", "BailingHybridConfig",
        BASE | MLA | GROUPS | SHARED | {"num_local_experts": EXPERTS, "layer_types": ["full_attention"], "short_conv_kernel_size": 2,
                                        "routed_scaling_factor": 1.7},
        GROUPED_SIGMOID | TWO_SHARED | {"norm_topk_prob": "true", "routed_scaling_factor": "1.7"}),
    "beam": Family(
        "beam", "BeamForCausalLM", "BeamConfig", BASE | GROUPS | {"num_experts": EXPERTS, "routed_scaling_factor": 1.9},
        GROUPED_SIGMOID | {"norm_topk_prob": "true", "output_scaling_factor": "1.9"}),
    "deepseek_ocr2_text": Family(
        "deepseek_ocr2", "DeepseekOcr2TextModel", "DeepseekOcr2TextConfig",
        BASE | GROUPS | SHARED | {"n_routed_experts": EXPERTS, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.6},
        DEEPSEEK_V2 | FUSED, prefix="layers"),
    "diffusion_gemma_text": Family(
        "diffusion_gemma", "DiffusionGemmaEncoderTextModel", "DiffusionGemmaTextConfig",
        {k: v for k, v in BASE.items() if k != "num_experts_per_tok"} | {"num_experts": EXPERTS, "top_k_experts": TOPK,
                                                                         "layer_types": ["full_attention"], "rms_norm_eps": 0.01},
        SOFTMAX | FUSED | {"routing_family": "gemma4", "norm_topk_prob": "true", "per_expert_scale": "true",
                           "router_input": "rmsnorm(x)*scale/sqrt(H)", "activation": "gelu_pytorch_tanh"},
        dense_first=None, block=None, prefix="layers"),
    "dots3_note_text": Family(
        "dots3_note", "Dots3NoteForCausalLM", "Dots3NoteTextConfig",
        BASE | MLA | GROUPS | SHARED | INDEXED | {"q_lora_rank": 8, "n_routed_experts": EXPERTS, "routed_scaling_factor": 1.3,
                                                  "shared_experts_intermediate_size": 12, "layer_types": ["indexed_attention"]},
        GROUPED_SIGMOID | {"norm_topk_prob": "true", "routed_scaling_factor": "1.3", "shared_experts": "2",
                           "shared_expert_intermediate_size": "24"}),
    "dots3_note_vision_encoder": Family(
        "dots3_note", "Dots3NoteVisionModel", "Dots3NoteVisionConfig",
        {"hidden_size": HIDDEN, "intermediate_size": 48, "moe_intermediate_size": 16, "num_attention_heads": 2, "adapter_in_dim": HIDDEN,
         "adapter_out_dim": HIDDEN, "num_experts_per_tok": TOPK, "router_scaling_factor": 1.4},
        SIGMOID | {"norm_topk_prob": "true", "routed_scaling_factor": "1.4"}, dense_first="pyramid_num_routed", prefix="blocks"),
    "flint": Family(
        "flint", "FlintForCausalLM", "FlintConfig", BASE | {"num_experts": EXPERTS, "shared_expert_intermediate_size": 24},
        SIGMOID | {"correction_bias": "none", "norm_topk_prob": "true", "renorm_eps": "0", "shared_experts": "1",
                   "shared_expert_intermediate_size": "24"}, dense_first="mlp_only_layers"),
    "glm5_next_text": Family(
        "glm5_next", "Glm5NextForConditionalGeneration", "Glm5NextTextConfig",
        BASE | MLA | GROUPS | SHARED | INDEXED | {
            "q_lora_rank": 8, "qk_rope_head_dim": 0, "qk_nope_head_dim": 16, "n_routed_experts": EXPERTS, "index_kpool": 2, "hc_mult": 2,
            "linear_head_dim": 16, "linear_num_heads": 2, "linear_conv_kernel_dim": 2, "layer_types": ["indexed_attention"],
            "routed_scaling_factor": 1.7, "swiglu_limit": 1.5},
        GROUPED_SIGMOID | TWO_SHARED | CLAMPED | {"norm_topk_prob": "true", "routed_scaling_factor": "1.7"},
        prefix="model.language_model.layers", gate_up=2.0,
        whole={"config": "Glm5NextConfig", "fields": {"vision_config": {
            "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "out_hidden_size": HIDDEN, "intermediate_size": 16,
            "projection_intermediate_size": 16, "image_size": 28, "patch_size": 14}}}),
    "hy_v4": Family(
        "hy_v4", "HYV4ForCausalLM", "HYV4Config",
        BASE | MLA | GROUPS | SHARED | INDEXED | {"q_lora_rank": 8, "n_routed_experts": EXPERTS, "hc_mult": 2,
                                                  "routed_scaling_factor": 1.2, "swiglu_limit": 1.5},
        GROUPED_SIGMOID | TWO_SHARED | CLAMPED | FUSED | {"norm_topk_prob": "true", "routed_scaling_factor": "1.2",
                                                          "shared_glu": "act(gate)*up"}, gate_up=2.0),
    "inkling2_text": Family(
        "inkling2", "Inkling2ForCausalLM", "Inkling2TextConfig",
        {k: v for k, v in BASE.items() if k != "intermediate_size"} | {
            "n_routed_experts": EXPERTS, "swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "swa_head_dim": 16, "d_rel": 4,
            "rel_extent": 4, "unpadded_vocab_size": 32, "n_layers_per_attn_res_block": 2, "mlp_gate_softcap": 1.5, "mlp_up_softcap": 2.5,
            "route_scale": 1.8},
        SIGMOID | {"norm_topk_prob": "true", "routed_scaling_factor": "1.8", "glu": "softcap(gate)*sigmoid(gate)*softcap(up)",
                   "gate_softcap": "1.5", "up_softcap": "2.5",
                   "layout": "w13 [E,2I,H] gate and up rows interleaved; w2 [E,H,I]"},
        dense_first=None, prefix="model.llm.layers", gate_up=2.0),
    "kolibri1": Family(
        "kolibri1", "Kolibri1ForCausalLM", "Kolibri1Config",
        BASE | {"num_experts": EXPERTS, "shared_expert_intermediate_size": 24, "norm_topk_prob": True},
        {"routing_family": "topk_sigmoid", "scoring_func": "sigmoid", "selection": "topk_of_logits", "correction_bias": "selection_only",
         "norm_topk_prob": "true", "shared_experts": "1", "shared_expert_intermediate_size": "24"}, dense_first=None),
    "mistral_large4_text": Family(
        "mistral_large4", "MistralLarge4ForConditionalGeneration", "MistralLarge4TextConfig",
        BASE | MLA | GROUPS | SHARED | INDEXED | {"n_routed_experts": EXPERTS, "routed_scaling_factor": 1.1},
        {"routing_family": "grouped_softmax", "scoring_func": "softmax", "norm_topk_prob": "true", "renorm_eps": "1e-20", "n_group": "4",
         "topk_group": "2", "group_score": "top2_sum", "masked_group_fill": "0", "routed_scaling_factor": "1.1"} | TWO_SHARED,
        prefix="layers", whole={"config": "MistralLarge4Config", "fields": {"vision_config": PIXTRAL}}),
    "muse_spark_text": Family(
        "muse_spark", "MuseSparkTextModel", "MuseSparkTextConfig",
        BASE | {"num_local_experts": EXPERTS, "moe_hidden_size": 24, "output_multiplier": 0.7, "routed_scaling_factor": 1.5,
                "rms_norm_eps": 0.01, "post_norm_eps": 0.02},
        SIGMOID | FUSED | {"norm_topk_prob": "true", "renorm_eps": "1e-15", "routed_scaling_factor": "1.5", "latent_size": "24",
                           "latent_input_norm": "rmsnorm(x)*(1+w)", "expert_output_norm": "rmsnorm((1+w)*y)", "expert_norm_eps": "0.02",
                           "router_logit_scale": "0.7"}, prefix="layers"),
    "qwen3_omni_moe_talker_text": Family(
        "qwen3_omni_moe", "Qwen3OmniMoeTalkerModel", "Qwen3OmniMoeTalkerTextConfig",
        BASE | {"num_experts": EXPERTS, "shared_expert_intermediate_size": 24, "norm_topk_prob": True}, QWEN_SHARED | FUSED,
        dense_first="mlp_only_layers", prefix="layers"),
    "qwen4_exp_text": Family(
        "qwen4_exp", "Qwen4ExpForCausalLM", "Qwen4ExpTextConfig",
        BASE | {"num_experts": EXPERTS, "shared_expert_intermediate_size": 24, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
                "linear_num_key_heads": 2, "linear_num_value_heads": 2, "hc_count": 2, "hc_lowrank": 4,
                "layer_types": ["linear_attention"]}, QWEN_SHARED, dense_first=None, seed=4),
    "unlimited_ocr_text": Family(
        "unlimited_ocr", "UnlimitedOcrTextModel", "UnlimitedOcrTextConfig",
        BASE | GROUPS | SHARED | {"n_routed_experts": EXPERTS, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.6},
        DEEPSEEK_V2, prefix="layers"),
    # New ones at the end: the position decides the seed.
    "ernie4_5_vl_moe_text": Family(
        "ernie4_5_vl_moe", "Ernie4_5_VLMoeForConditionalGeneration", "Ernie4_5_VLMoeTextConfig",
        {k: v for k, v in BASE.items() if k not in ("num_experts_per_tok", "head_dim")} | {
            "moe_intermediate_size": [16, 12], "moe_k": 2, "moe_num_experts": 4, "moe_num_shared_experts": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 4]}},
        SOFTMAX | TWO_SHARED | {"routing_family": "biased_softmax", "correction_bias": "selection_only", "norm_topk_prob": "true",
                                "renorm_min": "1e-12", "tokens": "text"},
        whole={"config": "Ernie4_5_VLMoeConfig", "fields": {"vision_config": {
            "hidden_size": 16, "depth": 1, "num_heads": 2, "intermediate_size": 16, "patch_size": 2}}},
        wrap="OfTextTokens", narrow={"moe_intermediate_size": [8, 4]}, **FEW),
    "nllb-moe": Family(
        "nllb_moe", "NllbMoeForConditionalGeneration", "NllbMoeConfig",
        {"vocab_size": 32, "d_model": HIDDEN, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "encoder_attention_heads": 2,
         "decoder_attention_heads": 2, "decoder_layers": 1, "encoder_sparse_step": 1, "decoder_sparse_step": 0, "num_experts": 4,
         "router_bias": True, "max_position_embeddings": 64},
        SOFTMAX | UNGATED | {"norm_topk_prob": "true", "activation": "relu", "router_bias": "true", "output_scaling_factor": "0.8"},
        dense_first=None, block="ffn", prefix="model.encoder.layers", wrap="OfTwoExperts", narrow={"encoder_ffn_dim": 8}, **FEW),
    "vitpose_backbone": Family(
        "vitpose_backbone", "VitPoseBackbone", "VitPoseBackboneConfig",
        {"hidden_size": HIDDEN, "mlp_ratio": 2, "num_experts": 4, "part_features": 12, "num_attention_heads": 2,
         "image_size": [16, 16], "patch_size": [8, 8]},
        SOFTMAX | UNGATED | {"norm_topk_prob": "true", "activation": "gelu", "intermediate_size": "64",
                             "selection": "table lookup by token id", "expert_of_id": "true", "own_rows": "12",
                             "layout": "fc1, fc2 of all experts; own_rows of w2 per expert"},
        dense_first=None, prefix="encoder.layer", wrap="OfADataSet", narrow={"mlp_ratio": 1}, experts=4, topk=1),
    "axk2": Family(
        "axk2", "AXK2ForCausalLM", "AXK2Config",
        BASE | MLA | GROUPS | SHARED | INDEXED | {"q_lora_rank": 8, "gated_norm_rank": 4, "n_routed_experts": EXPERTS,
                                                  "routed_scaling_factor": 1.4},
        DEEPSEEK_V3 | {"routed_scaling_factor": "1.4", "masked_group_fill": "0"}, **OF_DEEPSEEK),
    "deepseek_v32": Family(
        "deepseek_v32", "DeepseekV32ForCausalLM", "DeepseekV32Config",
        BASE | MLA | GROUPS | SHARED | INDEXED | {"q_lora_rank": 8, "n_routed_experts": EXPERTS, "routed_scaling_factor": 1.6},
        DEEPSEEK_V3 | {"routed_scaling_factor": "1.6"}, **OF_DEEPSEEK),
    "dots1": Family(
        "dots1", "Dots1ForCausalLM", "Dots1Config",
        BASE | GROUPS | SHARED | {"n_routed_experts": EXPERTS, "norm_topk_prob": True, "routed_scaling_factor": 1.2},
        DEEPSEEK_V3 | {"routed_scaling_factor": "1.2"}, dense_first="first_k_dense_replace", **OF_DEEPSEEK),
    "exaone_moe": Family(
        "exaone_moe", "ExaoneMoeForCausalLM", "ExaoneMoeConfig",
        BASE | GROUPS | {"num_experts": EXPERTS, "num_shared_experts": 2, "routed_scaling_factor": 1.8},
        DEEPSEEK_V3 | {"routed_scaling_factor": "1.8"}, **OF_DEEPSEEK),
    "glm4_moe": Family(
        "glm4_moe", "Glm4MoeForCausalLM", "Glm4MoeConfig",
        BASE | SHARED | {"n_routed_experts": EXPERTS, "routed_scaling_factor": 0.6},
        SIGMOID | TWO_SHARED | {"norm_topk_prob": "true", "routed_scaling_factor": "0.6"},
        dense_first="first_k_dense_replace", **OF_DEEPSEEK),
    "glm4v_moe_text": Family(
        "glm4v_moe", "Glm4vMoeForConditionalGeneration", "Glm4vMoeTextConfig",
        BASE | GROUPS | SHARED | {"n_routed_experts": EXPERTS, "routed_scaling_factor": 1.5, "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}},
        DEEPSEEK_V3 | {"routed_scaling_factor": "1.5"}, dense_first="first_k_dense_replace", prefix="model.language_model.layers",
        whole={"config": "Glm4vMoeConfig", "fields": {"vision_config": {
            "hidden_size": 16, "depth": 1, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": HIDDEN, "image_size": 28}}},
        **OF_DEEPSEEK),
    "glm_moe_dsa": Family(
        "glm_moe_dsa", "GlmMoeDsaForCausalLM", "GlmMoeDsaConfig",
        BASE | MLA | GROUPS | SHARED | INDEXED | {"q_lora_rank": 8, "n_routed_experts": EXPERTS, "routed_scaling_factor": 1.3},
        DEEPSEEK_V3 | {"routed_scaling_factor": "1.3"}, **OF_DEEPSEEK),
    "kimi_linear": Family(
        "kimi_linear", "KimiLinearForCausalLM", "KimiLinearConfig",
        BASE | MLA | GROUPS | SHARED | {"num_local_experts": EXPERTS, "routed_scaling_factor": 1.7, "layer_types": ["full_attention"]},
        DEEPSEEK_V3 | {"routed_scaling_factor": "1.7"}, **OF_DEEPSEEK),
    "solar_open": Family(
        "solar_open", "SolarOpenForCausalLM", "SolarOpenConfig",
        {k: v for k, v in BASE.items() if k != "intermediate_size"} | GROUPS | SHARED | {"n_routed_experts": EXPERTS,
                                                                                         "routed_scaling_factor": 1.1},
        DEEPSEEK_V3 | {"routed_scaling_factor": "1.1"}, dense_first=None, **OF_DEEPSEEK),
    "flex_olmo": Family(
        "flex_olmo", "FlexOlmoForCausalLM", "FlexOlmoConfig", NARROW | {"num_experts": 4}, SOFTMAX, dense_first=None,
        narrow={"intermediate_size": 8}, described=False, **FEW),
    "granitemoe_swa": Family(
        "granitemoe_swa", "GraniteMoeSWAForCausalLM", "GraniteMoeSWAConfig",
        NARROW | {"num_local_experts": 4, "shared_intermediate_size": 24, "layer_types": ["full_attention"]}, GRANITE | FUSED,
        **OF_GRANITE),
    "granitemoehybrid": Family(
        "granitemoehybrid", "GraniteMoeHybridForCausalLM", "GraniteMoeHybridConfig",
        NARROW | {"num_local_experts": 4, "shared_intermediate_size": 24, "layer_types": ["full_attention"], "mamba_n_heads": 8,
                  "mamba_d_state": 8}, GRANITE, **OF_GRANITE),
    "granitemoeshared": Family(
        "granitemoeshared", "GraniteMoeSharedForCausalLM", "GraniteMoeSharedConfig",
        NARROW | {"num_local_experts": 4, "shared_intermediate_size": 24}, GRANITE, **OF_GRANITE),
    "mellum": Family(
        "mellum", "MellumForCausalLM", "MellumConfig", BASE | {"num_experts": 4, "num_experts_per_tok": 2},
        SOFTMAX | {"norm_topk_prob": "true"}, narrow={"moe_intermediate_size": 8}, described=False, **FEW),
    "minimax": Family(
        "minimax", "MiniMaxForCausalLM", "MiniMaxConfig", NARROW | {"num_local_experts": 4, "layer_types": ["full_attention"]},
        SOFTMAX | {"norm_topk_prob": "true"}, dense_first=None, narrow={"intermediate_size": 8}, described=False, **FEW),
    "qwen3_omni_moe_text": Family(
        "qwen3_omni_moe", "Qwen3OmniMoeThinkerTextModel", "Qwen3OmniMoeTextConfig",
        BASE | {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False}, SOFTMAX, dense_first="mlp_only_layers",
        prefix="layers", narrow={"moe_intermediate_size": 8}, described=False, **FEW),
}


class Gemma(torch.nn.Module):
    """DiffusionGemma's layer calls router and experts itself. Here both get the same input."""

    def __init__(self, layer):
        super().__init__()
        self.router, self.experts = layer.router, layer.experts

    def forward(self, hidden):
        flat = hidden.reshape(-1, hidden.shape[-1])
        _, weights, ids = self.router(flat)
        return self.experts(flat, ids, weights).reshape(hidden.shape)


class OfTextTokens(torch.nn.Module):
    """ERNIE-4.5-VL's block without images; it returns its logits, too."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    @property
    def gate(self):
        return self.block.text_moe.gate

    def forward(self, hidden):
        return self.block(hidden)[0]


class OfTwoExperts(torch.nn.Module):
    """NLLB-MoE's experts, by what its router says. The model's own block of 5.23.0 takes the router's one-hot mask for indices, so that
    all rows go through the experts 0 and 1."""

    class Router(torch.nn.Module):
        def __init__(self, router):
            super().__init__()
            self.router = router

        def forward(self, rows):
            _, probabilities, logits = self.router(rows)
            return logits, *probabilities.topk(2)

    def __init__(self, block):
        super().__init__()
        self.router, self.experts = OfTwoExperts.Router(block.router), block.experts

    def forward(self, hidden):
        rows = hidden.reshape(-1, hidden.shape[-1])
        _, weights, ids = self.router(rows)
        out = [sum(w * self.experts[f"expert_{int(e)}"](row) for w, e in zip(weights[t], ids[t])) for t, row in enumerate(rows)]
        return (1 - self.experts.moe_token_dropout) * torch.stack(out).reshape(hidden.shape)


class OfADataSet(torch.nn.Module):
    """ViTPose's block on rows of the data sets 0, 1, ... in turns."""

    class Router(torch.nn.Module):
        def forward(self, rows):
            return torch.zeros(rows.shape[0], 4), torch.ones(rows.shape[0], 1), torch.arange(rows.shape[0])[:, None] % 4

    def __init__(self, block):
        super().__init__()
        self.block, self.router = block, OfADataSet.Router()

    def forward(self, hidden):
        rows = hidden.reshape(-1, hidden.shape[-1])
        ids = self.router(rows)[2]
        return self.block(rows[:, None], ids[:, 0]).reshape(hidden.shape)


class BesideASharedOne(torch.nn.Module):
    """The block of a Granite layer and the shared network that gets the same input."""

    def __init__(self, layer):
        super().__init__()
        self.block, self.shared_mlp = layer.block_sparse_moe, layer.shared_mlp

    @property
    def router(self):
        return self.block.router

    def forward(self, hidden):
        return self.block(hidden) + self.shared_mlp(hidden)


def stem(name):
    """A model type as the names of files and of tests have it."""
    return name.replace("-", "_")


def layers_of(family, model):
    """The decoder layers, however deep in the model."""
    named = dict(model.named_modules()).get(family.prefix)
    if isinstance(named, torch.nn.ModuleList):
        return named
    wanted = {"layers": "layers", "blocks": "blocks"}[family.prefix.rsplit(".", 1)[-1]]
    named = [(name, module) for name, module in model.named_modules()
             if name.rsplit(".", 1)[-1] == wanted and isinstance(module, torch.nn.ModuleList) and not re.search("vision|visual", name)]
    assert len(named) == 1, [name for name, _ in named]
    return named[0][1]


def block_of(family, layer):
    block = layer if family.block is None else layer.get_submodule(family.block)
    return globals()[family.wrap or "Gemma"](block) if family.wrap or family.block is None else block


def randomise(family, module, seed):
    """Normal weights in the order of their sorted names."""
    generator = torch.Generator().manual_seed(seed)
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    for name, tensor in sorted(tensors.items()):
        if not tensor.is_floating_point():
            continue
        draw = torch.randn(tensor.shape, generator=generator)
        width = tensor.shape[-1] ** -0.5
        if name in ("gate.weight", "router.proj.weight"):
            draw = 1.5 * width * draw
        elif "bias" in name:
            draw = 0.3 * draw
        elif name in ("router.scale", "router.per_expert_scale"):
            draw = 1 + 0.2 * draw
        elif "norm" in name:
            draw = 0.2 * draw
        elif "down" in name:
            draw = 2 * width * draw
        else:
            draw = family.gate_up * width * draw
        with torch.no_grad():
            tensor.copy_(draw)


def run(block, hidden):
    """What the block computes from hidden [T, H], and what its router says."""
    seen = {}
    router = block.gate if hasattr(block, "gate") else block.router
    hooks = [router.register_forward_hook(lambda module, args, out: seen.update(logits=out[0], weights=out[1], ids=out[2]))]
    if hasattr(router, "proj"):  # DiffusionGemma's router returns probabilities
        hooks += [router.proj.register_forward_hook(lambda module, args, out: seen.update(projected=out))]
    with torch.no_grad():
        out = block(hidden[None])[0]
    for hook in hooks:
        hook.remove()
    logits = seen.get("projected", seen["logits"])
    return {"expected": out, "router_logits": logits.reshape(hidden.shape[0], -1), "topk_ids": seen["ids"].to(torch.int32),
            "topk_weights": seen["weights"]}


def saved(model):
    """The tensors that save_pretrained() writes, and config.json."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        model.save_pretrained(folder)
        tensors = {}
        for file in pathlib.Path(folder).glob("*.safetensors"):
            with safe_open(file, "pt") as data:
                tensors |= {name: data.get_tensor(name) for name in data.keys()}
        return tensors, json.loads((pathlib.Path(folder) / "config.json").read_text())


def moe_tensors(family, tensors, layer):
    """The MoE block's tensors of one layer."""
    at = f"{family.prefix}.{layer}."
    part = rf"(mlp|moe|block_sparse_moe|shared_mlp|gate|experts|shared_experts|router|{family.block})\."
    found = {name: tensor.contiguous() for name, tensor in tensors.items() if name.startswith(at) and re.match(part, name[len(at):])}
    if family.block is None and not family.wrap:  # the dense network beside the experts
        found = {name: tensor for name, tensor in found.items() if not name.startswith(at + "mlp.")}
    assert found, at
    return found


def ids_are_clear(block, hidden, ids):
    """No token's experts change when its input moves by 1e-4."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        moved = hidden * (1 + 1e-4 * torch.randn(hidden.shape, generator=generator))
        if not torch.equal(run(block, moved)["topk_ids"].sort().values, ids.sort().values):
            return False
    return True


def write_block(name, family, number):
    """The tensors and the metadata of the family's block file."""
    tokens = 15 if family.narrow else TOKENS
    for seed in range(1400 + 10 * number + family.seed, 1410 + 10 * number):
        model, config = family.build([1])
        layer = layers_of(family, model)[0]
        block = block_of(family, layer)
        randomise(family, block, seed)
        hidden = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed + 500000))
        results = run(block, hidden)
        if ids_are_clear(block, hidden, results["topk_ids"]):
            break
    else:
        raise RuntimeError(f"{name}: experts nearly tie with every seed")
    if "expert_of_id" in family.metadata:
        results["input_ids"] = results["topk_ids"][:, 0].to(torch.int64)
    tensors, _ = saved(model)
    text = {k: v for k, v in config.to_dict().items() if k not in ("transformers_version", "dtype", "_name_or_path")}
    metadata = {
        "case": f"{stem(name)}_e{family.experts}k{family.topk}_s{seed}", "model_type": name,
        "block_class": type(getattr(block, "block", block)).__name__, "num_experts": str(family.experts),
        "top_k": str(family.topk), "hidden_size": str(HIDDEN), "intermediate_size": "16", "num_tokens": str(tokens), "activation": "silu",
        "glu": "act(gate)*up", "scoring_func": "softmax", "norm_topk_prob": "false", "renorm_eps": "0", "n_group": "1", "topk_group": "1",
        "group_score": "none", "masked_group_fill": "none", "routed_scaling_factor": "1.0", "output_scaling_factor": "1.0",
        "weight_applied_on": "expert_output", "correction_bias": "none", "shared_experts": "0", "shared_expert_intermediate_size": "0",
        "shared_expert_gate": "none", "expert_bias": "false", "router_bias": "false", "swiglu_alpha": "none", "swiglu_limit": "none",
        "num_zero_experts": "0", "layout": "per_expert", "selection": "topk_of_scores", "tensor_prefix": f"{family.prefix}.0.",
        "parameter_names": "checkpoint", "seed": str(seed), "transformers": transformers.__version__, "torch": torch.__version__,
        "device": "cpu", "compute_dtype": "float32", "experts_implementation": "eager",
        "config_json": json.dumps(text, sort_keys=True),
    } | family.metadata
    return metadata["case"], {"hidden": hidden, **results, **moe_tensors(family, tensors, 0)}, metadata


def write_checkpoint(name, family, number):
    """config.json, the tensors of two MoE layers, and what these layers compute."""
    sparse = [0, 1, 1] if family.dense_first else [1, 1]
    if family.dense_first == "pyramid_num_routed":
        sparse = [0, 4, 1]  # layers with different numbers of experts
    model, _ = family.build(sparse, narrow=True)
    layers = layers_of(family, model)
    at = [i for i, s in enumerate(sparse) if s]
    for i in at:
        randomise(family, block_of(family, layers[i]), 2400 + 10 * number + i)
    model.bfloat16()
    tensors, config = saved(model)
    model.float()
    kept, results = {}, {}
    for i in at:
        kept |= moe_tensors(family, tensors, i)
        hidden = torch.randn(9 if family.narrow else TOKENS, HIDDEN, generator=torch.Generator().manual_seed(502400 + 10 * number + i))
        out = run(block_of(family, layers[i]), hidden)
        results |= {f"layers.{i}.moe_in": hidden, f"layers.{i}.moe_out_f32": out["expected"],
                    f"layers.{i}.router_logits_f32": out["router_logits"], f"layers.{i}.topk_ids_f32": out["topk_ids"],
                    f"layers.{i}.topk_weights_f32": out["topk_weights"]}
        if "expert_of_id" in family.metadata:
            results["input_ids"] = out["topk_ids"][:, 0].to(torch.int64)
    return config, kept, results


# Fields of attention, embeddings and sampling: they are no part of the block.
OUTSIDE = re.compile(r"attention|attn|_token_id|rope|rotary|vocab|index|lora|head|position|dropout|initializer|use_cache|tie_word|sliding"
                     r"|return_dict|output_(router|hidden|attentions|gate)|id2label|label2id|dtype|architectures|problem_type|chunk_size"
                     r"|version|name_or_path|is_encoder_decoder|adapter|patch|hc_|conv|ple_|ngram|pretraining|layer_types|max_length")


def block_from(family, config):
    """The block alone, from a configuration."""
    module = family.module("modeling")
    if family.block is None:
        layer = torch.nn.Module()
        layer.router, layer.experts = module.DiffusionGemmaTextRouter(config), module.DiffusionGemmaTextExperts(config)
        return Gemma(layer)
    model, _ = family.build([1])
    if family.wrap:
        kind = type(getattr(layers_of(family, model)[0], family.block))
        return globals()[family.wrap](kind(config, config.encoder_ffn_dim) if family.package == "nllb_moe" else kind(config))
    kind = type(block_of(family, layers_of(family, model)[0]))
    return kind(config, 0) if kind.__name__ == "Dots3NoteVisionMoE" else kind(config)


def changed(value, field):
    """Other values that a field may have."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return sorted({value + 1, 2 * value} - {value})
    if isinstance(value, float):
        return [0.5 * value + 0.25 * (value < 0.1), 1.6 * value + 0.5 * (value < 0.1)]
    return {"hidden_act": ["gelu", "relu"], "hidden_activation": ["gelu", "silu"], "activation_function": ["gelu", "silu"],
            "topk_method": ["greedy"], "scoring_func": ["softplus"], "router_dtype": ["bfloat16"]}.get(field, [])


def field_entry(name, family, number):
    """The family's configuration, and the values of its fields that change what the block computes."""
    config = family.config([1])
    inside = ("mlp_layer_types", "moe_token_dropout", "router_dtype")
    plain = {k: v for k, v in sorted(config.to_dict().items()) if not OUTSIDE.search(k) or k in inside}
    of_layers = family.dense_first == "pyramid_num_routed"
    if not of_layers:
        plain.pop("per_layer_config", None)  # of the attention
    block = block_from(family, config)
    randomise(family, block, 3400 + number)
    hidden = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(503400 + number))
    base = run(block, hidden)["expected"]
    alias = getattr(config, "attribute_map", {})
    changes = []
    for field, value in plain.items():
        for other in changed(value, field):
            try:
                if of_layers and field in ("num_local_experts", "num_experts_per_tok"):
                    continue  # the layer's own value counts
                mutated = copy.deepcopy(config)
                setattr(mutated, next((k for k, v in alias.items() if v == field), field), other)
                another = block_from(family, mutated)
                another.load_state_dict(block.state_dict())
                out = run(another, hidden)["expected"]
            except (RuntimeError, ValueError, KeyError, TypeError, IndexError, AttributeError):
                continue
            if not torch.allclose(out, base, rtol=1e-5, atol=1e-6):
                changes.append([field, other])
    assert changes, name
    return {"config": plain, "changes": changes}


def write_fields(entries):
    """family_fields.json with these entries replaced or added."""
    lines = []
    for name, entry in sorted((json.loads((ROOT / "family_fields.json").read_text()) | entries).items()):
        lines.append(f" {json.dumps(name)}: {{\"config\": {json.dumps(entry['config'])},\n  \"changes\": {json.dumps(entry['changes'])}}}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def same(ours, theirs, what):
    """Names, shapes and integers are equal, floats to rounding."""
    if set(ours) != set(theirs):
        return [f"{what}: tensors {sorted(set(ours) ^ set(theirs))}"]
    out = []
    for name, tensor in ours.items():
        other = theirs[name]
        if tensor.shape != other.shape or tensor.dtype != other.dtype:
            out.append(f"{what}: {name} is {tensor.dtype} {list(tensor.shape)}, the file's {other.dtype} {list(other.shape)}")
        elif not (torch.allclose(tensor, other, rtol=1e-4, atol=1e-5) if tensor.is_floating_point() else
                  torch.equal(tensor.sort(-1).values, other.sort(-1).values) if name.endswith(("topk_ids", "topk_ids_f32")) else
                  torch.equal(tensor, other)):
            if not name.endswith(("topk_weights", "topk_weights_f32")):  # in the order of the ids, which means nothing
                out.append(f"{what}: {name} differs")
    return out


def loaded(path):
    with safe_open(path, "pt") as data:
        return {name: data.get_tensor(name) for name in data.keys()}


def main():
    options = argparse.ArgumentParser(description="writes or checks the files that transformers' own models compute")
    options.add_argument("--check", action="store_true")
    options.add_argument("families", nargs="*")
    options = options.parse_args()
    if transformers.__version__ != VERSION:
        print(f"skipped: transformers {transformers.__version__}, the files are of {VERSION}")
        return 77
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    problems, entries = [], {}
    for number, (name, family) in enumerate(FAMILIES.items()):
        if options.families and name not in options.families:
            continue
        case, tensors, metadata = write_block(name, family, number)
        config, kept, results = write_checkpoint(name, family, number)
        if family.described:
            entries[name] = field_entry(name, family, number)
        block, checkpoint = ROOT / "moe_blocks" / f"{case}.safetensors", ROOT / "checkpoints" / f"{stem(name)}_tiny"
        if options.check:
            problems += same(tensors, loaded(block), block.name) + same(kept, loaded(checkpoint / "model.safetensors"), checkpoint.name)
            problems += same(results, loaded(checkpoint / "moe_io.safetensors"), f"{checkpoint.name}/moe_io")
            if config != json.loads((checkpoint / "config.json").read_text()):
                problems.append(f"{checkpoint.name}: config.json differs")
            continue
        for path in block.parent, checkpoint:
            path.mkdir(parents=True, exist_ok=True)
        versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        save_file(tensors, block, metadata)
        save_file(kept, checkpoint / "model.safetensors", {"format": "pt"})
        save_file(results, checkpoint / "moe_io.safetensors", versions)
        (checkpoint / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        changes = f", {len(entries[name]['changes'])} values that change the output" if family.described else ""
        print(f"{name}: {block.stat().st_size} bytes{changes}")
    fields = write_fields(entries)
    if not options.check:
        (ROOT / "family_fields.json").write_text(fields)
    elif fields != (ROOT / "family_fields.json").read_text():
        problems.append("family_fields.json differs")
    print("\n".join(f"FAILED: {p}" for p in problems), end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
