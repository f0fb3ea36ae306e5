# SPDX-License-Identifier: Apache-2.0
"""Decoder layers of a transformers model in their GPU form: six fused operators around attention.

q/k/v and gate/up are one product each. Norms and SwiGLU hand quantised tokens to the product behind them,
which exist once, as int8; rope writes keys and values into the cache. Layers that are not ternary keep
their type and are merged alike, so that a dense model can be compared.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from sparse_bitnet.engine.gpu.linear import RoutePolicy, TernaryLinear
from sparse_bitnet.errors import UserError
from sparse_bitnet.nn.layer import SparseBitLinear
from sparse_bitnet.nn.packed_linear import PackedSparseBitLinear
from sparse_bitnet.ops.int8_linear import int8_linear
from sparse_bitnet.ops.norm_quantize import norm_quantize
from sparse_bitnet.ops.quantize_int8 import quantize_int8
from sparse_bitnet.ops.rope_cache import rope_cache
from sparse_bitnet.ops.swiglu_quantize import swiglu_quantize

MODEL_TYPES = ("qwen2", "qwen3", "llama")
"""transformers models whose layers are as `Block` computes them."""


class Block(nn.Module):
    """A decoder layer over a cache of fixed size."""

    def __init__(self, layer: Any, policy: RoutePolicy, name: str) -> None:
        """
        Args:
            layer: of a model in `MODEL_TYPES`, on its device.
            policy: of its ternary products: which for how many tokens.
            name: for error messages.
        """
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp

        def taken(parent: Any, *names: str) -> nn.Module:
            return _merged([(f"{name}.{n}", getattr(parent, n)) for n in names], policy)

        self.qkv = taken(attention, "q_proj", "k_proj", "v_proj")
        self.o = taken(attention, "o_proj")
        self.gate_up = taken(mlp, "gate_proj", "up_proj")
        self.down = taken(mlp, "down_proj")
        self.attention_norm, self.mlp_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.head_norms = nn.ModuleList()
        if hasattr(attention, "q_norm"):
            self.head_norms += [attention.q_norm, attention.k_norm]
        self.scaling, self.epsilon = attention.scaling, layer.input_layernorm.variance_epsilon

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        places: Tensor,
        keys: Tensor,
        values: Tensor,
        length: int,
    ) -> Tensor:
        """Float [sequences, tokens, hidden] -> the same shape.

        Args:
            x: the tokens.
            rotary: cosines and sines of their positions, [sequences, tokens, head_dim].
            places: int64 [sequences, tokens]: where they belong in the cache.
            keys, values: the cache, [sequences, kv_heads, places, head_dim].
            length: how much of it is looked at; with several tokens a sequence they are its last.
        """
        norms: list[Any] = [norm.weight for norm in self.head_norms]
        q_norm, k_norm = norms or (None, None)
        qkv = _after_norm(self.qkv, self.attention_norm, x)
        cache = keys, values
        query = rope_cache(qkv, *rotary, places, *cache, q_norm, k_norm, self.epsilon)
        y = attention(query, keys[:, :, :length], values[:, :, :length], places, self.scaling)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        gate_up = _after_norm(self.gate_up, self.mlp_norm, x)
        if isinstance(self.down, TernaryLinear):
            return x + self.down.after(swiglu_quantize, gate_up)
        gate, up = gate_up.chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def _after_norm(linear: Any, norm: Any, x: Tensor) -> Tensor:
    if isinstance(linear, TernaryLinear):
        return linear.after(norm_quantize, x, norm.weight, norm.variance_epsilon)
    return linear(norm(x))


def attention(
    query: Tensor, keys: Tensor, values: Tensor, places: Tensor, scaling: float
) -> Tensor:
    """Each token over the keys up to its place, fewer heads of keys than of queries.

    Args:
        query: [sequences, heads, tokens, head_dim].
        keys, values: [sequences, kv_heads, length, head_dim].
        places: int64 [sequences, tokens]; several are the last of the length.
        scaling: of the scores.

    Returns the shape of `query`.
    """
    more: dict[str, Any] = {"scale": scaling, "enable_gqa": True}
    if query.shape[2] > 1:
        mask = causal_lower_right(query.shape[2], keys.shape[2])
        return F.scaled_dot_product_attention(query, keys, values, mask, **more)
    if query.is_cuda:
        return split_attention(_compiled_flex(), query, keys, values, places[:, 0], more)
    near = torch.arange(keys.shape[2], device=query.device) <= places
    return F.scaled_dot_product_attention(query, keys, values, near[:, None, None], **more)


def split_attention(
    flex: Callable[..., Any],
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    places: Tensor,
    more: dict[str, Any],
) -> Tensor:
    """One token a sequence, at places [sequences]: `flex_attention` splits the keys over the GPU."""

    def up_to_its_own(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.where(k <= places[batch], score, -float("inf"))

    return flex(query, keys, values, score_mod=up_to_its_own, **more)


@cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


@torch.no_grad()
def prepare_(model: Any, policy: RoutePolicy) -> Any:
    """Replace the decoder layers of a transformers causal LM by their GPU form; returns `model`.

    Args:
        model: in evaluation mode, with ternary layers, trained or packed, or dense ones.
        policy: which product for how many tokens.

    Raises `UserError` for a model that is not in `MODEL_TYPES`, has other attention than full or a rope
    that follows the length, or, with its name, a layer that the kernels do not take.
    """
    kind = getattr(model.config, "model_type", None)
    if kind not in MODEL_TYPES:
        raise UserError(f"the GPU engine runs {', '.join(MODEL_TYPES)}, the model is {kind}")
    if model.config.hidden_act != "silu":
        raise UserError(f"the GPU engine has SwiGLU only, the model has {model.config.hidden_act}")
    kinds = sorted(set(getattr(model.config, "layer_types", None) or ["full_attention"]))
    if kinds != ["full_attention"]:
        raise UserError(f"the GPU engine has full attention only, the model has {', '.join(kinds)}")
    # A step has one table of frequencies, and idle slots stand at the last position.
    if (rope := model.get_decoder().rotary_emb.rope_type) in ("dynamic", "longrope"):
        raise UserError(f"the GPU engine has no ropes that follow the length, the model has {rope}")
    layers = model.get_decoder().layers
    for index, layer in enumerate(layers):
        layers[index] = Block(layer, policy, f"layer {index}")
    return model


def _merged(parts: list[tuple[str, Any]], policy: RoutePolicy) -> nn.Module:
    """One layer for those that share their input, outputs side by side."""
    linears: list[Any] = [_ternary(name, part) for name, part in parts]
    if all(isinstance(linear, TernaryLinear) for linear in linears):
        return TernaryLinear.merged(linears, policy, parts[0][0])
    if not all(type(linear) is nn.Linear for linear in linears):
        raise UserError(f"{parts[0][0]} and what shares its input are not all ternary")
    if len(linears) == 1:
        return linears[0]
    weight, bias = torch.cat([linear.weight for linear in linears]), None
    if linears[0].bias is not None:
        bias = nn.Parameter(torch.cat([linear.bias for linear in linears]))
    merged = nn.Linear(weight.shape[1], len(weight), bias=False, device="meta")
    merged.weight = nn.Parameter(weight)
    merged.register_parameter("bias", bias)
    return merged


def _ternary(name: str, module: Any) -> nn.Module:
    """The GPU form of a ternary layer; others as they are."""
    if not isinstance(module, SparseBitLinear | PackedSparseBitLinear):
        return module
    config = module.config
    if (config.weight, config.activation) != ("ternary", "int8"):
        raise UserError(
            f"{name}: the GPU kernels take ternary weights and int8 activations, the format is {config}"
        )
    if isinstance(module, SparseBitLinear):
        selection = module.select()
        codes, scale = selection.codes, selection.weight_scale
    elif module.norm is not None:
        raise UserError(f"{name} has a norm of its own, which the GPU engine does not have")
    else:
        codes, scale = module.decode_().codes, module.weight_scale
    assert codes is not None
    assert scale is not None
    if scale.dim() == 2 and scale.shape[1] > 1:
        raise UserError(
            f"{name} has scales for groups of weights, which the GPU engine does not have"
        )
    dense = RoutePolicy(always="dense")
    return TernaryLinear(codes, scale, module.bias, config.pattern, dense, name=name)


class Int8Head(nn.Module):
    """The output head with int8 weights, a scale a row: half of the bytes that a token reads of it."""

    codes: Tensor
    scale: Tensor

    def __init__(self, head: Any) -> None:
        super().__init__()
        codes, scale = quantize_int8(head.weight)
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("scale", scale.flatten(), persistent=False)
        self.bias = head.bias

    def forward(self, input: Tensor) -> Tensor:
        """[..., hidden] -> [..., vocabulary]."""
        x = quantize_int8(input)
        return int8_linear(*x, self.codes, self.scale, self.bias, input.dtype, ternary=False)


def int8_head_(model: Any) -> None:
    """Quantise the output head; an embedding that shares its weight stays as it is."""
    model.lm_head = Int8Head(model.get_output_embeddings())
