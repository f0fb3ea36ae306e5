# SPDX-License-Identifier: Apache-2.0
"""Block-wise reconstruction: initialises a student before it is trained end to end.

One block after another, the converted block learns to reproduce the output of the teacher's block, from
the student's own hidden states as its input. It takes minutes, and saves most of the tokens that a plain
conversion needs to recover.
"""

import math
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from sparse_bitnet.data.loader import TokenLoader
from sparse_bitnet.data.shards import TokenDataset
from sparse_bitnet.errors import UserError
from sparse_bitnet.nn.convert import selected
from sparse_bitnet.progress import OnProgress, Progress, say
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet.training.device import autocast, blocks_of
from sparse_bitnet.training.distillation import Teacher
from sparse_bitnet.training.logits import hidden_states

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DEFAULT_WINDOWS = 64
EPOCHS = 4
WINDOWS = 4
"""Windows per optimiser step."""
LEARNING_RATE = 1e-3
WARMUP_STEPS = 8
_Arguments = dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]]
_LEAST_SQUARE = 1e-3
"""Lower limit of the mean square by which a token's error is divided."""


def start_from_teacher_(
    student: "PreTrainedModel",
    teacher: Teacher,
    config: TrainConfig,
    text: TokenDataset,
    dtype: torch.dtype,
    device: torch.device,
    *,
    alone: bool,
) -> None:
    """Reconstruct the blocks of a new run's student on the first `config.reconstruction_windows` of its
    data. The default is 64 for a student that starts from its teacher in one process (`alone`), else 0.

    Raises `UserError` as `reconstruct_`.
    """
    if (count := config.reconstruction_windows) is None:
        count = DEFAULT_WINDOWS if alone and config.init == config.teacher else 0
    if count == 0:
        return
    loader = TokenLoader(
        text, sequence_length=config.sequence_length, batch_size=count, seed=config.data_seed
    )
    input_ids, _, *positions = (each.to(device) for each in loader.batch(0))
    try:
        with Progress(plain_lines=10) as progress:
            errors = reconstruct_(
                cast(Any, student).to(device),
                teacher.model,
                (input_ids, *positions),
                dtype=dtype,
                seed=config.data_seed,
                report=progress.line("reconstructing blocks", "blocks"),
            )
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            "stopped; run the same command to start over from the first block"
        ) from None
    say(f"blocks reconstructed: relative error {errors[0]:.3f} (first) to {errors[-1]:.3f} (last)")


def reconstruct_(
    student: "PreTrainedModel",
    teacher: "PreTrainedModel",
    batch: tuple[Tensor, ...],
    *,
    dtype: torch.dtype,
    seed: int = 0,
    report: OnProgress = lambda done, total: None,
) -> list[float]:
    """Train the student's blocks, one after another, to reproduce the outputs of their teacher's blocks.

    Args:
        student: converted, with float32 parameters; changed in place.
        teacher: model of the same shape, on the same device.
        batch: calibration data: token ids, int64 [windows, tokens], and positions if windows hold
            several texts.
        dtype: compute type.
        seed: random seed for the order of the windows.
        report: called with the number of finished blocks and the number of all.

    Returns the mean relative squared error of each block in its last epoch. Raises `UserError` for
    models of different shapes.
    """
    blocks, originals = blocks_of(student), blocks_of(teacher)
    sizes = [model.config.get_text_config().hidden_size for model in (student, teacher)]
    if len(blocks) != len(originals) or len(set(sizes)) > 1:
        raise UserError(
            f"the student has {len(blocks)} blocks of width {sizes[0]}, its teacher {len(originals)} of "
            f"width {sizes[1]}: blocks cannot be reconstructed, use --reconstruction-windows 0"
        )
    parts = list(zip(*(each.split(WINDOWS) for each in batch), strict=True))
    order, device = torch.Generator().manual_seed(seed), batch[0].device
    with torch.no_grad(), selected(student), autocast(device, dtype):
        inputs, own = map(list, zip(*(_calls(student, part) for part in parts), strict=True))
        targets, theirs = map(list, zip(*(_calls(teacher, part) for part in parts), strict=True))
    errors = []
    for done, (block, original) in enumerate(zip(blocks, originals, strict=True)):
        with torch.no_grad(), autocast(device, dtype):
            targets = [_output(original, *each) for each in zip(targets, theirs, strict=True)]
        optimizer = torch.optim.AdamW(
            block.parameters(), LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        steps, losses = EPOCHS * len(parts), list[Tensor]()
        for step in range(steps):
            if step % len(parts) == 0:
                places, losses = torch.randperm(len(parts), generator=order).tolist(), []
            place = places[step % len(parts)]
            # A short warm-up, then a cosine to a tenth.
            rate = 0.55 + 0.45 * math.cos(math.pi * step / steps)
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(rate, (step + 1) / WARMUP_STEPS)
            with selected(block), autocast(device, dtype):
                error = _relative_error(_output(block, inputs[place], own[place]), targets[place])
            error.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(error.detach())
        with torch.no_grad(), selected(block), autocast(device, dtype):
            inputs = [_output(block, *each) for each in zip(inputs, own, strict=True)]
        errors.append(float(torch.stack(losses).mean()))
        report(done + 1, len(blocks))
    return errors


def _calls(model: "PreTrainedModel", part: tuple[Tensor, ...]) -> tuple[Tensor, _Arguments]:
    """Return the input of the first block, [rows, tokens, hidden], and each block's other arguments."""
    streams, others = list[Tensor](), _Arguments()

    def keep(block: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        streams[:] = streams or inputs[:1]
        others[block] = inputs[1:], named

    hooks = [b.register_forward_pre_hook(keep, with_kwargs=True) for b in blocks_of(model)]
    hidden_states(model, *part)
    for hook in hooks:
        hook.remove()
    return streams[0], others


def _output(block: nn.Module, stream: Tensor, others: _Arguments) -> Tensor:
    unnamed, named = others[block]
    output = block(stream, *unnamed, **named)
    return output[0] if isinstance(output, tuple) else output


def _relative_error(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean over tokens of the mean squared error, divided by the token's mean square."""
    output, target = output.float(), target.float()
    scale = target.square().mean(-1).clamp_min(_LEAST_SQUARE)
    return ((output - target).square().mean(-1) / scale).mean()
