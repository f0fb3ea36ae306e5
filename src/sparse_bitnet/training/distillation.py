# SPDX-License-Identifier: Apache-2.0
"""What a run with a teacher needs before its first step: the loss, and the teacher's logits on disk where
it is not to be in memory."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sparse_bitnet.checkpoint.open_checkpoint import find_checkpoint
from sparse_bitnet.data.loader import TokenLoader
from sparse_bitnet.errors import UserError
from sparse_bitnet.progress import Progress, say
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet.training.logit_cache import LogitCache
from sparse_bitnet.training.teacher_loss import DistillationLoss, Teacher, head_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def distillation(
    config: TrainConfig,
    model: "PreTrainedModel",
    loader: TokenLoader,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[DistillationLoss, LogitCache | None]:
    """The loss of a student, and its teacher's logits if they come from the disk: to be filled.

    Raises `UserError` for a teacher that does not fit the student, and a cache of another one.
    """
    assert config.teacher is not None
    found = find_checkpoint(config.teacher)
    own, theirs = head_rows(model), head_rows(found.model())
    if own != theirs and not loader.dataset.check_tokenizer(found.folder, config.teacher):
        raise UserError(
            f"teacher {config.teacher} has a vocabulary of {theirs:,} tokens, the student one of "
            f"{own:,}, and no tokenizer of the teacher says that they are the same: copy it there, or "
            "start from the teacher"
        )
    # Of one tokenizer, the larger head is padded.
    loader.dataset.check_vocab(rows := min(own, theirs))
    if config.logit_cache is None:
        teacher = Teacher(config.teacher, dtype, device, rows)
        return DistillationLoss(model, config, teacher), None
    k = min(config.top_logits, rows)
    cache = LogitCache(
        Path(config.logit_cache), config.teacher, loader, config.steps, k=k, vocab=rows
    )
    return DistillationLoss(model, config, None, rows), cache


def fill(cache: LogitCache, config: TrainConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Write what is missing of a cache, and verify all of it. Raises what its methods raise."""
    assert config.teacher is not None
    if not cache.is_complete:
        say(
            f"{cache.folder}: {cache.bytes_per_token} bytes a token, {cache.bytes / 1e6:,.1f} MB of "
            f"the teacher's logits, {cache.parts - len(cache.checksums)} parts to write"
        )
        teacher = Teacher(config.teacher, dtype, device, cache.vocab_size)
        with Progress(plain_lines=10) as progress:
            line = progress.line("teacher's logits", "tokens")
            cache.fill(teacher, config.micro_batch_size or config.batch_size, line)
    cache.verify()
