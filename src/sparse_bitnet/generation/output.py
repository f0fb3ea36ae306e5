# SPDX-License-Identifier: Apache-2.0
"""What a generation gives: pieces of text, their scores, and why it ends."""

import math
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from sparse_bitnet.generation.sampling import check_largest
from sparse_bitnet.generation.stop import StopStrings
from sparse_bitnet.generation.text import TextStream, TextTokenizer

FinishReason = Literal["stop", "length", "cancelled", "shutdown", "error"]
"""An end token or a stop string, `max_tokens`, the one who asked, the server's end, a failure."""


class GeneratedText:
    """The text of one generation, token by token: whole characters, up to a stop string."""

    def __init__(
        self, tokenizer: TextTokenizer, stop: Sequence[str] = (), *, is_start: bool = False
    ) -> None:
        """`is_start`: see `TextStream`; for answers, which continue no text."""
        self._stream = TextStream(tokenizer, is_start=is_start)
        self._stop = StopStrings(stop)
        self._names = tokenizer.special_tokens
        self._length = self._given = 0
        self.held: deque[int] = deque()
        """Where tokens begin of which no text has been given out: a stop string may take them."""

    @property
    def stopped(self) -> bool:
        """A stop string has come; nothing further will be given out."""
        return self._stop.found is not None

    def add(self, token: int) -> str:
        """The text that has become certain with this token."""
        self.held.append(self._length)
        text = self._stream.feed(token)
        self._length += len(text)
        if token in self._names:
            return self._counted(self._stop.feed(self._names[token], is_shown=False))
        return self._counted(self._stop.feed(text))

    def flush(self) -> str:
        """What was held back, when no token follows."""
        return self._counted(self._stop.feed(self._stream.flush()) + self._stop.flush())

    def _counted(self, text: str) -> str:
        self._given += len(text)
        while self.held and self.held[0] < self._given:
            self.held.popleft()
        return text


_PAIR = struct.Struct("<id")


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token, its natural log-probability before sampling's changes, and the likeliest tokens there."""

    token: int
    logprob: float | None
    """None for the first token of a prompt, which nothing precedes."""
    packed_top: bytes = b""
    """`top` in few bytes: a million tuples would hold up everything when garbage is collected."""

    @property
    def top(self) -> tuple[tuple[int, float], ...]:
        """Tokens and log-probabilities, the likeliest first."""
        return tuple(_PAIR.iter_unpack(self.packed_top))


def score(logits: np.ndarray, token: int, top: int) -> TokenScore:
    """The token's natural log-probability under float32 logits [vocab_size], and the `top` likeliest
    (ties: the lower token first).

    Raises `UserError` for logits that are not numbers.
    """
    best = int(logits.argmax())
    peak = float(logits[best])
    check_largest(peak)
    powers = np.subtract(logits, peak, dtype=np.float64)
    total = peak + math.log(np.exp(powers, out=powers).sum())
    order: Iterable[int] = ()
    if (top := min(top, len(logits))) == 1:
        order = (best,)
    elif top:
        # The partition may leave some of equal values out, so everything as high as its last counts.
        least = np.partition(logits, -top)[-top]
        found = np.flatnonzero(logits >= least)
        order = found[np.argsort(-logits[found], kind="stable")][:top]
    likeliest = [_PAIR.pack(index, _finite(float(logits[index]) - total)) for index in order]
    return TokenScore(token, _finite(float(logits[token]) - total), b"".join(likeliest))


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes this for tokens that are out of the question."""
    return max(float(logprob), -9999.0)


@dataclass(frozen=True, slots=True)
class Output:
    """Something new of a generation. The last one has `finish`."""

    text: str
    scores: tuple[TokenScore, ...] = ()
    finish: FinishReason | None = None
    token: int | None = None
    """The one drawn, if one was."""

    generated: int = 0
    """Tokens drawn by then."""

    def then(self, other: "Output") -> "Output":
        """Both as one."""
        return replace(other, text=self.text + other.text, scores=self.scores + other.scores)
