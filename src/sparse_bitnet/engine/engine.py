# SPDX-License-Identifier: Apache-2.0
"""The CPU engine: a packed folder, and a decoder in C++ that runs it (csrc/decoder.h). No torch."""

import time
from pathlib import Path
from typing import Any, Self

import numpy as np

from sparse_bitnet import _cpu
from sparse_bitnet.engine.architecture import Architecture
from sparse_bitnet.engine.decoder_model import build_model
from sparse_bitnet.engine.engine_model import EngineModel, open_engine_model
from sparse_bitnet.engine.format_tuning import choose_format
from sparse_bitnet.engine.protocol import CacheFull, EngineSequence, InferenceEngine, WhichLogits
from sparse_bitnet.engine.recycled import RecycledArrays
from sparse_bitnet.engine.runtime_weights import Weights, load_weights
from sparse_bitnet.engine.weight_forms import FORMATS, check_format, choose_head
from sparse_bitnet.errors import UserError
from sparse_bitnet.host import MOST_THREADS, available_cores
from sparse_bitnet.layer_config import REGISTERED
from sparse_bitnet.progress import OnProgress

WEIGHT_FORMATS = ("auto", "stored", *FORMATS)
CACHE_TYPES = {name: _cpu.CacheType[name] for name in ("float32", "float16", "int8", "int4")}


_LARGEST_OF_KEYS = 16.0
"""Bias or norm; the numbers of a head share a scale, whose 127 steps are an eighth each up to here."""


