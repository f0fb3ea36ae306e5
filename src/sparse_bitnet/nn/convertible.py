# SPDX-License-Identifier: Apache-2.0
"""What `convert_` finds in a model: linear layers under any of their names, and fused experts."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from sparse_bitnet.nn.layer import SparseBitConfig, SparseBitLinear

_CONV1D = "transformers.pytorch_utils.Conv1D"
_LINEAR = ("transformers.models.falcon.modeling_falcon.FalconLinear",)
"""Subclasses of `nn.Linear` that compute what it does; others may not use their forward at all."""

_FUSED = "transformers.integrations.moe"
"""Where the gate of fused experts comes from; families with a gate of their own are left alone."""


def is_linear(module: nn.Module) -> bool:
    """Whether the module is a linear layer by another name at most, its weight not computed (pruned)."""
    known = isinstance(module, SparseBitLinear) or type(module) is nn.Linear
    named = known or _class_name(module) in (_CONV1D, *_LINEAR)
    return named and isinstance(module.weight, nn.Parameter)


def is_fused_experts(module: nn.Module) -> bool:
    """Whether the module is a mixture of gated experts, fused into tensors [experts, out, in]."""
    gate = getattr(type(module), "_apply_gate", None)
    if getattr(gate, "__module__", "") != _FUSED or not getattr(module, "is_concatenated", False):
        return False
    unlike = ("is_transposed", "has_bias", "has_post_expert_norm")
    weights = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    return not any(getattr(module, name, False) for name in unlike) and all(
        isinstance(weight, nn.Parameter) and weight.dim() == 3 for weight in weights
    )


def in_features_of(module: nn.Module) -> list[int]:
    """Widths of the rows of the module's matrices, along which groups lie."""
    if is_fused_experts(module):
        experts: Any = module
        return [experts.gate_up_proj.shape[-1], experts.down_proj.shape[-1]]
    weight: Any = module.weight
    return [weight.shape[0 if _class_name(module) == _CONV1D else 1]]


def converted(
    module: nn.Module, config: SparseBitConfig, name: str
) -> "SparseBitLinear | SparseBitExperts":
    """The `SparseBitLinear`, or the experts of such, that stands for a module of the kinds above.

    A linear layer keeps its very parameters; the weight of a `Conv1D` is transposed and experts are
    taken apart, so theirs are new ones.
    """
    if is_fused_experts(module):
        return SparseBitExperts(module, config, name)
    if _class_name(module) == _CONV1D:
        transposed: Any = module
        weight = transposed.weight
        linear = _linear(weight.detach().t().contiguous(), weight.requires_grad, transposed)
        linear.bias = transposed.bias
        return SparseBitLinear.from_linear(linear, config, name)
    assert isinstance(module, nn.Linear)
    return SparseBitLinear.from_linear(module, config, name)


class SparseBitExperts(nn.Module):
    """Gated experts whose matrices are layers of their own, each with its own scale.

    Expert e has `gate_up` (gate and up projection, one matrix) and `down`.
    """

    def __init__(self, experts: Any, config: SparseBitConfig, name: str) -> None:
        super().__init__()
        self.act_fn = experts.act_fn
        fused = {"gate_up": experts.gate_up_proj, "down": experts.down_proj}
        self.experts = len(fused["down"])
        for index in range(self.experts):
            layers = {
                part: SparseBitLinear.from_linear(
                    _linear(weight[index].detach().clone(), weight.requires_grad, experts),
                    config,
                    f"{name}.{index}.{part}",
                )
                for part, weight in fused.items()
            }
            self.add_module(str(index), nn.ModuleDict(layers))
        self.train(experts.training)

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Sum over each token's experts, weighted.

        Args:
            hidden: [tokens, hidden].
            top_k_index: experts of each token, [tokens, k].
            top_k_weights: of the same shape.
        """
        result = torch.zeros_like(hidden)
        for index in range(self.experts):
            expert: Any = self.get_submodule(str(index))
            position, token = torch.where(top_k_index.t() == index)
            gate, up = expert["gate_up"](hidden[token]).chunk(2, dim=-1)
            y = expert["down"](self.act_fn(gate) * up) * top_k_weights[token, position, None]
            result.index_add_(0, token, y.to(result.dtype))
        return result


def _linear(weight: Tensor, trained: bool, owner: nn.Module) -> nn.Linear:
    """A layer without bias around a new parameter, in the mode of the module it comes from."""
    out_features, in_features = weight.shape
    linear = nn.Linear(in_features, out_features, bias=False, device="meta").train(owner.training)
    linear.weight = nn.Parameter(weight, trained)
    return linear


def matrices(model: nn.Module) -> Iterator[tuple[str, Tensor, nn.Module]]:
    """Every weight matrix, or stack of them, that some product uses: (name, weight, its module).

    Not embeddings, convolutions and norms.
    """
    skipped = (nn.Embedding, nn.modules.conv._ConvNd)
    for prefix, module in model.named_modules():
        if not isinstance(module, skipped):
            for name, weight in module.named_parameters(prefix, recurse=False):
                if weight.dim() in (2, 3):
                    yield name, weight, module


def _class_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
