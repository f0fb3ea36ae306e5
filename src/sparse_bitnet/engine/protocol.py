# SPDX-License-Identifier: Apache-2.0
"""Interface of an engine, and the code that all engines share: sequences, checks of a batch, and
locking. Text generation, the scheduler and lm-eval use it. Free of torch.

`engine.Engine` runs packed models in C++; `transformers_engine.TransformersEngine` any transformers
model.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np

from sparse_bitnet.errors import UserError

WhichLogits = Literal["none", "last", "all", "hidden"]


class ContextFull(UserError):
    """Raised when a sequence would exceed the context length."""


class CacheFull(UserError):
    """Raised when the cache has no room for the tokens of a forward; closing sequences makes room."""


class EngineSequence:
    """A sequence of tokens whose keys and values an engine holds."""

    def __init__(self, engine: "InferenceEngine", cache: Any, tokens: list[int]) -> None:
        """Create a sequence; only `engine` calls this. `cache` is opaque to callers."""
        self.engine, self.cache = engine, cache
        self._tokens = tokens
        self.is_open = True
        engine.sequences.append(self)

    @property
    def tokens(self) -> list[int]:
        """A copy of the tokens so far."""
        return list(self._tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def fork(self, length: int | None = None) -> "EngineSequence":
        """Return a new sequence with the first `length` tokens (default: all). Raises `CacheFull`."""
        with self.engine.turn():
            length = self.check(len(self) if length is None else length)
            cache = self.engine._fork(self, length)
            return EngineSequence(self.engine, cache, self._tokens[:length])

    def reusable(self, length: int) -> int:
        """Return how many of the first `length` tokens a fork would not have to compute again."""
        with self.engine.turn():
            return self.engine._reusable(self, self.check(length))

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on."""
        with self.engine.turn():
            if self.check(length) < len(self):
                del self._tokens[length:]
                self.engine._truncate(self)

    def close(self) -> None:
        """Free the memory; a second call does nothing."""
        with self.engine._turns:
            if self.is_open:
                self.engine._release(self)
                self.engine.sequences.remove(self)
                self.is_open = False

    def check(self, length: int) -> int:
        """Return the length. Raises `ValueError` if the sequence is closed or has fewer tokens."""
        if not self.is_open:
            raise ValueError("the sequence is closed")
        if not 0 <= length <= len(self):
            raise ValueError(f"length {length}: the sequence has {len(self)} tokens")
        return length


class InferenceEngine(ABC):
    """A loaded model with a KV cache for many sequences. Calls from several threads run one after
    another.

    Attributes:
        vocab_size: number of tokens that the model knows.
        context_length: maximum number of tokens of one sequence.
        hidden_size: size of a hidden state.
        sequences: the open sequences.
    """

    page_tokens = 1
    """Tokens per page of the cache; a sequence takes whole pages."""

    batch_invariant = False
    """Whether a token's logits are bit-identical whatever else is in the batch."""

    most_states: int | None = None
    """Maximum number of recurrent states, all sequences together; a prompt needs two. None: the model has
    none, and sequences that are cut compute nothing again."""

    def __init__(
        self, vocab_size: int, hidden_size: int, positions: int, context_length: int | None
    ) -> None:
        """`context_length`: default all positions of the model. Raises `UserError` for more."""
        if not 1 <= (length := context_length or positions) <= positions:
            raise UserError(
                f"--context-length {length}: the model was made for 1 to {positions} tokens"
            )
        self.vocab_size, self.hidden_size, self.context_length = vocab_size, hidden_size, length
        self.sequences: list[EngineSequence] = []
        self._turns = threading.RLock()
        self._is_closed = False

    @property
    @abstractmethod
    def free_tokens(self) -> int:
        """Return the number of tokens for which the cache has whole free pages."""

    def new_sequence(self) -> EngineSequence:
        """Return an empty sequence."""
        with self.turn():
            return EngineSequence(self, self._open(), [])

    def forward(
        self, batch: Sequence[tuple[EngineSequence, Sequence[int]]], logits: WhichLogits = "last"
    ) -> list[np.ndarray]:
        """Append tokens to sequences, each once in the batch, and return float32 results for each entry.

        `logits` selects them: [vocab_size] after its last token ("last"); [tokens, vocab_size] ("all");
        the hidden states after the final norm, [tokens, hidden_size] ("hidden"); or an empty list
        ("none").

        Raises, before anything changes, `ContextFull` or `CacheFull`, and `ValueError` for an entry
        without tokens, a token outside the vocabulary, and a sequence that is closed, of another engine
        or twice in the batch.
        """
        with self.turn():
            if len({id(sequence) for sequence, _ in batch}) < len(batch):
                raise ValueError("a sequence is twice in the batch")
            checked = [(sequence, self._checked(sequence, tokens)) for sequence, tokens in batch]
            try:
                rows = self._compute(checked, logits) if checked else []
            except BaseException:
                # After Ctrl-C or a MemoryError, caches may be ahead of the tokens.
                for sequence, _ in checked:
                    self._truncate(sequence)
                raise
            for sequence, tokens in checked:
                sequence._tokens += tokens.tolist()
            return rows

    def close(self) -> None:
        """Free the memory and close all sequences, after a call of another thread has ended; a second
        call does nothing."""
        with self._turns:
            for sequence in list(self.sequences):
                sequence.close()
            if not self._is_closed:
                self._is_closed = True
                self._close()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Keep other threads off the engine inside the block. Raises `ValueError` after `close`."""
        with self._turns:
            if self._is_closed:
                raise ValueError("the engine is closed")
            yield

    def _checked(self, sequence: EngineSequence, tokens: Sequence[int]) -> np.ndarray:
        """Return the tokens as int32; numbers out of range are refused before they are narrowed."""
        if getattr(sequence, "engine", None) is not self:
            raise ValueError("a sequence of another engine")
        sequence.check(0)
        array = np.asarray(tokens)
        if array.ndim != 1 or not array.size or array.dtype.kind not in "iu":
            raise ValueError("tokens are a list of at least one whole number")
        if array.min() < 0 or array.max() >= self.vocab_size:
            raise ValueError(f"a token is outside the vocabulary of {self.vocab_size}")
        if len(sequence) + len(array) > self.context_length:
            raise ContextFull(
                f"{len(sequence)} tokens and {len(array)} more pass the context length of "
                f"{self.context_length}"
            )
        return np.ascontiguousarray(array, np.int32)

    @abstractmethod
    def _compute(
        self, batch: list[tuple[EngineSequence, np.ndarray]], logits: WhichLogits
    ) -> list[np.ndarray]:
        """Compute `forward` for a checked batch."""

    @abstractmethod
    def _open(self) -> Any:
        """Return the `cache` of a new sequence."""

    @abstractmethod
    def _fork(self, sequence: EngineSequence, length: int) -> Any:
        """Return the `cache` of a new sequence with the first tokens of another."""

    def _reusable(self, sequence: EngineSequence, length: int) -> int:
        """Return `length`, or less if the engine would compute the last of these tokens again."""
        return length

    @abstractmethod
    def _truncate(self, sequence: EngineSequence) -> None:
        """Cut the cache back to the tokens, also after a `_compute` that was interrupted."""

    @abstractmethod
    def _release(self, sequence: EngineSequence) -> None:
        """Free the `cache` of a sequence that is closed."""

    @abstractmethod
    def _close(self) -> None:
        """Free the model; sequences are closed already."""
