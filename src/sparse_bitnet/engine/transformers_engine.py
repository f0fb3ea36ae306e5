# SPDX-License-Identifier: Apache-2.0
"""The engine interface over any transformers causal LM: for other architectures, for checkpoints that
are not packed, and as the reference of the CPU engine."""

import contextlib
import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sparse_bitnet.checkpoint.load import has_states, max_positions
from sparse_bitnet.engine.protocol import CacheFull, EngineSequence, InferenceEngine, WhichLogits
from sparse_bitnet.nn.convert import selected

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TransformersEngine(InferenceEngine):
    """Runs each sequence through a transformers model, one after another."""

    def __init__(
        self,
        model: "PreTrainedModel",
        *,
        context_length: int | None = None,
        cache_tokens: int | None = None,
    ) -> None:
        """Use `model` until `close`, in evaluation mode, with masks and codes selected once.

        Args:
            model: a causal LM, on any device and in any dtype.
            context_length: maximum number of tokens of one sequence; default: the model's positions.
            cache_tokens: maximum number of tokens over all sequences; default: no limit.

        Raises `UserError` for a context beyond the model's positions.
        """
        positions = max_positions(model) or context_length or 2048
        embedding: Any = model.get_input_embeddings()
        hidden = model.config.get_text_config().hidden_size
        super().__init__(len(embedding.weight), hidden, positions, context_length)
        self._model: Any = model.eval()
        self._cache_tokens = cache_tokens or 1 << 40  # as good as without limit
        # A recurrent state cannot be cut back to an earlier token: such models compute all again.
        self._has_cache = not has_states(model)
        rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
        is_long = rope.get("rope_type") == "longrope"
        self._switch = rope["original_max_position_embeddings"] if is_long else 1 << 40
        self._selected = contextlib.ExitStack()
        self._selected.enter_context(selected(model))

    @property
    def free_tokens(self) -> int:
        """Return `cache_tokens`, or 2**40 by default, less the tokens of all sequences."""
        return self._cache_tokens - sum(map(len, self.sequences))

    def _compute(
        self, batch: list[tuple[EngineSequence, np.ndarray]], logits: WhichLogits
    ) -> list[np.ndarray]:
        self._check_room(sum(len(tokens) for _, tokens in batch))
        with torch.inference_mode():
            rows = [self._run(sequence, tokens.tolist(), logits) for sequence, tokens in batch]
        return [] if logits == "none" else [r[-1] if logits == "last" else r for r in rows]

    def _run(self, sequence: EngineSequence, tokens: list[int], logits: WhichLogits) -> np.ndarray:
        """Return float32 [tokens or 1, vocab_size], or hidden states [tokens, hidden_size]."""
        held = sequence.cache.get_seq_length() if self._has_cache else 0
        if 0 < held <= self._switch < len(sequence.tokens) + len(tokens):
            # longrope uses other frequencies beyond this length, so all keys are computed again.
            sequence.cache, held = self._open(), 0
        given = sequence.tokens[held:] + tokens
        options: dict[str, Any] = {
            "input_ids": torch.tensor([given], device=self._model.device),
            "past_key_values": sequence.cache,
            "use_cache": self._has_cache,
        }
        if logits == "hidden":
            output = self._model.base_model(**options).last_hidden_state[:, -len(tokens) :]
        else:
            keep = len(tokens) if logits == "all" else 1
            output = self._model(**options, logits_to_keep=keep).logits
        return output[0].float().cpu().numpy()

    def _check_room(self, tokens: int) -> None:
        if tokens > self.free_tokens:
            raise CacheFull(f"the cache has room for {self.free_tokens} tokens, not for {tokens}")

    def _open(self) -> Any:
        """Return an empty cache of transformers; None for a model that computes all tokens again."""
        from transformers import DynamicCache

        return DynamicCache() if self._has_cache else None

    def _fork(self, sequence: EngineSequence, length: int) -> Any:
        self._check_room(length)
        if not self._has_cache or length <= self._switch < len(sequence) or length == 0:
            return self._open()
        cache = copy.deepcopy(sequence.cache)
        if (surplus := cache.get_seq_length() - length) > 0:
            cache.crop(-surplus)
        return cache

    def _truncate(self, sequence: EngineSequence) -> None:
        """Drop a cache that is longer than the tokens; the next forward computes them again. After
        Ctrl-C some layers are longer and others not."""
        if self._has_cache and sequence.cache.get_seq_length() > len(sequence):
            sequence.cache = self._open()

    def _release(self, sequence: EngineSequence) -> None:
        sequence.cache = None

    def _close(self) -> None:
        self._selected.close()
