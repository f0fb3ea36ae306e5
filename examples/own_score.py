# SPDX-License-Identifier: Apache-2.0
"""A user-defined score in a training run: weights in columns with a large norm are kept first.

pip install ".[train]" && python examples/own_score.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sparse_bitnet import convert_, register_score, selected


@register_score("column-norm")
def column_norm(weight: torch.Tensor, *, power: float = 0.5) -> torch.Tensor:
    """Return |weight| times a power of the norm of its column."""
    return weight.abs() * weight.norm(dim=0, keepdim=True) ** power


def main(steps: int = 20) -> list[float]:
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, **sizes))
    convert_(model, "ternary-6:8,score=column-norm:power=0.25").train()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for _ in range(steps):
        ids = torch.arange(32).repeat(4, 1) + torch.randint(0, 96, (4, 1))
        with selected(model):
            (loss := model(input_ids=ids, labels=ids).loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(
        f"loss {losses[0]:.3f} -> {losses[-1]:.3f} with {model.config.quantization_config['format']}"
    )
    return losses


if __name__ == "__main__":
    main()
