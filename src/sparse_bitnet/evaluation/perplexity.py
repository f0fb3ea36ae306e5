# SPDX-License-Identifier: Apache-2.0
"""Held-out perplexity: the exact token-weighted mean over a text, with the trained forward.

Context. A text of N tokens is cut into windows of `context_length` input tokens, each of which
predicts the token after it. By default windows do not overlap: every token but the very first is
scored exactly once, with 1 to `context_length` tokens before it. With a `stride` below
`context_length` windows advance by `stride` tokens and score only their last `stride` predictions
(the first window all), so that every token has at least context_length - stride tokens before it, at
context_length / stride times the cost. Documents follow each other, an end-of-text token after
each, as in training.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sparse_bitnet.checkpoint.open_checkpoint import find_checkpoint
from sparse_bitnet.evaluation.held_out import DEFAULT_CONTEXT_LENGTH, read_held_out
from sparse_bitnet.evaluation.text_windows import (
    TokenSequence,
    check_windows,
    equal_lengths,
    inputs_and_labels,
    windows,
)
from sparse_bitnet.layer_config import SparseBitConfig
from sparse_bitnet.progress import OnProgress
from sparse_bitnet.training.device import resolve_device, resolve_dtype
from sparse_bitnet.training.loss import mean_token_loss

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """A measured perplexity and what it was measured on."""

    mean_nll: float
    """Negative log-likelihood in nats per scored token."""

    tokens: int
    """Tokens scored."""

    context_length: int
    stride: int
    text_bytes: int | None = None
    """UTF-8 bytes of the text, where the whole of it was scored."""

    @property
    def perplexity(self) -> float:
        """exp(mean_nll); infinite beyond the largest float, e^709.8."""
        return math.inf if self.mean_nll >= 709 else math.exp(self.mean_nll)

    @property
    def bits_per_byte(self) -> float | None:
        """Comparable between tokenizers; None where the size of the text is unknown."""
        if not self.text_bytes:
            return None
        return self.mean_nll * self.tokens / math.log(2) / self.text_bytes

    def to_dict(self) -> dict[str, Any]:
        """JSON-able: every field and both derived values."""
        derived = {"perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}
        return derived | dataclasses.asdict(self)


def perplexity(
    model: "PreTrainedModel",
    tokens: TokenSequence | np.ndarray,
    *,
    context_length: int,
    stride: int | None = None,
    batch_size: int = 8,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    text_bytes: int | None = None,
    chat: np.ndarray | None = None,
    on_batch: Callable[[int], None] | None = None,
) -> Perplexity:
    """Score a text with a transformers causal LM, masks and codes selected once.

    Args:
        model: in any mode, on `device`; the mode is restored.
        tokens: the text, at least two tokens.
        context_length: most input tokens per window.
        stride: tokens by which windows advance; `context_length` when not given.
        batch_size: windows per forward; changes the time, and the result by rounding only.
        dtype: float32, or bfloat16 for autocast to it.
        text_bytes: UTF-8 bytes of the text, for bits per byte.
        chat: the stored tokens of conversations, of which only the answers are scored.
        on_batch: called with the number of tokens scored so far.

    Raises `UserError` when there is nothing to score, for a stride outside 1..context_length, for a
    context beyond the model's positions, and for a token that the model's vocabulary lacks.
    """
    stride = context_length if stride is None else stride
    positions = getattr(model.config, "max_position_embeddings", None)
    embedded = _embedded_tokens(model)
    check_windows(tokens, context_length, stride, positions=positions, vocab_size=embedded)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        done = 0
        cut = windows(len(tokens), context_length, stride, chat)
        if chat is not None:  # conversations of one length share a batch
            cut = iter(sorted(cut, key=lambda window: window.end - window.start))
        for group in equal_lengths(cut, batch_size):
            pairs = [inputs_and_labels(tokens, window, chat) for window in group]
            yield torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])
            done += sum(window.end - window.scored_from for window in group)
            if on_batch:
                on_batch(done)

    mean, scored = mean_token_loss(model, batches(), device=device, dtype=dtype)
    assert chat is not None or scored == len(tokens) - 1
    return Perplexity(
        mean_nll=mean,
        tokens=scored,
        context_length=context_length,
        stride=stride,
        text_bytes=text_bytes,
    )


def _embedded_tokens(model: "PreTrainedModel") -> int:
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight.shape[0]


def format_name(config: SparseBitConfig, packed_format: str | None) -> str:
    """How an evaluated model is named: "ternary-6:8", or "ternary-6:8, packed as i2"."""
    return str(config) + (f", packed as {packed_format}" if packed_format else "")


def _format(model: "PreTrainedModel") -> str:
    """Of the first layer that has one of our formats, trained or packed."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, SparseBitConfig):
            return format_name(config, getattr(module, "packed_format", None))
    return "unconverted"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A perplexity with what was evaluated, on what, and how."""

    checkpoint: str
    """The folder or hub id that was loaded."""

    format: str
    """Text form of the SparseBitConfig, of a packed model also how it is packed (`format_name`);
    "unconverted" for a model without our layers."""

    data: str
    precision: str
    device: str
    result: Perplexity

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, flat."""
        fields = dataclasses.asdict(self)
        del fields["result"]
        return fields | self.result.to_dict()


def evaluate(
    checkpoint: str | Path,
    data: str | Path,
    *,
    context_length: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
    max_tokens: int = 0,
    precision: str = "auto",
    device: str = "auto",
    column: str | None = None,
    chat: bool = False,
    on_batch: OnProgress | None = None,
) -> Evaluation:
    """Held-out perplexity of a run, a checkpoint, or any transformers causal LM.

    Args:
        checkpoint: run folder, checkpoint folder, transformers folder or hub id.
        data: prepared folder (its validation split), or a text file or glob; with `chat` a file or glob
            of conversations. Of conversations the answers are scored.
        context_length: default the sequence length of training, or 2048, or the model's positions.
        max_tokens: score only this many tokens, the first ones; 0: all.
        precision, device: as in `TrainConfig`.
        column: of .jsonl, .json, .csv and .parquet files; default "text", of conversations "messages".
        on_batch: called with the tokens scored so far and the number of all.

    Other arguments as `perplexity`. Raises `UserError` for a checkpoint, data or combination of both
    that cannot be used.
    """
    found = find_checkpoint(checkpoint)
    text = read_held_out(data, str(found.folder), column=column, chat=chat)
    where = resolve_device(device)
    dtype = resolve_dtype(precision, where)
    model = found.load(dtype=torch.float32)
    model.to(where)  # type: ignore[arg-type]
    text.check_vocab(_embedded_tokens(model))
    if context_length is None:
        positions = getattr(model.config, "max_position_embeddings", DEFAULT_CONTEXT_LENGTH)
        context_length = min(found.trained_context_length or DEFAULT_CONTEXT_LENGTH, positions)
    tokens, text_bytes = text.first(max_tokens)
    result = perplexity(
        model,
        tokens,
        context_length=context_length,
        stride=stride,
        batch_size=batch_size,
        device=where,
        dtype=dtype,
        text_bytes=text_bytes,
        chat=text.chat,
        on_batch=on_batch and (lambda done: on_batch(done, len(tokens) - 1)),
    )
    return Evaluation(
        checkpoint=found.name,
        format=_format(model),
        data=text.name,
        precision=str(dtype).removeprefix("torch."),
        device=where.type,
        result=result,
    )
