# SPDX-License-Identifier: Apache-2.0
"""The engine's protocol on one GPU, for `generate`: ternary transformers models over a few slots.

On a CPU the same steps run as they are, through the reference of every op.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparse_bitnet.checkpoint.load import from_pretrained
from sparse_bitnet.engine.gpu.blocks import int8_head_, prepare_
from sparse_bitnet.engine.gpu.decode import SlotDecoder, slot_bytes
from sparse_bitnet.engine.gpu.linear import RoutePolicy
from sparse_bitnet.engine.gpu.measure import measured_policy, ternary_layers
from sparse_bitnet.engine.protocol import CacheFull, EngineSequence, InferenceEngine, WhichLogits
from sparse_bitnet.errors import UserError

DEFAULT_SLOTS = 8
"""Sequences held at once where the memory allows and nothing else is asked for."""

MEMORY_SHARE = 0.8
"""Of the GPU's free memory, the most that the cache takes unasked."""


class UnsuitedModel(UserError):
    """A model that the kernels here do not take; transformers may."""


class GpuEngine(InferenceEngine):
    """A ternary model on a GPU. `load` makes it from a checkpoint.

    The `cache` of a sequence is its slot, taken with its first token; None before.
    """

    def __init__(
        self,
        model: Any,
        *,
        context_length: int | None = None,
        cache_tokens: int | None = None,
        policy: RoutePolicy | None = None,
        dtype: torch.dtype | None = None,
        int8_head: bool = False,
    ) -> None:
        """Takes the model over and changes it.

        Args:
            model: a transformers causal LM with ternary layers, trained or packed, on its device.
            context_length: most tokens of one sequence; default the model's positions.
            cache_tokens: room for this many tokens, in whole slots of `context_length`, at least one;
                default eight slots, fewer where memory is short.
            policy: which product for how many tokens; default by measuring the model's shapes.
            dtype: of activations, cache and what is not ternary, once codes are taken from the masters;
                default the model's.
            int8_head: quantise the output head.

        Raises `UnsuitedModel` for one without ternary layers and for what `prepare_` refuses,
        `UserError` for a context beyond the model's positions and where memory does not suffice.
        """
        try:
            prepare_(model.eval(), policy or RoutePolicy())
            if not ternary_layers(model):
                raise UserError("it has no ternary layer for the GPU kernels")
        except UserError as error:
            raise UnsuitedModel(str(error)) from error
        length = self.context_within(context_length, model.config.max_position_embeddings)
        vocab_size, hidden_size = model.get_input_embeddings().weight.shape
        super().__init__(vocab_size, length, hidden_size)
        self.page_tokens = self.context_length
        # Not the buffers: weight scales and rotary frequencies are float32.
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype or parameter.dtype)
        if int8_head:
            int8_head_(model)
        if policy is None:
            measured_policy(model)
        slots = self._slots(model, cache_tokens)
        try:
            self.decoder = SlotDecoder(model, slots, self.context_length)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"the GPU has no memory for {slots} x {self.context_length} tokens: ask for less with "
                "--context-length or --cache-tokens"
            ) from error

    @classmethod
    def load(
        cls,
        checkpoint: str | Path,
        *,
        device: str = "cuda",
        context_length: int | None = None,
        cache_tokens: int | None = None,
    ) -> "GpuEngine":
        """A folder or hub id with ternary weights, packed or not: bfloat16 on CUDA, float32 on a CPU.

        Raises `UserError` when there is no such device, it cannot be loaded, or as the constructor.
        """
        check_device(device)
        # Masks and codes are those of the masters as they are.
        model: Any = from_pretrained(str(checkpoint), dtype=torch.float32)
        try:
            return cls(
                model.to(device),
                context_length=context_length,
                cache_tokens=cache_tokens,
                dtype=torch.bfloat16 if device == "cuda" else None,
                int8_head=device == "cuda",
            )
        except torch.OutOfMemoryError as error:
            raise UserError(f"{checkpoint}: the GPU has no memory for its weights") from error

    def _slots(self, model: Any, cache_tokens: int | None) -> int:
        if cache_tokens is not None:
            return max(1, cache_tokens // self.context_length)
        if model.device.type != "cuda":
            return DEFAULT_SLOTS
        free, _ = torch.cuda.mem_get_info(model.device)
        fitting = int(MEMORY_SHARE * free) // slot_bytes(
            model.config, self.context_length, model.dtype
        )
        return max(1, min(DEFAULT_SLOTS, fitting))

    @property
    def free_tokens(self) -> int:
        """Of the slots that no token has been written to; 0 if new sequences wait for all of them."""
        taken = sum(sequence.cache is not None for sequence in self.sequences)
        free = self.decoder.slots - taken
        if len(self.sequences) - taken > free:
            return 0
        return free * self.context_length

    def _compute(
        self, batch: list[tuple[EngineSequence, np.ndarray]], logits: WhichLogits
    ) -> list[np.ndarray]:
        if logits == "hidden":
            raise UserError("no hidden states here: load the model with --engine transformers")
        new = [sequence for sequence, _ in batch if sequence.cache is None]
        for sequence, slot in zip(new, self._free_slots(len(new)), strict=True):
            sequence.cache = slot
        found: dict[int, Tensor] = {}
        for sequence, tokens in batch:
            if len(tokens) > 1:
                ids = torch.from_numpy(tokens).long().to(self.decoder.device)[None]
                place = slice(sequence.cache, sequence.cache + 1)
                keep = len(tokens) if logits == "all" else 1
                found[sequence.cache] = self.decoder.prompt(place, ids, len(sequence), keep)[0]
        if single := [entry for entry in batch if len(entry[1]) == 1]:
            found |= self._step(single)
        if logits == "none":
            return []
        values = [found[sequence.cache].float().cpu().numpy() for sequence, _ in batch]
        return [rows[-1] if logits == "last" else rows for rows in values]

    def _step(self, entries: list[tuple[EngineSequence, np.ndarray]]) -> dict[int, Tensor]:
        """Logits [1, vocab_size] by slot, of one more token each; over a power of two of slots."""
        last = max(sequence.cache for sequence, _ in entries)
        rows = min(1 << last.bit_length(), self.decoder.slots)
        places: list[int | None] = [None] * rows
        ids = [0] * rows
        for sequence, tokens in entries:
            places[sequence.cache], ids[sequence.cache] = len(sequence), int(tokens[0])
        scores = self.decoder.step(ids, places)
        return {sequence.cache: scores[sequence.cache, None] for sequence, _ in entries}

    def _free_slots(self, count: int) -> list[int]:
        taken = {sequence.cache for sequence in self.sequences}
        free = [slot for slot in range(self.decoder.slots) if slot not in taken]
        if count > len(free):
            raise CacheFull(
                f"all {self.decoder.slots} slots of the cache are taken: close sequences or raise the "
                "cache's size"
            )
        return free[:count]

    def _open(self) -> None:
        return None

    def _fork(self, sequence: EngineSequence, length: int) -> int | None:
        if length == 0:
            return None
        (slot,) = self._free_slots(1)
        self.decoder.copy(sequence.cache, slot, length)
        return slot

    def _truncate(self, sequence: EngineSequence, length: int) -> None:
        """What lies behind the length is never looked at."""

    def _close(self) -> None:
        del self.decoder


def check_device(device: str) -> None:
    """Raise `UserError` where CUDA is asked for and absent."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "--device cuda: PyTorch sees no CUDA device; leave it out, or see `sparse-bitnet env`"
        )
