# SPDX-License-Identifier: Apache-2.0
# python/moe/transformers/_mxfp4.py: gpt-oss checkpoints in mxfp4 under experts_implementation="moe".
"""transformers replaces gpt-oss' experts by a module of its own for mxfp4, which dispatches by no interface. Where the implementation "moe"
is asked for, `Mxfp4Experts` takes its place: it keeps the checkpoint's 4-bit codes, gate rows before up rows, and no Triton kernels are
needed. Nothing changes for other implementations.

A runner that packs the codes, as on a GPU, leaves nothing that reads them: they are freed after it is made, unless `configure` says
otherwise, and what needs them raises."""

from __future__ import annotations

import contextvars
import functools
from typing import Any

import torch
from transformers.integrations import mxfp4 as integration
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.quantizers import quantizer_mxfp4
from transformers.quantizers.quantizers_utils import get_module_from_name, should_convert_module

from .._errors import UnsupportedError
from . import _layer

#: The parameters that a runner may have packed.
CODES = ("gate_up_proj", "down_proj", "gate_up_proj_scales", "down_proj_scales")

_wanted: contextvars.ContextVar[bool] = contextvars.ContextVar("moe_mxfp4", default=False)


class Mxfp4Experts(integration.Mxfp4GptOssExperts):
    """gpt-oss' experts. gate_up_proj [E, 2I, H/2] and down_proj [E, H, I/2]: uint8, two codes a byte; gate_up_proj_scales [E, 2I, H/32]
    and down_proj_scales [E, H, I/32]: uint8 exponents. Gate rows come before up rows. gate_up_proj_bias [E, 2I] and down_proj_bias [E, H]
    are as the checkpoint has them: gate and up alternate."""

    has_gate = True
    is_concatenated = True
    _is_expert_parallel = False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.config = config
        self.alpha = float(getattr(config, "swiglu_alpha", 1.702))

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(gate * self.alpha)

    def load(self, name: str, blocks: torch.Tensor, scales: torch.Tensor) -> None:
        """Takes one projection of a checkpoint: blocks [E, N, K/32, 16] and scales [E, N, K/32]; the caller's copy may be freed."""
        codes = blocks.reshape(*blocks.shape[:2], -1).view(torch.uint8)
        scales = scales.view(torch.uint8)
        if name == "gate_up_proj":
            codes, scales = _layer.halves(codes, 1), _layer.halves(scales, 1)
        self._parameters.pop(name, None)
        setattr(self, name, torch.nn.Parameter(codes.contiguous(), requires_grad=False))
        setattr(self, name + "_scales", torch.nn.Parameter(scales.contiguous(), requires_grad=False))  # transformers clears late buffers

    def stored(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """blocks and scales as a checkpoint has them."""
        if self._freed() is not None:
            raise _layer.freed(name)
        codes, scales = getattr(self, name).detach(), getattr(self, name + "_scales").detach()
        if name == "gate_up_proj":
            codes, scales = _interleaved(codes), _interleaved(scales)
        return codes.reshape(*scales.shape, 16), scales

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        from . import run_mxfp4

        return run_mxfp4(self, hidden_states, top_k_index, top_k_weights)

    def _freed(self) -> _layer.Layer | None:
        """The layer whose runner has packed the codes, if they are freed. They are not once all of them were assigned anew."""
        layer = self.__dict__.get("_moe_layer")
        return layer if layer is not None and layer.freed and any(getattr(self, name).is_meta for name in CODES) else None

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """`to()` and the like: the runner stays where it is."""
        layer = self._freed()
        if layer is None:
            return super()._apply(fn, recurse)
        target = fn(torch.empty(0, dtype=torch.uint8, device=layer.device)).device
        if target != layer.device:
            raise _layer.freed(f"to {target} from {layer.device}")
        return super()._apply(lambda tensor: tensor if tensor.is_meta else fn(tensor), recurse)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self._freed() is not None:
            raise _layer.freed("state_dict")
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *more: Any) -> None:
        """Other codes: memory for them, and another runner. torch would copy them to the meta device, and leave it at that."""
        layer = None if local_metadata.get("assign_to_params_buffers", False) else self._freed()
        if layer is not None and all(prefix + name in state_dict for name in CODES):
            del self.__dict__["_moe_layer"]
            for name in CODES:
                empty = torch.empty_like(getattr(self, name), device=layer.device)
                setattr(self, name, torch.nn.Parameter(empty, requires_grad=False))
        elif layer is not None and any(prefix + name in state_dict for name in CODES):
            raise _layer.freed("load_state_dict with some of the codes")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *more)


