# SPDX-License-Identifier: Apache-2.0
"""What a generation gives: pieces of text, their scores, and why it ends."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from sparse_bitnet.generation.stop import StopStrings
from sparse_bitnet.generation.text import TextStream, TextTokenizer
from sparse_bitnet.generation.token_score import TokenScore

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
        return self._counted(self._stop.feed(text))

    def flush(self) -> str:
        """What was held back, when no token follows."""
        return self._counted(self._stop.feed(self._stream.flush()) + self._stop.flush())

    def _counted(self, text: str) -> str:
        self._given += len(text)
        while self.held and self.held[0] < self._given:
            self.held.popleft()
        return text


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
