# SPDX-License-Identifier: Apache-2.0
"""LoRA: peft's own adapters beside the linear layers of a model whose weights stay as they are.

The adapters are in full precision. Merged, they become part of the weight that is quantised: what they
add is rounded then, and `merged` says how much of it.
"""

import warnings
from typing import TYPE_CHECKING, Any

import torch

from sparse_bitnet.errors import UserError, install
from sparse_bitnet.nn.convert import sparse_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def add_adapters_(model: "PreTrainedModel", rank: int) -> Any:
    """Freeze a model and put an adapter of this rank beside each `SparseBitLinear` (Hu et al., "LoRA",
    ICLR 2022; alpha is twice the rank).

    Returns peft's wrapper, for `merged`; the model itself has the adapters. Raises `UserError` where peft
    is not installed.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise UserError(
            f"lora needs peft, which is not installed: {install('fine-tuning')}"
        ) from None
    names = list(sparse_layers(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by old names
        return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names))


@torch.no_grad()
def merged(adapted: Any) -> tuple["PreTrainedModel", float]:
    """The model with its adapters added to the weights, and the share of the weights whose code (with
    full precision: whether it is kept) is another than before."""
    before = [_kept(layer) for layer in sparse_layers(adapted).values()]
    model = adapted.merge_and_unload()
    after = [_kept(layer) for layer in sparse_layers(model).values()]
    changed = sum(int((a != b).sum()) for a, b in zip(before, after, strict=True))
    return model, changed / sum(each.numel() for each in after)


def _kept(layer: Any) -> torch.Tensor:
    """int8 codes, or the mask, [out_features, in_features]."""
    found = layer.select()
    if found.codes is not None:
        return found.codes
    return torch.ones_like(layer.weight, dtype=torch.bool) if found.mask is None else found.mask
