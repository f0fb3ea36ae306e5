# SPDX-License-Identifier: Apache-2.0
"""The loss of a run's held-out tokens, shared by its processes."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from sparse_bitnet.data.loader import Windows
from sparse_bitnet.data.shards import TokenDataset
from sparse_bitnet.errors import UserError
from sparse_bitnet.nn.convert import evaluation_mode, sparse_layers
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet.training.device import autocast
from sparse_bitnet.training.distributed import World
from sparse_bitnet.training.loss import SummedLoss, mean_of
from sparse_bitnet.training.sharded_linear import selected_shards


def held_out_windows(config: TrainConfig, *, verify: bool = True) -> Windows:
    """The validation split in windows of `sequence_length`; `verify` as of `TokenDataset.open`.

    Raises `UserError` when it has no whole sequence, or nothing to learn in what is read of it.
    """
    dataset = TokenDataset.open(config.data, "validation", verify=verify)
    if len(dataset) <= config.sequence_length and not dataset.is_chat:
        raise UserError(
            f"{config.data}: its {len(dataset):,} validation tokens are fewer than a sequence of "
            f"{config.sequence_length} and the token after it; prepare with --validation or a larger "
            "--validation-fraction"
        )
    held_out = Windows(dataset, config.sequence_length)
    if dataset.is_chat and not held_out.learnt(np.arange(_count(held_out, config))):
        raise UserError(
            f"{config.data}: no answer in its first {config.validation_tokens:,} validation tokens: "
            "raise --validation-tokens"
        )
    return held_out


def _count(held_out: Windows, config: TrainConfig) -> int:
    """How many windows a validation reads."""
    if not config.validation_tokens:
        return len(held_out)
    return min(len(held_out), max(1, config.validation_tokens // config.sequence_length))


def validation_loss(
    loss: SummedLoss,
    config: TrainConfig,
    held_out: Windows,
    *,
    device: torch.device,
    dtype: torch.dtype,
    world: World | None = None,
) -> tuple[float, int]:
    """Mean loss over the first `validation_tokens` of the validation split, in whole sequences.

    The processes of `world` share the batches; all get the mean over all of them, and the number of
    tokens that were scored.
    """
    world, windows = world or World(), _count(held_out, config)
    own = max(1, config.batch_size // world.size)  # as many as a step has at most
    size = min(config.micro_batch_size or own, own)

    def batches() -> Iterator[Sequence[Tensor]]:
        for start in range(0, windows, size * world.size):
            first = start + size * world.rank
            scored = first < windows
            first = first if scored else start
            batch = held_out.batch(np.arange(first, min(first + size, windows)))
            input_ids, labels, *positions = map(torch.from_numpy, batch)
            # A split model computes in step: of a batch that others have begun nothing is scored.
            yield input_ids, labels if scored else torch.full_like(labels, -100), *positions

    return mean_token_loss(loss, batches(), device=device, dtype=dtype, world=world)


@torch.no_grad()
def mean_token_loss(
    loss: SummedLoss,
    batches: Iterable[Sequence[Tensor]],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    world: World | None = None,
) -> tuple[float, int]:
    """Exact token-weighted mean loss in nats over all processes, and how many tokens were scored.

    Runs the trained forward (mask and codes selected once) in evaluation mode under autocast to
    `dtype`; `batches` yields (input_ids, labels) as `SummedLoss` takes them. The model's mode is
    restored. Raises `UserError` when there is nothing to score.
    """
    world, layers = world or World(), sparse_layers(loss.model).values()
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    with (
        evaluation_mode(loss.model),
        selected_shards(layers, world.sum_shards),
        autocast(device, dtype),
    ):
        for batch in batches:
            input_ids, labels, *positions = (each.to(device) for each in batch)
            sums += torch.stack([loss(input_ids, labels, *positions), (labels >= 0).sum()])
    return mean_of(*world.sum(sums).tolist())
