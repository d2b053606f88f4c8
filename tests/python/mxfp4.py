# SPDX-License-Identifier: Apache-2.0
# tests/python/mxfp4.py: a tiny gpt-oss checkpoint in mxfp4.
from __future__ import annotations

import json
import pathlib

import families
import torch
import transformers
from safetensors.torch import save_file

import moe


def checkpoint(path: pathlib.Path, **fields) -> torch.nn.Module:
    """Writes a checkpoint in mxfp4, as the published ones are, and returns the model with the same weights widened."""
    model = families.build("gpt_oss", **fields)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        for name, module in model.named_modules():
            if not hasattr(module, "_apply_gate"):
                continue
            for projection in ("gate_up_proj", "down_proj"):
                rows = getattr(module, projection).detach().transpose(1, 2).contiguous()
                codes, scales = moe.quantize(rows, "mxfp4_w4a16")
                blocks = codes.reshape(*scales.shape, 16)
                del state[f"{name}.{projection}"]
                state[f"{name}.{projection}_blocks"], state[f"{name}.{projection}_scales"] = blocks, scales
                wide = transformers.integrations.mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
                getattr(module, projection).copy_(wide)
    path.mkdir()
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict()
    config["architectures"] = ["GptOssForCausalLM"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn",
                                     "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    return model


def load(path: pathlib.Path, device: str) -> torch.nn.Module:
    """In the dtype in which the library takes these codes there."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return transformers.AutoModelForCausalLM.from_pretrained(path, experts_implementation="moe", dtype=dtype).to(device)
