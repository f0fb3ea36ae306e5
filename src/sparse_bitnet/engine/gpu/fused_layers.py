# SPDX-License-Identifier: Apache-2.0
"""Trained or packed layers of a transformers model to their GPU form; q/k/v and gate/up become one.

A merged product runs where the first of its layers stood; the modules at the places of the others hand
out their slices, so the model's own code stays as it is. Norms and MLPs of known decoder layers hand
quantised tokens to the layers after them: activations between them exist once, as int8.
"""

from typing import Any

import torch
from torch import Tensor, nn

from sparse_bitnet.engine.gpu.linear import QuantizedTokens, RoutePolicy, TernaryLinear
from sparse_bitnet.errors import UserError
from sparse_bitnet.nn.layer import SparseBitLinear
from sparse_bitnet.nn.packed_linear import PackedSparseBitLinear
from sparse_bitnet.ops.int8_linear import int8_linear
from sparse_bitnet.ops.norm_quantize import norm_quantize
from sparse_bitnet.ops.quantize_int8 import quantize_int8
from sparse_bitnet.ops.swiglu_quantize import swiglu_quantize

MERGED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that share their input, in the order in which their parents call them."""

MODEL_TYPES = ("qwen2", "qwen3", "llama")
"""transformers models whose layers take norm, attention and MLP apart as this module expects."""


class FirstSlice(nn.Module):
    """Computes the merged product, returns its first slice and keeps the others for who asks next."""

    def __init__(self, linear: nn.Module, sizes: list[int]) -> None:
        super().__init__()
        self.linear, self.sizes = linear, sizes
        self.input: Tensor | QuantizedTokens | None = None
        self.slices: tuple[Tensor, ...] = ()

    def forward(self, input: Tensor | QuantizedTokens) -> Tensor:
        """[..., in_features] -> [..., sizes[0]]."""
        first, *rest = self.linear(input).split(self.sizes, -1)
        self.input, self.slices = input, tuple(rest)
        return first


class LaterSlice(nn.Module):
    """Returns its slice of the product that the first slice's module has just computed."""

    def __init__(self, first: FirstSlice, index: int, is_last: bool) -> None:
        super().__init__()
        # Not a submodule: it has one place in the model already.
        self.__dict__["first"] = first
        self.index, self.is_last = index, is_last

    def forward(self, input: Tensor | QuantizedTokens) -> Tensor:
        """[..., in_features] -> [..., sizes[index]]."""
        first: FirstSlice = self.__dict__["first"]
        if first.input is not input:
            return first.linear(input).split(first.sizes, -1)[self.index]
        result = first.slices[self.index - 1]
        if self.is_last:
            first.input, first.slices = None, ()
        return result


@torch.no_grad()
def prepare_(model: nn.Module, policy: RoutePolicy) -> nn.Module:
    """Replace every ternary int8 layer by its GPU form on the device it is on; returns `model`.

    Args:
        model: with `SparseBitLinear` (trained) or `PackedSparseBitLinear` (packed) layers.
        policy: which product for how many tokens.

    Raises `UserError`, naming the layer, for one without ternary weights and int8 activations, and
    when there is none at all.
    """
    targets = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, SparseBitLinear | PackedSparseBitLinear)
    }
    if not targets:
        raise UserError(f"{type(model).__name__} has no ternary layer to run on the GPU kernels")
    for name, module in targets.items():
        if (module.config.weight, module.config.activation) != ("ternary", "int8"):
            raise UserError(
                f"layer {name}: the GPU kernels take ternary weights and int8 activations, the format "
                f"is {module.config}"
            )
    dense = RoutePolicy(always="dense")
    for parent_name in sorted({name.rpartition(".")[0] for name in targets}):
        parent: Any = model.get_submodule(parent_name)
        children = {
            child: module for child, module in parent.named_children() if module in targets.values()
        }
        together = [names for names in MERGED if all(name in children for name in names)]
        alone = children.keys() - {name for names in together for name in names}
        for name in alone:
            setattr(parent, name, _ternary(children[name], policy, f"{parent_name}.{name}"))
        for names in together:
            parts = [_ternary(children[name], dense, f"{parent_name}.{name}") for name in names]
            put_merged_(parent, names, TernaryLinear.merged(parts, policy), parts)
    return model


def put_merged_(parent: Any, names: tuple[str, ...], linear: nn.Module, parts: list[Any]) -> None:
    """Put a layer that computes `parts` side by side at their places `names` in the parent."""
    first = FirstSlice(linear, [part.out_features for part in parts])
    setattr(parent, names[0], first)
    for index, name in enumerate(names[1:], 1):
        setattr(parent, name, LaterSlice(first, index, index == len(names) - 1))


def _ternary(module: Any, policy: RoutePolicy, name: str) -> TernaryLinear:
    if isinstance(module, SparseBitLinear):
        selection = module.select()
        codes, scale = selection.codes, selection.weight_scale
    else:
        codes, scale = module.decode_().codes, module.weight_scale
    assert codes is not None
    assert scale is not None
    if scale.dim() == 2 and scale.shape[1] > 1:
        raise UserError(
            f"layer {name} has scales for groups of weights, which the GPU engine does not have"
        )
    return TernaryLinear(codes, scale, module.bias, module.config.pattern, policy, name=name)


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


def fuse_(model: Any) -> Any:
    """Fuse what can be in a model after `prepare_`; returns `model`.

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