class Engine(InferenceEngine):
    """A packed model on the CPU. Made by `Engine.load`.

    Attributes:
        folder: of the model.
        architecture: its sizes.
        threads: that compute; fewer than asked for where the system starts no more.
        weight_format: "i2", "b3" or "lookup": the weights in memory.
        head_format: "int8", "int4", "bfloat16", "float32" or "i2": the output head in memory.
        kv_cache: "int8", "int4", "float16" or "float32": keys and values in memory.
        weight_bytes, head_bytes: what a token reads of them.
        isa: name of the kernels in use.
        load_seconds: from the call of `load` to its return.
    """

    page_tokens: int = _cpu.PAGE_TOKENS
    batch_invariant = True

    def __init__(
        self, model: EngineModel, weights: Weights, decoder: _cpu.Decoder, context_length: int
    ) -> None:
        super().__init__(model.architecture.vocab, context_length, model.architecture.hidden)
        self.folder: Path = model.folder
        self.architecture: Architecture = model.architecture
        self.threads: int = decoder.threads
        self.weight_format = self.kv_cache = ""
        self.head_format = weights.head_format
        self.weight_bytes, self.head_bytes = weights.weight_bytes, weights.head_bytes
        self.load_seconds = 0.0
        self.isa: str = decoder.isa
        self._weights: Weights | None = weights
        self._arrays = RecycledArrays()
        self._decoder: Any = decoder

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        threads: int | None = None,
        weight_format: str = "auto",
        head: str = "auto",
        kv_cache: str = "auto",
        activations: str = "auto",
        context_length: int | None = None,
        cache_tokens: int | None = None,
        isa: str = "",
        progress: OnProgress | None = None,
    ) -> Self:
        """Load a folder written by `sparse-bitnet pack`.

        Args:
            folder: the packed model.
            threads: to compute with; by default one for each processor this process may use.
            weight_format: form of the weights in memory: one of `FORMATS`, "stored" as in the file and,
                where rows lie on whole cache lines, the mapped file itself, "auto" the fastest here, by
                a short measurement (format_tuning.py); i2 where the weights have a scale for every group.
            head: form of the output head in memory: "stored", "int8", "int4", "auto" int8, or ternary as
                in the file. Of a head that is tied to it, also of the embedding.
            kv_cache: form of keys and values: "float32", "float16", "int8", "int4", or "auto" int8, but
                float16 where keys have a bias or a norm above 16, as Qwen2.5's.
            activations: what shares a scale of the int8 activations: "token", "group" as many as the
                weights that share one, "auto" group where those of another tool have one size of groups.
            context_length: most tokens of one sequence; by default what the model was made for.
            cache_tokens: room for this many tokens of all sequences together; by default for one of
                `context_length`. Memory is taken as they come.
            isa: a name that `sparse-bitnet env` lists; by default SPARSE_BITNET_ISA or the best.
            progress: told bytes done and bytes in all, after every tensor.

        Raises `UserError` for a folder that is not packed, damaged (naming the tensor) or of a kind that
        the engine does not run, for options that do not fit, and where memory does not suffice.
        """
        started = time.perf_counter()
        threads = _within(
            "threads", available_cores() if threads is None else threads, MOST_THREADS
        )
        _check_choice("weight format", weight_format, WEIGHT_FORMATS)
        _check_choice("kv-cache", kv_cache, ("auto", *CACHE_TYPES))
        _check_choice("activations", activations, ("auto", "token", "group"))
        model = open_engine_model(folder)
        context_length = cls.context_within(context_length, model.architecture.positions)
        if cache_tokens is None:
            cache_tokens = context_length
        cache_tokens = _within("cache tokens", cache_tokens, 1 << 31)
        head_format = choose_head(model, head)
        try:
            kernels = _cpu.Kernels.choose(isa)
        except ValueError as error:
            raise UserError(str(error)) from error
        pool = _cpu.ThreadPool(threads)
        groups = model.scale_groups()
        is_mapped = weight_format == "stored"
        try:
            if weight_format == "auto":
                has_groups = groups != {0}
                weight_format = "i2"
                if not has_groups:
                    pattern, exact = model.metadata.pattern, model.exact
                    weight_format = choose_format(pattern, pool, kernels, exact=exact)
            elif weight_format == "stored":
                weight_format = model.metadata.packed_format
            check_format(model, weight_format)
            weights = load_weights(
                model,
                kernels,
                pool,
                weight_format=weight_format,
                head_format=head_format,
                is_mapped=is_mapped,
                progress=progress,
            )
            del pool  # the system may not start more threads than these
            if kv_cache == "auto":
                kv_cache = _cache_type(weights)
            decoder = _cpu.Decoder(
                build_model(
                    model.architecture, weights, _activation_group(model, groups, activations)
                ),
                threads,
                CACHE_TYPES[kv_cache],
                context_length,
                cache_tokens,
                kernels,
            )
        except MemoryError as error:
            raise UserError(
                f"{folder}: there is not enough memory for its weights and its cache; ask for fewer "
                "cache tokens or a smaller form of weights"
            ) from error
        engine = cls(model, weights, decoder, context_length)
        engine.weight_format, engine.kv_cache = weight_format, kv_cache
        engine.load_seconds = time.perf_counter() - started
        return engine

    @property
    def free_tokens(self) -> int:
        """Of free pages."""
        with self.turn():
            return self._decoder.free_tokens

    def _compute(
        self, batch: list[tuple[EngineSequence, np.ndarray]], logits: WhichLogits
    ) -> list[np.ndarray]:
        counts = [len(tokens) for _, tokens in batch]
        rows = {"none": 0, "last": len(batch)}.get(logits, sum(counts))
        columns = self.hidden_size if logits == "hidden" else self.vocab_size
        values = self._arrays.empty(rows, columns)
        requests = [(sequence.cache, tokens.ctypes.data, len(tokens)) for sequence, tokens in batch]
        try:
            self._decoder.forward(requests, _cpu.Logits[logits], values.ctypes.data if rows else 0)
        except ValueError as error:
            # All else that it refuses was refused before.
            raise CacheFull(f"{error}: close sequences or raise the cache's size") from error
        if logits == "none":
            return []
        return list(values) if logits == "last" else np.split(values, np.cumsum(counts)[:-1])

    def _open(self) -> int:
        return self._decoder.open()

    def _fork(self, sequence: EngineSequence, length: int) -> int:
        try:
            return self._decoder.fork(sequence.cache, length)
        except ValueError as error:
            raise CacheFull(f"{error}: close sequences or raise the cache's size") from error

    def _truncate(self, sequence: EngineSequence, length: int) -> None:
        self._decoder.truncate(sequence.cache, length)

    def _release(self, sequence: EngineSequence) -> None:
        self._decoder.close(sequence.cache)

    def _close(self) -> None:
        self._decoder.shut()
        self._decoder = self._weights = None


def _cache_type(weights: Weights) -> str:
    """ "int8", unless something makes a few numbers of all keys so large, as in Qwen2.5, that their scale
    would hide the others."""
    names = ("k_proj.bias", "k_norm.weight", "key_layernorm.weight")
    given = [values for name, values in weights.vectors.items() if name.endswith(names)]
    largest = max((float(np.abs(values).max()) for values in given), default=0.0)
    return "int8" if largest <= _LARGEST_OF_KEYS else "float16"


def _within(what: str, value: int, most: int) -> int:
    if not 1 <= value <= most:
        raise UserError(f"{what} {value}: must be within 1..{most}")
    return value


def _activation_group(model: EngineModel, groups: set[int], activations: str) -> int:
    """Inputs that share a scale, 0 for all of a token."""
    if activations == "auto" and model.metadata.format.quantizer != REGISTERED["quantizer"]:
        return 0  # trained here, and so with the inputs of a token
    group = next(iter(groups)) if len(groups) == 1 else 0
    if activations == "group" and not group:
        raise UserError(
            f"{model.folder}: --activations group asks for weights with one size of groups, these have "
            f"{'several' if len(groups) > 1 else 'none'}; use token"
        )
    return 0 if activations == "token" else group


def _check_choice(what: str, given: str, choices: tuple[str, ...]) -> None:
    if given not in choices:
        raise UserError(f"{what} {given!r}: choose one of {', '.join(choices)}")
