"""Norms and MLPs that hand quantised tokens to the layers after them.

In place of the norms and MLPs of the decoder layers it knows, so that activations between them exist
once, as int8 in the order of the product that takes them.
"""

from typing import Any

import torch
from torch import Tensor, nn

from sparse_bitnet.engine.gpu.linear import QuantizedTokens, TernaryLinear
from sparse_bitnet.engine.gpu.merge import FirstSlice
from sparse_bitnet.ops.norm_quantize import norm_quantize
from sparse_bitnet.ops.swiglu_quantize import swiglu_quantize

MODEL_TYPES = ("qwen2", "qwen3", "llama")
"""transformers models whose layers take norm, attention and MLP apart as this module expects."""


class QuantizingNorm(nn.Module):
    """RMSNorm whose result is quantised for one layer."""

    def __init__(self, norm: Any, linear: TernaryLinear) -> None:
        super().__init__()
        self.weight, self.epsilon = norm.weight, norm.variance_epsilon
        # Not a submodule: it has its place in the model.
        self.__dict__["linear"] = linear

    def forward(self, input: Tensor) -> QuantizedTokens:
        """[..., features] -> the same tokens, quantised."""
        linear: TernaryLinear = self.__dict__["linear"]
        route, windows = linear.route(input.numel() // input.shape[-1])
        codes, scale = norm_quantize(input, self.weight, self.epsilon, windows)
        return QuantizedTokens(codes, scale, route, input.shape, input.dtype)


class QuantizingMlp(nn.Module):
    """down(silu(gate(x)) * up(x)) with the middle quantised in one pass."""

    def __init__(self, gate_up: TernaryLinear, down: TernaryLinear) -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down

    def forward(self, input: Tensor | QuantizedTokens) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        gate_up = self.gate_up(input)
        features = self.down.in_features
        route, windows = self.down.route(gate_up.numel() // (2 * features))
        codes, scale = swiglu_quantize(gate_up, windows)
        shape = torch.Size((*gate_up.shape[:-1], features))
        return self.down(QuantizedTokens(codes, scale, route, shape, gate_up.dtype))


def fuse_(model: Any) -> Any:
    """Fuse what can be in a model after `merge.prepare_`; returns `model`.

    Outputs stay those of the unfused model: on a CPU bit for bit, on a GPU up to the order of the sums
    in a norm. Layers of model types not in `MODEL_TYPES`, and those not wholly ternary, are left.
    """
    if getattr(model.config, "model_type", None) not in MODEL_TYPES:
        return model
    for layer in model.get_decoder().layers:
        first: Any = getattr(layer.self_attn, "q_proj", None)
        if _is_ternary(first):
            layer.input_layernorm = QuantizingNorm(layer.input_layernorm, first.linear)
        mlp = layer.mlp
        gate: Any = getattr(mlp, "gate_proj", None)
        down: Any = getattr(mlp, "down_proj", None)
        if (
            _is_ternary(gate)
            and isinstance(down, TernaryLinear)
            and model.config.hidden_act == "silu"
        ):
            norm = layer.post_attention_layernorm
            layer.post_attention_layernorm = QuantizingNorm(norm, gate.linear)
            layer.mlp = QuantizingMlp(gate.linear, down)
    return model


def _is_ternary(module: Any) -> bool:
    return isinstance(module, FirstSlice) and isinstance(module.linear, TernaryLinear)
