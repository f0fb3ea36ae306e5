"""The CPU engine: a packed folder, and a decoder in C++ that runs it (csrc/decoder.h). No torch."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np

from sparse_bitnet import _cpu
from sparse_bitnet.engine.architecture import BLOCK_LINEARS, Architecture
from sparse_bitnet.engine.format_choice import choose_format
from sparse_bitnet.engine.model_file import ModelFile, open_model_file
from sparse_bitnet.engine.protocol import CachedSequence, CacheFull, ContextFull, WhichLogits
from sparse_bitnet.engine.weights import (
    FORMATS,
    OnProgress,
    Weights,
    check_format,
    choose_head,
    load_weights,
)
from sparse_bitnet.errors import UserError

WEIGHT_FORMATS = ("auto", "stored", *FORMATS)
CACHE_TYPES = {"float32": 0, "float16": 1, "int8": 2}
"""csrc/decoder.h's CacheType."""

_WHICH = {"none": 0, "last": 1, "all": 2}
_MOST_THREADS = 1024


class EngineSequence:
    """A sequence of an `Engine`; see `protocol.CachedSequence`."""

    def __init__(self, engine: "Engine", number: int, tokens: list[int]) -> None:
        self._engine, self._number, self._tokens = engine, number, tokens
        self._is_open = True

    @property
    def tokens(self) -> list[int]:
        return list(self._tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def fork(self, length: int | None = None) -> "EngineSequence":
        """Raises `CacheFull` where the copy of a page that both would write has no room."""
        length = self._checked(len(self) if length is None else length)
        try:
            number = self._engine._running().fork(self._number, length)
        except ValueError as error:
            raise CacheFull(f"{error}: close sequences or raise the cache's size") from error
        return EngineSequence(self._engine, number, self._tokens[:length])

    def truncate(self, length: int) -> None:
        self._engine._running().truncate(self._number, self._checked(length))
        del self._tokens[length:]

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            if self._engine._decoder is not None:
                self._engine._decoder.close(self._number)

    def _checked(self, length: int) -> int:
        if not self._is_open:
            raise ValueError("the sequence is closed")
        if not 0 <= length <= len(self):
            raise ValueError(f"a sequence of {len(self)} tokens has no first {length}")
        return length


class Engine:
    """A packed model on the CPU; see `protocol.InferenceEngine`. Made by `Engine.load`.

    Attributes:
        folder: of the model.
        architecture: its sizes.
        threads: that compute.
        weight_format: "i2", "b3" or "nm-bitmap": the weights in memory.
        head_format: "int8", "int4", "bfloat16" or "float32": the output head in memory.
        weight_bytes, head_bytes: what a token reads of them.
        load_seconds: from the call of `load` to its return.
    """

    def __init__(
        self, model: ModelFile, weights: Weights, decoder: _cpu.Decoder, context_length: int
    ) -> None:
        self.folder: Path = model.folder
        self.architecture: Architecture = model.architecture
        self.threads = 0
        self.weight_format = ""
        self.head_format = weights.head_format
        self.weight_bytes, self.head_bytes = weights.weight_bytes, weights.head_bytes
        self.load_seconds = 0.0
        self._context_length = context_length
        self._weights: Weights | None = weights
        self._decoder: _cpu.Decoder | None = decoder
        self._isa: str = decoder.isa

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        threads: int | None = None,
        weight_format: str = "auto",
        head: str = "auto",
        kv_cache: str = "float16",
        context_length: int | None = None,
        cache_tokens: int | None = None,
        isa: str = "",
        progress: OnProgress | None = None,
    ) -> Self:
        """Load a folder written by `sparse-bitnet pack`.

        Args:
            folder: the packed model.
            threads: to compute with; by default one for each processor this process may use.
            weight_format: form of the weights in memory: "i2", "b3" or "nm-bitmap", "stored" as in the
                file, "auto" the fastest here, by a short measurement (format_choice.py).
            head: form of the output head in memory: "stored", "int8", "int4", "auto" int8. Of a head
                that is tied to it, also of the embedding.
            kv_cache: form of keys and values: "float32", "float16" or "int8".
            context_length: most tokens of one sequence; by default what the model was made for.
            cache_tokens: room for so many tokens of all sequences together; by default for one of
                `context_length`. Memory is taken as they come.
            isa: "generic", "avx2", "avx512vnni" or "neon"; by default SPARSE_BITNET_ISA or the best.
            progress: told bytes done and bytes in all, after every tensor.

        Raises `UserError` for a folder that is not packed, damaged (naming the tensor) or of a kind that
        the engine does not run, for options that do not fit, and where memory does not suffice.
        """
        started = time.perf_counter()
        threads = _threads(threads)
        _check_choice("weight format", weight_format, WEIGHT_FORMATS)
        _check_choice("kv-cache", kv_cache, tuple(CACHE_TYPES))
        model = open_model_file(folder)
        context_length = _context_length(model, context_length)
        head_format = choose_head(model, head)
        try:
            _cpu.MatmulKernels.choose(isa)
        except ValueError as error:
            raise UserError(str(error)) from error
        pool = _cpu.ThreadPool(threads)
        if weight_format == "auto":
            weight_format = choose_format(model.metadata.pattern, pool, isa)
        elif weight_format == "stored":
            weight_format = model.metadata.packed_format
        check_format(model, weight_format)
        try:
            weights = load_weights(
                model,
                pool,
                weight_format=weight_format,
                head_format=head_format,
                progress=progress,
            )
            decoder = _cpu.Decoder(
                _build(model.architecture, weights),
                threads,
                CACHE_TYPES[kv_cache],
                context_length,
                context_length if cache_tokens is None else cache_tokens,
                isa,
            )
        except MemoryError as error:
            raise UserError(
                f"{folder}: there is not enough memory for its weights and its cache; ask for fewer "
                "cache tokens or a smaller form of weights"
            ) from error
        engine = cls(model, weights, decoder, context_length)
        engine.threads, engine.weight_format = threads, weight_format
        engine.load_seconds = time.perf_counter() - started
        return engine

    @property
    def vocab_size(self) -> int:
        return self.architecture.vocab

    @property
    def context_length(self) -> int:
        return self._context_length

    @property
    def free_tokens(self) -> int:
        return self._running().free_tokens

    @property
    def isa(self) -> str:
        """Name of the kernels in use."""
        return self._isa

    def new_sequence(self) -> EngineSequence:
        return EngineSequence(self, self._running().open(), [])

    def forward(
        self,
        batch: Sequence[tuple[CachedSequence, Sequence[int]]],
        logits: WhichLogits = "last",
    ) -> list[np.ndarray]:
        """See `protocol.InferenceEngine.forward`.

        Raises `ValueError` for tokens outside the vocabulary, no tokens, and sequences that are closed,
        of another engine or twice in the batch.
        """
        decoder = self._running()
        if logits not in _WHICH:
            raise ValueError(f"logits {logits!r}: one of {', '.join(_WHICH)}")
        if not batch:
            return []
        sequences = [self._own(sequence) for sequence, _ in batch]
        if len(set(map(id, sequences))) != len(sequences):
            raise ValueError("a sequence is twice in the batch")
        tokens = [self._checked_tokens(tokens) for _, tokens in batch]
        for sequence, new in zip(sequences, tokens, strict=True):
            if len(sequence) + len(new) > self._context_length:
                raise ContextFull(
                    f"{len(sequence)} tokens and {len(new)} more pass the context length of "
                    f"{self._context_length}"
                )
        counts = [len(new) for new in tokens]
        rows = {"none": 0, "last": len(batch), "all": sum(counts)}[logits]
        values = np.empty((rows, self.vocab_size), np.float32)
        requests = [
            (sequence._number, new.ctypes.data, len(new))
            for sequence, new in zip(sequences, tokens, strict=True)
        ]
        try:
            decoder.forward(requests, _WHICH[logits], values.ctypes.data if rows else 0)
        except ValueError as error:
            # All else that it refuses was refused above.
            raise CacheFull(f"{error}: close sequences or raise the cache's size") from error
        for sequence, new in zip(sequences, tokens, strict=True):
            sequence._tokens.extend(new.tolist())
        if logits == "none":
            return []
        return list(values) if logits == "last" else np.split(values, np.cumsum(counts)[:-1])

    def close(self) -> None:
        """Give the memory back; a second call does nothing. Sequences are then closed."""
        self._decoder = self._weights = None

    def _running(self) -> _cpu.Decoder:
        if self._decoder is None:
            raise ValueError("the engine is closed")
        return self._decoder

    def _own(self, sequence: CachedSequence) -> EngineSequence:
        if not isinstance(sequence, EngineSequence) or sequence._engine is not self:
            raise ValueError("a sequence of another engine")
        sequence._checked(0)
        return sequence

    def _checked_tokens(self, tokens: Sequence[int]) -> np.ndarray:
        """int32 [tokens]. Out-of-range numbers are found before they are narrowed."""
        array = np.asarray(tokens)
        if array.ndim != 1 or not array.size or array.dtype.kind not in "iu":
            raise ValueError("tokens are a list of at least one whole number")
        if array.min() < 0 or array.max() >= self.vocab_size:
            raise ValueError(f"a token is outside the vocabulary of {self.vocab_size}")
        return np.ascontiguousarray(array, np.int32)


