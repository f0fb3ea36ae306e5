# SPDX-License-Identifier: Apache-2.0
"""What some families do to the products of their head: a scale (Granite, Cohere), a cap (Gemma)."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def output_scale(model: "PreTrainedModel") -> float:
    """What the model's own forward multiplies the head's products by: 1 in most families."""
    config: Any = model.config.get_text_config()
    scale = float(getattr(config, "logits_scaling", None) or 1)  # Granite, MiniCPM divide by it
    if not config.model_type.startswith("hyperclovax"):
        scale = 1 / scale
    for name in ("logit_scale", "lm_head_multiplier", "output_multiplier"):
        value = getattr(config, name, None)
        scale *= 1 if value is None else value
    return scale


def logit_cap(model: "PreTrainedModel") -> float | None:
    """The value that the model's own forward keeps its logits below; None in most families."""
    config: Any = model.config.get_text_config()
    names = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
    return next((cap for name in names if (cap := getattr(config, name, None))), None)


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """`logits`, in between -cap and cap by tanh."""
    return logits if cap is None else torch.tanh(logits / cap) * cap
