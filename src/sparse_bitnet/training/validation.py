# SPDX-License-Identifier: Apache-2.0
"""The loss of a run's held-out tokens, shared by its processes."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparse_bitnet.data.documents import SPLITS
from sparse_bitnet.data.loader import Windows
from sparse_bitnet.data.shards import TokenDataset
from sparse_bitnet.errors import UserError
from sparse_bitnet.nn.convert import evaluation_mode, sparse_layers
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet.training.device import wide_products
from sparse_bitnet.training.distributed import World
from sparse_bitnet.training.loss import SummedLoss, mean_of, token_loss_sum
from sparse_bitnet.training.sharded_linear import selected_shards


def check_validation_data(config: TrainConfig) -> None:
    """Raise `UserError` when the validation split has no whole sequence, or nothing to learn in what is
    read of it: it is read at the end only."""
    held_out = TokenDataset.open(config.data, "validation", verify=False)
    if len(held_out) <= config.sequence_length and not held_out.is_chat:
        raise UserError(
            f"{config.data}: its {len(held_out):,} validation tokens are fewer than a sequence of "
            f"{config.sequence_length} and the token after it; prepare with --validation or a larger "
            "--validation-fraction"
        )
    if held_out.is_chat:
        cut = Windows(held_out, config.sequence_length)
        if not cut.learnt(np.arange(_window_count(cut, config))):
            raise UserError(
                f"{config.data}: no answer in its first {config.validation_tokens:,} validation tokens: "
                "raise --validation-tokens"
            )


def _window_count(cut: Windows, config: TrainConfig) -> int:
    if not config.validation_tokens:
        return len(cut)
    return min(len(cut), max(1, config.validation_tokens // config.sequence_length))


def identity_of(data: str | Path, verify: bool = False) -> dict[str, Any]:
    """What prepared text is, by split; see `TokenDataset.identity`, and `open` for `verify`."""
    opened = (TokenDataset.open(data, split, verify=verify) for split in SPLITS)
    return {dataset.split: dataset.identity() for dataset in opened}


def validation_loss(
    loss: SummedLoss,
    config: TrainConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    world: World | None = None,
) -> tuple[float, int]:
    """Mean loss over the first `validation_tokens` of the validation split, in whole sequences.

    The processes of `world` share the batches; all get the mean over all of them, and the number of
    tokens that were scored.
    """
    world = world or World()
    dataset = TokenDataset.open(config.data, "validation", verify=world.is_main)
    cut = Windows(dataset, config.sequence_length)
    windows = _window_count(cut, config)
    own = max(1, config.batch_size // world.size)  # as many as a step has at most
    size = min(config.micro_batch_size or own, own)

    def batch(first: int) -> list[Tensor]:
        found = cut.batch(np.arange(first, min(first + size, windows)))
        return [torch.from_numpy(each) for each in found]

    def batches() -> Iterator[Sequence[Tensor]]:
        for start in range(0, windows, size * world.size):
            first = start + size * world.rank
            if first < windows:
                yield batch(first)
            else:  # a split model computes in step: nothing of this batch is scored
                input_ids, labels, *positions = batch(start)
                yield input_ids, torch.full_like(labels, -100), *positions

    layers = sparse_layers(loss.model).values()
    with (
        evaluation_mode(loss.model),
        selected_shards(layers, world.sum_shards),
        wide_products(device, dtype),
    ):
        sums = token_loss_sum(loss, batches(), device=device, dtype=dtype)
    return mean_of(*world.sum(sums).tolist())
