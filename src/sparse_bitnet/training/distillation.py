# SPDX-License-Identifier: Apache-2.0
"""What a run with a teacher needs before its first step: the loss, and the teacher's logits on disk where
it is not to be in memory."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sparse_bitnet.data.loader import TokenLoader
from sparse_bitnet.progress import Progress
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet.training.logit_cache import LogitCache
from sparse_bitnet.training.run_folder import say
from sparse_bitnet.training.teacher_loss import DistillationLoss, Teacher

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
    rows = model.get_output_embeddings().weight.shape[0]
    if config.logit_cache is None:
        teacher = Teacher(config.teacher, dtype, device, rows)
        return DistillationLoss(model, config, teacher), None
    k = min(config.top_logits, rows)
    cache = LogitCache(
        Path(config.logit_cache), config.teacher, loader, config.steps, k=k, vocab=rows
    )
    return DistillationLoss(model, config, None), cache


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
