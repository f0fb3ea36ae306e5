"""The engine's protocol on a GPU: ternary transformers models over slots, steps as CUDA graphs.

Tokens that continue sequences, one each, are computed together by a graph over the first slots; there
is one for every power of two of slots and of keys, recorded when it is first needed. On a CPU the same
steps run as they are, through the reference of every op.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparse_bitnet.checkpoint.hub import from_pretrained
from sparse_bitnet.engine.gpu.attention import use_grouped_attention_
from sparse_bitnet.engine.gpu.decode import check_full_attention, recorded_step
from sparse_bitnet.engine.gpu.fused import fuse_
from sparse_bitnet.engine.gpu.linear import RoutePolicy
from sparse_bitnet.engine.gpu.merge import prepare_
from sparse_bitnet.engine.gpu.slots import SlotCache
from sparse_bitnet.engine.protocol import CacheFull, EngineSequence, InferenceEngine, WhichLogits
from sparse_bitnet.errors import UserError
from sparse_bitnet.ops.tuning_cache import TuningCache, cache_path, machine_name

DEFAULT_SLOTS = 8
"""Sequences held at once where the memory allows and nothing else is asked for."""

MEMORY_SHARE = 0.8
"""Of the GPU's free memory, the most that the cache takes unasked."""

DEFAULT_POSITIONS = 2048
"""Where the model's config does not say how many it has."""

