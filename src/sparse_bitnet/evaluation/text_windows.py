# SPDX-License-Identifier: Apache-2.0
"""Cutting a text of tokens into windows that score every token but the first exactly once."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from sparse_bitnet.data.chat import BEGINS, LEARNT
from sparse_bitnet.errors import UserError

NOT_SCORED = -100
"""Label of a position whose prediction does not count."""

_AT_ONCE = 1 << 20


class TokenSequence(Protocol):
    """A one-dimensional array of token ids: a numpy array or a `TokenDataset`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any) -> np.ndarray: ...


class Window(NamedTuple):
    """Input tokens start..end, of which those from `scored_from` on have their prediction scored."""

    start: int
    end: int
    scored_from: int


def check_windows(
    tokens: TokenSequence | np.ndarray,
    context_length: int,
    stride: int,
    *,
    positions: int | None,
    vocab_size: int,
) -> None:
    """Raise `UserError` for a text or windows that a model of these sizes cannot score."""
    if len(tokens) < 2:
        raise UserError(f"the text has {len(tokens)} tokens; perplexity needs at least 2")
    if context_length < 1 or not 1 <= stride <= context_length:
        raise UserError(
            f"context_length={context_length}, stride={stride}: needs 1 <= stride <= context_length"
        )
    if positions is not None and context_length > positions:
        raise UserError(f"context_length={context_length}: the model has {positions} positions")
    starts = range(0, len(tokens), _AT_ONCE)
    largest = max(int(tokens[start : start + _AT_ONCE].max()) for start in starts)
    if largest >= vocab_size:
        raise UserError(
            f"token {largest} is outside the model's vocabulary of {vocab_size}: the data was tokenised "
            "for another model"
        )


def windows(
    tokens: int, context_length: int, stride: int, chat: np.ndarray | None = None
) -> Iterator[Window]:
    """Cut a text of this many tokens; each prediction 0..tokens-2 is scored in exactly one window.

    `chat`: the stored tokens, where the text is conversations. Each is cut alone, and windows without
    an answer are left out.
    """
    begins = [] if chat is None else (np.flatnonzero(chat[1:tokens] & BEGINS) + 1).tolist()
    for first, following in itertools.pairwise([0, *begins, tokens]):
        scored_from = start = first
        while scored_from < following - 1:
            end = min(start + context_length, following - 1)
            window = Window(start, end, scored_from)
            if chat is None or answers(chat, window).any():
                yield window
            scored_from = end
            start += stride


def answers(chat: np.ndarray, window: Window) -> np.ndarray:
    """Which of the scored predictions of a window are an answer's, bool."""
    return chat[window.scored_from + 1 : window.end + 1] & LEARNT != 0


def equal_lengths(cut: Iterator[Window], batch_size: int) -> Iterator[list[Window]]:
    """Batches of windows of one length: no padding, so no masks and no wasted work."""
    batch: list[Window] = []
    for window in cut:
        same = not batch or window.end - window.start == batch[0].end - batch[0].start
        if len(batch) == batch_size or not same:
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch


def inputs_and_labels(
    tokens: TokenSequence | np.ndarray, window: Window, chat: np.ndarray | None = None
) -> tuple[Tensor, Tensor]:
    """Both int64 [window length]; labels are the tokens after the inputs, or `NOT_SCORED`."""
    piece = np.asarray(tokens[window.start : window.end + 1]).astype(np.int64)
    inputs, labels = torch.from_numpy(piece[:-1]), torch.from_numpy(piece[1:].copy())
    labels[: window.scored_from - window.start] = NOT_SCORED
    if chat is not None:
        labels[window.scored_from - window.start :][~answers(chat, window)] = NOT_SCORED
    return inputs, labels
