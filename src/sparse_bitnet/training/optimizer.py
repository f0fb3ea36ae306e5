# SPDX-License-Identifier: Apache-2.0
"""AdamW with its parameter groups."""

from typing import TYPE_CHECKING

import torch

from sparse_bitnet.training.config import TrainConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def build_optimizer(model: "PreTrainedModel", config: TrainConfig) -> torch.optim.AdamW:
    """AdamW whose weight decay applies to the matrices of the blocks, and to embeddings on request."""
    embeddings = {
        id(module.weight)
        for module in (model.get_input_embeddings(), model.get_output_embeddings())
        if module
    }
    decayed: list[torch.nn.Parameter] = []
    plain: list[torch.nn.Parameter] = []
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        matrix = parameter.dim() >= 2
        decays = matrix and (config.decay_embeddings or id(parameter) not in embeddings)
        (decayed if decays else plain).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(
        groups, lr=config.learning_rate, betas=betas, eps=config.epsilon, fused=True
    )
