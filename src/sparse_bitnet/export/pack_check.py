# SPDX-License-Identifier: Apache-2.0
"""Does a packed folder compute what the trained model computes? Load both and compare logits."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparse_bitnet.checkpoint.open_checkpoint import find_checkpoint
from sparse_bitnet.errors import UserError
from sparse_bitnet.nn.convert import selected

SEQUENCES, TOKENS = 2, 64


@dataclass(frozen=True, kw_only=True)
class PackCheck:
    """How a packed model's logits compare with the trained one's on random tokens."""

    tokens: int
    exact: bool
    """Equal bit for bit to the trained model with the packed one's embeddings."""
    largest_difference: float
    """Largest |logit difference| to the trained model as it is: what rounding the embeddings does."""
    kl_divergence: float
    """Mean over positions, in nats, of packed from trained next-token probabilities."""


def check_packed(source: str | Path, packed: str | Path) -> PackCheck:
    """Compare the two in the dtype of the trained model, one in memory at a time.

    Raises `UserError` when either cannot be loaded or the trained one's logits are not finite.
    """
    model = _load(packed)
    vocabulary = model.get_input_embeddings().num_embeddings
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (SEQUENCES, TOKENS), generator=generator)
    packed_logits = _logits(model, ids)
    embeddings = [module.weight.detach() for module in _ends(model)]
    del model
    trained = _load(source)
    if trained.get_input_embeddings().num_embeddings != vocabulary:
        raise UserError(f"{packed} and {source} have different vocabularies")
    trained_logits = _logits(trained, ids)
    if not trained_logits.isfinite().all():
        raise UserError(f"{source} gives logits that are not finite; train it again")
    for module, weight in zip(_ends(trained), embeddings, strict=True):
        module.weight = nn.Parameter(weight.to(module.weight.dtype))
    rounded_logits = _logits(trained, ids)
    packed_log, trained_log = (
        F.log_softmax(logits.double(), -1) for logits in (packed_logits, trained_logits)
    )
    divergence = (trained_log.exp() * (trained_log - packed_log)).sum(-1).mean()
    return PackCheck(
        tokens=ids.numel(),
        exact=torch.equal(packed_logits, rounded_logits),
        largest_difference=float((packed_logits - trained_logits).abs().max()),
        kl_divergence=float(divergence),
    )


def _load(path: str | Path) -> Any:
    return find_checkpoint(path).load().eval()


@torch.no_grad()
def _logits(model: Any, ids: Tensor) -> Tensor:
    with selected(model):
        return model(input_ids=ids, use_cache=False).logits.float()


def _ends(model: Any) -> list[Any]:
    head = model.get_output_embeddings()
    return [model.get_input_embeddings(), *([] if head is None else [head])]