_SHORTEST = 256
"""Least keys of a recorded step."""


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
    ) -> None:
        """Takes the model over and changes it.

        Args:
            model: a transformers causal LM with ternary layers, trained or packed, on its device.
            context_length: most tokens of one sequence; default the model's positions.
            cache_tokens: room for so many tokens, in whole slots of `context_length`, at least one;
                default eight slots, fewer where memory is short.
            policy: which product for how many tokens; default by the table stored for this GPU.
            dtype: of activations, cache and what is not ternary, once codes are taken from the masters;
                default the model's.

        Raises `UnsuitedModel` for one without ternary int8 layers or with sliding-window attention,
        `UserError` for a context beyond the model's positions and where memory does not suffice.
        """
        config = model.config
        positions = getattr(config, "max_position_embeddings", None) or DEFAULT_POSITIONS
        if context_length is not None and context_length > positions:
            raise UserError(f"--context-length {context_length}: the model has {positions}")
        super().__init__(len(model.get_input_embeddings().weight), context_length or positions)
        self.page_tokens = self.context_length
        try:
            check_full_attention(model)
            self._model: Any = fuse_(prepare_(model.eval(), policy or stored_policy()))
        except UserError as error:
            raise UnsuitedModel(str(error)) from error
        use_grouped_attention_(self._model)
        parameter = next(self._model.parameters())
        self.device, dtype = parameter.device, dtype or parameter.dtype
        # Not the buffers: weight scales and rotary frequencies are float32.
        for parameter in self._model.parameters():
            parameter.data = parameter.data.to(dtype)
        slots = self._slots(cache_tokens, SlotCache.slot_bytes(config, self.context_length, dtype))
        try:
            self.cache = SlotCache(config, slots, self.context_length, dtype, self.device)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"the GPU has no memory for {slots} x {self.context_length} tokens: ask for less with "
                "--context-length or --cache-tokens"
            ) from error
        self._tokens = torch.zeros(slots, 1, dtype=torch.int64, device=self.device)
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        self.load_seconds = 0.0

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
        started = time.perf_counter()
        check_device(device)
        # Masks and codes are those of the masters as they are.
        model: Any = from_pretrained(str(checkpoint), dtype=torch.float32)
        try:
            model = model.to(device)
            engine = cls(
                model,
                context_length=context_length,
                cache_tokens=cache_tokens,
                dtype=torch.bfloat16 if device == "cuda" else None,
            )
        except torch.OutOfMemoryError as error:
            raise UserError(f"{checkpoint}: the GPU has no memory for its weights") from error
        engine.load_seconds = time.perf_counter() - started
        return engine

    def _slots(self, cache_tokens: int | None, slot_bytes: int) -> int:
        if cache_tokens is not None:
            return max(1, cache_tokens // self.context_length)
        if self.device.type != "cuda":
            return DEFAULT_SLOTS
        free, _ = torch.cuda.mem_get_info(self.device)
        return max(1, min(DEFAULT_SLOTS, int(MEMORY_SHARE * free) // slot_bytes))

    @property
    def free_tokens(self) -> int:
        """Of the slots that no token has been written to; 0 if new sequences wait for all of them."""
        taken = sum(sequence.cache is not None for sequence in self.sequences)
        free = self.cache.slots - taken
        if len(self.sequences) - taken > free:
            return 0
        return free * self.context_length

    def _compute(
        self, batch: list[tuple[EngineSequence, np.ndarray]], logits: WhichLogits
    ) -> list[np.ndarray]:
        new = [sequence for sequence, _ in batch if sequence.cache is None]
        for sequence, slot in zip(new, self._free_slots(len(new)), strict=True):
            sequence.cache = slot
        found: list[Tensor | None] = [None] * len(batch)
        with torch.inference_mode():
            single = [i for i, (_, tokens) in enumerate(batch) if len(tokens) == 1]
            for index, (sequence, tokens) in enumerate(batch):
                if len(tokens) > 1:
                    found[index] = self._prompt(sequence, tokens.tolist(), logits)
            if single:
                scores = self._step([(batch[i][0], int(batch[i][1][0])) for i in single])
                for index, row in zip(single, scores, strict=True):
                    found[index] = row.unsqueeze(0)
            if logits == "none":
                return []
            values = [rows.float().cpu().numpy() for rows in found if rows is not None]
        return [rows[-1] if logits == "last" else rows for rows in values]

    def _free_slots(self, count: int) -> list[int]:
        taken = {sequence.cache for sequence in self.sequences}
        free = [slot for slot in range(self.cache.slots) if slot not in taken]
        if count > len(free):
            raise CacheFull(
                f"all {self.cache.slots} slots of the cache are taken: close sequences or raise the "
                "cache's size"
            )
        return free[:count]

    def _open(self) -> None:
        return None

    def _fork(self, sequence: EngineSequence, length: int) -> int | None:
        if length == 0:
            return None
        (slot,) = self._free_slots(1)
        self.cache.copy(sequence.cache, slot, length)
        return slot

    def _truncate(self, sequence: EngineSequence, length: int) -> None:
        """What lies behind the length is never looked at."""

    def _prompt(
        self, sequence: EngineSequence, tokens: Sequence[int], logits: WhichLogits
    ) -> Tensor:
        """Logits [tokens or 1, vocab_size] of two or more tokens behind those of a sequence."""
        start, count = len(sequence), len(tokens)
        self.cache.start_prompt(slice(sequence.cache, sequence.cache + 1), start)
        ids = torch.tensor([list(tokens)], device=self.device)
        positions = torch.arange(start, start + count, device=self.device)
        mask = None
        if start:
            keys = torch.arange(start + count, device=self.device)
            mask = (keys <= positions[:, None]).view(1, 1, count, -1)
        return self._run(ids, positions.unsqueeze(0), mask, count if logits == "all" else 1)[0]

    def _step(self, entries: list[tuple[EngineSequence, int]]) -> Tensor:
        """Logits [sequences, vocab_size] of one more token each."""
        slots = [sequence.cache for sequence, _ in entries]
        rows = min(_power_of_two(max(slots) + 1), self.cache.slots)
        longest = max(len(sequence) for sequence, _ in entries) + 1
        length = min(max(_power_of_two(longest), _SHORTEST), self.context_length)
        places: list[int | None] = [None] * rows
        tokens = [0] * rows
        for slot, (sequence, token) in zip(slots, entries, strict=True):
            places[slot], tokens[slot] = len(sequence), token
        self.cache.set_positions(places)
        self._tokens[:rows, 0].copy_(torch.tensor(tokens))
        self.cache.start_step(length)

        def step() -> Tensor:
            positions = self.cache.positions[:rows, None]
            return self._run(self._tokens[:rows], positions, self.cache.step_mask(rows), 1)[:, 0]

        if self._pool is None:
            scores = step()
        else:
            if (rows, length) not in self._graphs:
                self._graphs[rows, length] = recorded_step(step, self._pool)
            graph, scores = self._graphs[rows, length]
            graph.replay()
        return scores[torch.tensor(slots, device=self.device)]

    def _run(self, tokens: Tensor, positions: Tensor, mask: Tensor | None, keep: int) -> Tensor:
        return self._model(
            input_ids=tokens,
            position_ids=positions,
            key_mask=mask,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=keep,
        ).logits

    def _close(self) -> None:
        self._graphs.clear()
        self._model = None
        self.cache.keys, self.cache.values = [], []


def check_device(device: str) -> None:
    """Raise `UserError` where CUDA is asked for and absent."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: PyTorch sees no CUDA device; leave it, or see env")


def stored_policy() -> RoutePolicy:
    """By the times stored for this GPU, or as SPARSE_BITNET_KERNEL asks; dense without either."""
    machine = machine_name()
    return RoutePolicy.from_environment(TuningCache.load(cache_path(machine), machine))


def _power_of_two(value: int) -> int:
    """The least one that is not smaller."""
    return 1 << (value - 1).bit_length()
