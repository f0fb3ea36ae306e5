# SPDX-License-Identifier: Apache-2.0
"""An engine without a model: its logits are a function of the tokens before them, so that any mix-up of
sequences, positions or neighbours changes the text. It counts, waits and fails as told."""

import time
import zlib
from collections.abc import Callable

import numpy as np

from sparse_bitnet.engine.protocol import CacheFull, ContextFull

PAGE = 64


def logits_after(tokens, vocab_size: int) -> np.ndarray:
    """float32 [vocab_size], from all tokens so far."""
    key = zlib.crc32(np.asarray(tokens, dtype=np.int32).tobytes())
    return np.random.default_rng(key).standard_normal(vocab_size).astype(np.float32) * 4


def greedy(prompt, count: int, vocab_size: int) -> list[int]:
    """Return the tokens that a scheduler must produce at temperature 0."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_after(tokens, vocab_size).argmax()))
    return tokens[len(prompt) :]


class ScriptedSequence:
    def __init__(self, engine: "ScriptedEngine", tokens: list[int]) -> None:
        self._engine, self._tokens, self.is_open = engine, tokens, True
        engine.sequences.append(self)

    @property
    def tokens(self) -> list[int]:
        return list(self._tokens)

    def __len__(self) -> int:
        assert self.is_open
        return len(self._tokens)

    def fork(self, length: int | None = None) -> "ScriptedSequence":
        assert self.is_open
        assert length is None or 0 <= length <= len(self)
        tokens = self._tokens[:length]
        self._engine.check_room(-(-len(tokens) // PAGE) * PAGE)
        return ScriptedSequence(self._engine, tokens)

    def reusable(self, length: int) -> int:
        return length

    def truncate(self, length: int) -> None:
        assert self.is_open
        assert length <= len(self)
        del self._tokens[length:]

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._engine.sequences.remove(self)


class ScriptedEngine:
    page_tokens = PAGE
    most_states = None

    def __init__(
        self,
        *,
        vocab_size: int = 300,
        context_length: int = 1024,
        cache_tokens: int = 64 * 256,
        delay: float = 0.0,
        fails: Callable[[list[int]], bool] = lambda tokens: False,
        logits: Callable[[list[int], int], np.ndarray] = logits_after,
    ) -> None:
        """`delay`: seconds a forward takes; `fails`: whether it raises for a sequence of these tokens."""
        self.vocab_size, self.context_length = vocab_size, context_length
        self.hidden_size = 8
        self.cache_tokens, self.delay, self.fails, self.logits = cache_tokens, delay, fails, logits
        self.sequences: list[ScriptedSequence] = []
        self.batches: list[list[int]] = []
        """Tokens of each entry of each forward."""

    @property
    def free_tokens(self) -> int:
        used = sum(-(-len(sequence) // PAGE) * PAGE for sequence in self.sequences)
        return self.cache_tokens - used

    def check_room(self, tokens: int) -> None:
        if tokens > self.free_tokens:
            raise CacheFull(f"no room for {tokens} tokens")

    def new_sequence(self) -> ScriptedSequence:
        return ScriptedSequence(self, [])

    def forward(self, batch, logits="last"):
        assert len({id(sequence) for sequence, _ in batch}) == len(batch)
        grown = 0
        for sequence, tokens in batch:
            assert len(tokens)
            assert 0 <= min(tokens) <= max(tokens) < self.vocab_size
            if len(sequence) + len(tokens) > self.context_length:
                raise ContextFull("too long")
            grown += -(-(len(sequence) + len(tokens)) // PAGE) - -(-len(sequence) // PAGE)
        self.check_room(grown * PAGE)
        if self.delay:
            time.sleep(self.delay)
        self.batches.append([len(tokens) for _, tokens in batch])
        results = []
        if any(self.fails(sequence.tokens + list(tokens)) for sequence, tokens in batch):
            raise RuntimeError("told to fail")
        for sequence, tokens in batch:
            start = len(sequence)
            sequence._tokens += tokens
            if logits == "last":
                results.append(self.logits(sequence._tokens, self.vocab_size))
            elif logits in ("all", "hidden"):
                width = self.vocab_size if logits == "all" else self.hidden_size
                ends = range(start + 1, len(sequence) + 1)
                rows = [self.logits(sequence._tokens[:end], width) for end in ends]
                results.append(np.stack(rows))
        return results

    def close(self) -> None:
        for sequence in list(self.sequences):
            sequence.close()
