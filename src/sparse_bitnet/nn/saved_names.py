# SPDX-License-Identifier: Apache-2.0
"""The names under which transformers stores a model's weights, where they are not the modules' own."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def loaded_names(model: Any, stored: Iterable[str]) -> dict[str, str]:
    """Stored name -> name of the parameter into which transformers loads it, by its own renaming."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    transforms = get_model_conversion_mapping(model)
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    renamings: list[Any] = [entry for entry in transforms if entry not in converters]
    own = dict.fromkeys(model.state_dict(), True)
    prefix = model.base_model_prefix
    return {name: rename_source_key(name, renamings, converters, prefix, own)[0] for name in stored}


def lost_weights(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Those of a transformers model's parameters that saving and loading would not bring back."""
    from transformers import PreTrainedModel
    from transformers.core_model_loading import revert_weight_conversion

    if not isinstance(model, PreTrainedModel):
        return []
    shapes = {name: torch.empty_like(t, device="meta") for name, t in model.state_dict().items()}
    stored = revert_weight_conversion(model, shapes)
    found = set(loaded_names(model, stored).values())
    return [name for name in names if name not in found]
