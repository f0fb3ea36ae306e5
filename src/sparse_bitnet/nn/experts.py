# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts: splits transformers' two fused tensors into one layer per matrix."""

from typing import Any

import torch
from torch import Tensor, nn

from sparse_bitnet.nn.layer import SparseBitConfig, SparseBitLinear


def is_fused_experts(module: nn.Module) -> bool:
    """Whether the module is a mixture of experts, fused into tensors [experts, out, in], with the gate of
    most families."""
    gate = getattr(type(module), "_apply_gate", None)
    flags = ("is_concatenated", "is_transposed", "has_bias", "has_post_expert_norm")
    is_like = [flag for flag in flags if getattr(module, flag, False)] == ["is_concatenated"]
    if not is_like or getattr(gate, "__module__", "") != "transformers.integrations.moe":
        return False
    weights = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    return all(isinstance(each, nn.Parameter) and each.dim() == 3 for each in weights)


class SparseBitExperts(nn.Module):
    """Gated experts whose matrices are separate layers, each with its own scale.

    Expert e has `gate_up` (gate and up projection, one matrix) and `down`.
    """

    def __init__(self, experts: Any, config: SparseBitConfig, name: str) -> None:
        super().__init__()
        self.act_fn = experts.act_fn
        fused = {"gate_up": experts.gate_up_proj, "down": experts.down_proj}
        self.experts = len(fused["down"])
        for index in range(self.experts):
            expert = nn.ModuleDict()
            for part, weight in fused.items():
                linear = new_linear(weight[index].detach().clone(), weight, experts)
                expert[part] = SparseBitLinear.from_linear(linear, config, f"{name}.{index}.{part}")
            self.add_module(str(index), expert)
        self.train(experts.training)

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the sum of each token's experts, `top_k_index` [tokens, k], times their
        `top_k_weights`; `hidden` and the result are [tokens, hidden]."""
        result = torch.zeros_like(hidden)
        for index in range(self.experts):
            expert: Any = self.get_submodule(str(index))
            position, token = torch.where(top_k_index.t() == index)
            gate, up = expert["gate_up"](hidden[token]).chunk(2, dim=-1)
            y = expert["down"](self.act_fn(gate) * up) * top_k_weights[token, position, None]
            result.index_add_(0, token, y.to(result.dtype))
        return result


def new_linear(weight: Tensor, source: Tensor, owner: nn.Module) -> nn.Linear:
    """Return a layer without bias around a new parameter, trained if its source is."""
    out_features, in_features = weight.shape
    linear = nn.Linear(in_features, out_features, bias=False, device="meta").train(owner.training)
    linear.weight = nn.Parameter(weight, source.requires_grad)
    return linear