def _build(architecture: Architecture, weights: Weights) -> _cpu.ModelBuilder:
    """The model for the decoder: addresses into what `weights` keeps."""
    # The decoder copies the frequencies or keeps their address: they live as long as the weights.
    frequencies = np.ascontiguousarray(architecture.rope.inverse_frequencies, np.float32)
    weights.kept.append(frequencies)
    model = _cpu.ModelBuilder(
        architecture.hidden,
        architecture.intermediate,
        architecture.heads,
        architecture.kv_heads,
        architecture.head_dim,
        architecture.vocab,
        architecture.norm_epsilon,
        architecture.activation,
        frequencies.ctypes.data,
        architecture.rope.scaling,
    )
    model.set_embedding(tuple(weights.embedding))
    model.set_head(tuple(weights.head))
    model.set_final_norm(weights.vectors["model.norm.weight"].ctypes.data)
    for layer in range(architecture.layers):
        block = f"model.layers.{layer}"

        def vector(name: str, block: str = block) -> int:
            found = weights.vectors.get(f"{block}.{name}")
            return 0 if found is None else found.ctypes.data

        model.add_block(
            *(tuple(weights.matrices[f"{block}.{name}"]) for name in BLOCK_LINEARS),
            input_norm=vector("input_layernorm.weight"),
            post_attention_norm=vector("post_attention_layernorm.weight"),
            q_bias=vector("self_attn.q_proj.bias"),
            k_bias=vector("self_attn.k_proj.bias"),
            v_bias=vector("self_attn.v_proj.bias"),
            o_bias=vector("self_attn.o_proj.bias"),
            attention_sub_norm=vector("self_attn.attn_sub_norm.weight"),
            ffn_sub_norm=vector("mlp.ffn_sub_norm.weight"),
            q_norm=vector("self_attn.q_norm.weight"),
            k_norm=vector("self_attn.k_norm.weight"),
        )
    return model


def _threads(threads: int | None) -> int:
    if threads is None:
        has_affinity = hasattr(os, "sched_getaffinity")
        return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    if not 1 <= threads <= _MOST_THREADS:
        raise UserError(f"threads {threads}: must be within 1..{_MOST_THREADS}")
    return threads


def _context_length(model: ModelFile, context_length: int | None) -> int:
    most = model.architecture.positions
    if context_length is None:
        return most
    if not 1 <= context_length <= most:
        raise UserError(
            f"context length {context_length}: {model.folder} was made for up to {most} tokens"
        )
    return context_length


def _check_choice(what: str, given: str, choices: tuple[str, ...]) -> None:
    if given not in choices:
        raise UserError(f"{what} {given!r}: choose one of {', '.join(choices)}")
