"""The engine's protocol over any transformers causal LM: for other architectures, for checkpoints that
are not packed, and as the reference of the CPU engine."""

import contextlib
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sparse_bitnet.convert import selected
from sparse_bitnet.engine.engine_sequence import EngineSequence, check_distinct, check_entry
from sparse_bitnet.engine.protocol import CachedSequence, CacheFull, WhichLogits
from sparse_bitnet.hub import from_pretrained

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MOST_TOKENS = 1 << 40
"""Stands for a cache without limit."""

DEFAULT_CONTEXT_LENGTH = 2048
"""Where the model's config does not say how many positions it has."""


class TransformersSequence(EngineSequence):
    """Tokens with a cache of transformers of their own; a fork copies it."""

    def __init__(self, engine: "TransformersEngine") -> None:
        super().__init__()
        self._engine = engine
        self._cache: Any = engine.new_cache()
        engine.sequences.append(self)

    def fork(self, length: int | None = None) -> "TransformersSequence":
        """A new sequence with a copy of the first `length` tokens (all)."""
        length = len(self) if length is None else length
        self._check(length)
        self._engine.check_room(length)
        other = TransformersSequence(self._engine)
        other._tokens = self._tokens[:length]
        if length:
            other._cache = copy.deepcopy(self._cache)
            other._crop(length)
        return other

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on."""
        self._check(length)
        if length < len(self):
            del self._tokens[length:]
            self._crop(length)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._tokens, self._cache = [], None
            self._engine.sequences.remove(self)

    def _crop(self, length: int) -> None:
        if self._cache is None:
            return
        if length == 0:
            self._cache = self._engine.new_cache()
        elif (surplus := self._cache.get_seq_length() - length) > 0:
            self._cache.crop(-surplus)


class TransformersEngine:
    """Runs each sequence through a transformers model, one after the other."""

    def __init__(
        self,
        model: "PreTrainedModel",
        *,
        context_length: int | None = None,
        cache_tokens: int | None = None,
    ) -> None:
        """Takes the model over until `close`: in evaluation mode, masks and codes selected once.

        Args:
            model: a causal LM, on any device and in any dtype.
            context_length: most tokens of one sequence; default the model's positions.
            cache_tokens: room for so many tokens over all sequences; default without limit.
        """
        self._model: Any = model.eval()
        positions = getattr(model.config, "max_position_embeddings", DEFAULT_CONTEXT_LENGTH)
        self._context_length = positions if context_length is None else context_length
        self._cache_tokens = _MOST_TOKENS if cache_tokens is None else cache_tokens
        # A recurrent state cannot be cut back to an earlier token: such models compute all again.
        self._has_cache = not getattr(model, "_is_stateful", False)
        self.sequences: list[TransformersSequence] = []
        """The open ones."""
        self._selected = contextlib.ExitStack()
        self._selected.enter_context(selected(model))

    @classmethod
    def load(
        cls,
        checkpoint: str | Path,
        *,
        context_length: int | None = None,
        cache_tokens: int | None = None,
        device: str = "cpu",
    ) -> "TransformersEngine":
        """A folder or hub id that transformers reads, packed ones too, in float32.

        Raises `UserError` when it cannot be loaded.
        """
        model: Any = from_pretrained(str(checkpoint), dtype=torch.float32)
        return cls(model.to(device), context_length=context_length, cache_tokens=cache_tokens)

    @property
    def vocab_size(self) -> int:
        """Tokens that the embedding has."""
        return self._model.get_input_embeddings().weight.shape[0]

    @property
    def context_length(self) -> int:
        return self._context_length

    @property
    def free_tokens(self) -> int:
        return self._cache_tokens - sum(map(len, self.sequences))

    def new_cache(self) -> Any:
        """An empty cache of transformers; None for a model that computes all tokens again."""
        from transformers import DynamicCache

        return DynamicCache() if self._has_cache else None

    def check_room(self, tokens: int) -> None:
        """Raise `CacheFull` if the cache has no room for so many more tokens."""
        if tokens > self.free_tokens:
            raise CacheFull(
                f"the cache has room for {self.free_tokens} tokens, {tokens} are needed"
            )

    def new_sequence(self) -> TransformersSequence:
        return TransformersSequence(self)

    def forward(
        self,
        batch: Sequence[tuple[CachedSequence, Sequence[int]]],
        logits: WhichLogits = "last",
    ) -> list[np.ndarray]:
        """See `InferenceEngine.forward`. Raises `ValueError` for a closed sequence, one that occurs
        twice, no tokens, and a token outside the vocabulary."""
        self._check(batch)
        found: list[np.ndarray] = []
        with torch.inference_mode():
            for sequence, tokens in batch:
                assert isinstance(sequence, TransformersSequence)
                scores = self._run(sequence, list(tokens), logits)
                sequence.append(tokens)
                if logits != "none":
                    found.append(scores[-1] if logits == "last" else scores)
        return found

    def _check(self, batch: Sequence[tuple[CachedSequence, Sequence[int]]]) -> None:
        check_distinct(batch)
        for sequence, tokens in batch:
            assert isinstance(sequence, TransformersSequence)
            check_entry(sequence, tokens, self.vocab_size, self.context_length)
        self.check_room(sum(len(tokens) for _, tokens in batch))

    def _run(
        self, sequence: TransformersSequence, tokens: list[int], logits: WhichLogits
    ) -> np.ndarray:
        """float32 [tokens or 1, vocab_size]."""
        given = tokens if self._has_cache else sequence.tokens + tokens
        output = self._model(
            input_ids=torch.tensor([given], device=self._model.device),
            past_key_values=sequence._cache,
            use_cache=self._has_cache,
            logits_to_keep=len(tokens) if logits == "all" else 1,
        )
        return output.logits[0].float().cpu().numpy()

    def close(self) -> None:
        """Close all sequences and release the model; a second call does nothing."""
        for sequence in list(self.sequences):
            sequence.close()
        self._selected.close()