def _interleaved(rows: torch.Tensor) -> torch.Tensor:
    experts, count, width = rows.shape
    return rows.reshape(experts, 2, count // 2, width).transpose(1, 2).reshape(experts, count, width)


def biases(module: Mxfp4Experts) -> dict[str, torch.Tensor]:
    """Copies, which the runner reads in each call."""
    return {"w13_bias": _layer.halves(module.gate_up_proj_bias.detach().float(), 1),
            "w2_bias": module.down_proj_bias.detach().to(torch.float32, memory_format=torch.contiguous_format, copy=True)}  # fmt: skip


def read(module: Mxfp4Experts) -> _layer.Weights:
    found = _layer.activation_of(module, module.down_proj.device)
    source = (*CODES, "gate_up_proj_bias", "down_proj_bias")
    arrays = {
        "w13": module.gate_up_proj.detach(), "w2": module.down_proj.detach(), "w13_scale": module.gate_up_proj_scales.detach(),
        "w2_scale": module.down_proj_scales.detach(), **biases(module),
    }  # fmt: skip
    dtype = module.__dict__.get("_moe_dtype", torch.bfloat16)
    settings = {"dtype": _layer.dtype_name(dtype), "torch_dtype": dtype, "quantization": "mxfp4_w4a16",
                **_layer.activation_settings(found)}  # fmt: skip
    return _layer.Weights(arrays, settings, source, True, CODES, biases)


def dequantized_forward(self: Mxfp4Experts, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The same result from weights that are widened for this call: for calls that the library cannot take."""
    # The function of transformers returns [E, K, N] of rows [E, N, K].
    first, second = (integration.convert_moe_packed_tensors(*self.stored(name), dtype=hidden.dtype)
                     for name in ("gate_up_proj", "down_proj"))  # fmt: skip
    output = torch.zeros_like(hidden)
    for expert in range(self.num_experts):
        token, choice = torch.where(ids == expert)
        gate_up = hidden[token] @ first[expert] + self.gate_up_proj_bias[expert].to(hidden.dtype)
        gated = self._apply_gate(torch.cat((gate_up[..., ::2], gate_up[..., 1::2]), -1))
        rows = gated @ second[expert] + self.down_proj_bias[expert].to(hidden.dtype)
        output.index_add_(0, token, (rows * weights[token, choice, None]).to(hidden.dtype))
    return output


def install(implementation: str) -> None:
    """Hooks the places of transformers where an mxfp4 model is made and loaded."""
    import transformers.modeling_utils as modeling

    quantizer = quantizer_mxfp4.Mxfp4HfQuantizer
    if getattr(quantizer, "_moe_installed", False):
        return
    quantizer._moe_installed = True

    def asked(config: Any) -> bool:
        return getattr(config, "_experts_implementation", None) == implementation

    original_get = modeling.get_hf_quantizer

    @functools.wraps(original_get)
    def get_hf_quantizer(config: Any, *args: Any, **kwargs: Any) -> Any:
        token = _wanted.set(asked(config))
        try:
            return original_get(config, *args, **kwargs)
        finally:
            _wanted.reset(token)

    modeling.get_hf_quantizer = get_hf_quantizer

    original_validate = quantizer.validate_environment

    @functools.wraps(original_validate)
    def validate_environment(self: Any, *args: Any, **kwargs: Any) -> None:
        if not (_wanted.get() and self.pre_quantized):  # no Triton kernels are needed
            original_validate(self, *args, **kwargs)

    quantizer.validate_environment = validate_environment

    original_compileable = quantizer.is_compileable
    # Whether generate() compiles a step of decode over a static cache: the codes of these experts are behind one operator.
    quantizer.is_compileable = property(lambda self: getattr(self, "_moe_experts", False) or original_compileable.__get__(self))

    original_process = quantizer._process_model_before_weight_loading

    @functools.wraps(original_process)
    def process(self: Any, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not asked(model.config) or self.quantization_config.dequantize or not self.pre_quantized:
            return original_process(self, model, *args, **kwargs)
        distributed = getattr(model.config, "distributed_config", None)
        if getattr(distributed, "dp_size", 1) > 1:
            raise UnsupportedError("E_UNSUPPORTED: distributed_config: fully_shard cannot gather experts in mxfp4; use ep_size = tp_size")
        self.modules_to_not_convert = self.get_modules_to_not_convert(
            model, self.quantization_config.modules_to_not_convert, model._keep_in_fp32_modules
        )
        self._moe_experts = True
        for name, module in list(model.named_modules()):
            if isinstance(module, modeling_gpt_oss.GptOssExperts) and should_convert_module(name, self.modules_to_not_convert):
                with torch.device("meta"):
                    model.set_submodule(name, Mxfp4Experts(module.config))
        return model

    quantizer._process_model_before_weight_loading = process

    original_size = quantizer.param_element_size

    @functools.wraps(original_size)
    def param_element_size(self: Any, model: torch.nn.Module, param_name: str, *args: Any, **kwargs: Any) -> Any:
        """Of the one block of GPU memory that transformers reserves for all weights before it loads them. Codes in it would give nothing
        back to the driver when they are freed."""
        module, name = get_module_from_name(model, param_name)
        if isinstance(module, Mxfp4Experts) and name in CODES and not _layer.KEEP_CODES:
            return 0
        return original_size(self, model, param_name, *args, **kwargs)

    quantizer.param_element_size = param_element_size

    original_convert = integration.Mxfp4Deserialize.convert

    @functools.wraps(original_convert)
    def convert(self: Any, input_dict: dict, model: Any = None, full_layer_name: str | None = None, missing_keys: Any = None,
                **kwargs: Any) -> dict:  # fmt: skip
        module, _ = get_module_from_name(model, full_layer_name)
        if not isinstance(module, Mxfp4Experts):
            return original_convert(self, input_dict, model=model, full_layer_name=full_layer_name, missing_keys=missing_keys, **kwargs)
        name = "gate_up_proj" if "gate_up_proj" in full_layer_name else "down_proj"
        blocks, scales = (v[0] if isinstance(v, list) else v for v in (input_dict[name + "_blocks"], input_dict[name + "_scales"]))
        module.load(name, blocks, scales)
        missing_keys.discard(full_layer_name)
        module._is_hf_initialized = True
        return {}

    integration.Mxfp4Deserialize.convert = convert

    original_state = quantizer.get_state_dict_and_metadata

    @functools.wraps(original_state)
    def get_state_dict_and_metadata(self: Any, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        ours = {name: module for name, module in model.named_modules() if isinstance(module, Mxfp4Experts)}
        if not ours:
            return original_state(self, model, *args, **kwargs)
        if any(module._is_expert_parallel for module in ours.values()):
            raise UnsupportedError("E_UNSUPPORTED: save_pretrained: a rank has codes of its own experts only; save a model of one rank")
        state = model.state_dict()
        for name, module in ours.items():
            for projection in ("gate_up_proj", "down_proj"):
                del state[f"{name}.{projection}"], state[f"{name}.{projection}_scales"]
                state[f"{name}.{projection}_blocks"], state[f"{name}.{projection}_scales"] = module.stored(projection)
        return state, {}

    quantizer.get_state_dict_and_metadata = get_state_dict_and_metadata
