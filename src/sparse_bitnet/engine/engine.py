# SPDX-License-Identifier: Apache-2.0
"""The CPU engine: runs a packed folder with a decoder in C++ (csrc/decoder.h). No torch."""

import time
from pathlib import Path
from typing import Any, Self

import numpy as np

from sparse_bitnet import _cpu
from sparse_bitnet.engine.architecture import HUNYUAN
from sparse_bitnet.engine.engine_model import EngineModel, choose_head, open_engine_model
from sparse_bitnet.engine.engine_options import EngineOptions
from sparse_bitnet.engine.protocol import CacheFull, EngineSequence, InferenceEngine, WhichLogits
from sparse_bitnet.engine.run_time_formats import FORMATS, LARGE_GROUPS, choose_format
from sparse_bitnet.engine.weights import Weights
from sparse_bitnet.errors import UserError
from sparse_bitnet.host import available_cores
from sparse_bitnet.layer_config import REGISTERED
from sparse_bitnet.packing.formats import needs_exact
from sparse_bitnet.pattern import NMPattern

_LARGEST_OF_KEYS = 16.0
"""Largest bias or norm of the keys for int8: a head has one scale, whose 127 steps are then 1/8 each."""


class Engine(InferenceEngine):
    """A packed model on the CPU, made by `Engine.load`.

    Attributes:
        architecture: sizes of the model.
        weight_format: run-time format of the weights: "i2", "b3" or "lookup".
        head_format: run-time format of the output head: "int8", "int4", "bfloat16", "float32" or "i2".
        kv_cache: data type of the KV cache: "int8", "int4", "float16" or "float32".
        weight_bytes, head_bytes: bytes of weights and of the head that are read per token.
        isa: instruction set of the kernels in use.
        load_seconds: duration of `load`.
    """

    page_tokens: int = _cpu.PAGE_TOKENS
    batch_invariant = True

    def __init__(self, folder: str | Path, options: EngineOptions, isa: str) -> None:
        """See `load`."""
        started = time.perf_counter()
        model = open_engine_model(folder)
        self.architecture = sizes = model.architecture
        super().__init__(sizes.vocab, sizes.hidden, sizes.positions, options.context_length)
        self.head_format = choose_head(model, options.head)
        threads = options.threads or available_cores()
        try:
            kernels = _cpu.Kernels.choose(isa)
            pool = _cpu.ThreadPool(threads)
            self.weight_format = _weight_format(model, options.weight_format, pool, kernels)
            weights = Weights(
                model,
                kernels,
                pool,
                weight_format=self.weight_format,
                head_format=self.head_format,
                is_mapped=options.weight_format == "stored",
            )
            del pool
            self.kv_cache: str = options.kv_cache
            if options.kv_cache == "auto":
                self.kv_cache = _cache_type(weights)
            self._decoder: Any = _cpu.Decoder(
                _decoder_model(model, weights, _activation_group(model, options.activations)),
                threads,
                _cpu.CacheType[self.kv_cache],
                self.context_length,
                options.cache_tokens or self.context_length,
                kernels,
            )
            self.most_states = self._decoder.most_states or None
        except MemoryError as error:
            raise UserError(
                f"{folder}: not enough memory for its weights and KV cache: lower --context-length or "
                "--cache-tokens, or choose --kv-cache int4, --head int4 or --weight-format b3"
            ) from error
        except ValueError as error:  # an unknown instruction set, or more than the decoder takes
            raise UserError(str(error)) from error
        self._memory: Any = (weights.kept, weights.vectors)
        self.weight_bytes, self.head_bytes = weights.weight_bytes, weights.head_bytes
        self.isa: str = kernels.isa
        self.load_seconds = time.perf_counter() - started

    @classmethod
    def load(cls, folder: str | Path, *, isa: str = "", **options: Any) -> Self:
        """Load a folder written by `sparse-bitnet pack`.

        Args:
            folder: the packed model.
            isa: a name that `sparse-bitnet env` lists; by default SPARSE_BITNET_ISA or the best.
            options: fields of `EngineOptions`: threads, weight_format, head, kv_cache, activations,
                context_length, cache_tokens.

        Raises `UserError` for a folder that is not packed, damaged (naming the tensor) or not supported
        by the engine, for options that do not fit, and for too little memory.
        """
        return cls(folder, EngineOptions(**options), isa)

    @property
    def free_tokens(self) -> int:
        """Return the number of tokens that fit into the free pages of the cache."""
        with self.turn():
            return self._decoder.free_tokens

    def _compute(
        self, batch: list[tuple[EngineSequence, np.ndarray]], logits: WhichLogits
    ) -> list[np.ndarray]:
        """Also compute again the tokens whose recurrent state is gone, see `Decoder::held`."""
        behind = [
            (sequence, np.asarray(sequence.tokens[held:], np.int32))
            for sequence, _ in batch
            if (held := self._decoder.length(sequence.cache)) < len(sequence)
        ]
        if behind:
            self._run(behind, "none")
        return self._run(batch, logits)

    def _run(
        self, batch: list[tuple[EngineSequence, np.ndarray]], logits: WhichLogits
    ) -> list[np.ndarray]:
        counts = [len(tokens) for _, tokens in batch]
        rows = {"none": 0, "last": len(batch)}.get(logits, sum(counts))
        columns = self.hidden_size if logits == "hidden" else self.vocab_size
        values = np.empty((rows, columns), np.float32)
        requests = [(sequence.cache, tokens.ctypes.data, len(tokens)) for sequence, tokens in batch]
        try:
            self._decoder.forward(requests, _cpu.Logits[logits], values.ctypes.data if rows else 0)
        except ValueError as error:
            # `forward` has checked everything else that the decoder refuses.
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

    def _reusable(self, sequence: EngineSequence, length: int) -> int:
        return self._decoder.held(sequence.cache, length)

    def _truncate(self, sequence: EngineSequence) -> None:
        self._decoder.truncate(sequence.cache, len(sequence))

    def _release(self, sequence: EngineSequence) -> None:
        self._decoder.close(sequence.cache)

    def _close(self) -> None:
        self._decoder.shut()
        self._decoder = self._memory = None


def _weight_format(
    model: EngineModel, requested: str, pool: _cpu.ThreadPool, kernels: _cpu.Kernels
) -> str:
    """Return the key of `FORMATS` for an option. Raises `UserError` if the model does not support it."""
    groups = model.scale_groups()
    unsupported = groups != {0} and groups - {*LARGE_GROUPS}  # also where only some have groups
    if requested == "auto":
        if unsupported:
            return "i2"
        if groups != {0}:  # lookup then knows no pattern
            return choose_format(NMPattern(1, 1), pool, kernels, group=min(groups))
        exact = needs_exact(model.metadata.packed_format)
        return choose_format(model.metadata.pattern, pool, kernels, exact=exact)
    name = model.metadata.packed_format if requested == "stored" else requested
    if name not in FORMATS:
        known = ", ".join(FORMATS)
        raise UserError(f"--weight-format {name} exists only in files: choose one of {known}")
    if name in ("b3", "lookup") and unsupported:
        raise UserError(f"--weight-format {name} needs scale groups of 64 or more, or none: use i2")
    return name


def _cache_type(weights: Weights) -> str:
    """Return "int8", or "float16" if outliers in the keys, as in Qwen2.5, would make int8 too coarse for
    the other numbers."""
    names = ("k_proj.bias", "k_norm.weight", "key_layernorm.weight")
    given = [values for name, values in weights.vectors.items() if name.endswith(names)]
    largest = max((float(np.abs(values).max()) for values in given), default=0.0)
    return "int8" if largest <= _LARGEST_OF_KEYS else "float16"


def _activation_group(model: EngineModel, activations: str) -> int:
    """Return the number of inputs that share a scale; 0: all of a token."""
    if activations == "auto" and model.metadata.format.quantizer != REGISTERED["quantizer"]:
        return 0  # trained here, and so with the inputs of a token
    groups = model.scale_groups()
    group = next(iter(groups)) if len(groups) == 1 else 0
    if activations == "group" and not group:
        raise UserError(
            f"{model.folder}: --activations group needs weights that all have one group size; use token"
        )
    return 0 if activations == "token" else group


def _decoder_model(opened: EngineModel, weights: Weights, group: int) -> _cpu.ModelBuilder:
    """Return sizes, and where `weights` are in memory; `group`: inputs per activation scale, 0: all."""
    architecture, rotation = opened.architecture, opened.metadata.rotation
    # The decoder copies the frequencies or keeps their address: they live as long as the weights.
    ropes = (architecture.rope, architecture.local_rope)
    frequencies = [np.ascontiguousarray(rope.inverse_frequencies, np.float32) for rope in ropes]
    weights.kept += frequencies
    model = _cpu.ModelBuilder(
        architecture.hidden,
        architecture.intermediate,
        architecture.heads,
        architecture.kv_heads,
        architecture.head_dim,
        architecture.vocab,
        architecture.norm_epsilon,
        _cpu.Activation(architecture.activation),
        frequencies[0].ctypes.data,
        architecture.rope.scaling,
        group,
        architecture.query_scale,
        architecture.embedding_scale,
        architecture.model_type == HUNYUAN,
    )
    if architecture.windows:
        model.add_rope(frequencies[1].ctypes.data, architecture.local_rope.scaling)
    if architecture.delta_net:
        model.set_hybrid(2 * len(frequencies[0]), *architecture.delta_net)
    if rotation is not None:
        signs = [(width, rotation.values(width)) for width in rotation.signs]
        weights.kept += [values for _, values in signs]
        addresses = [(width, values.ctypes.data) for width, values in signs]
        model.set_rotation(rotation.block, addresses, rotation.embedding, rotation.head)
    model.set_embedding(weights.embedding)
    model.set_head(weights.head)
    model.set_final_norm(weights.vectors["model.norm.weight"].ctypes.data)
    for layer in range(architecture.layers):
        block = f"model.layers.{layer}."
        window = architecture.windows[layer] if architecture.windows else 0
        linears, vectors = architecture.linears(layer), architecture.vectors(layer)
        parts: dict[str, Any] = {key: weights.matrices[block + n] for key, n in linears.items()}
        parts |= {k: weights.vectors[block + n].ctypes.data for k, (n, _) in vectors.items()}
        model.add_block(parts, window=window, rope=int(window > 0))
    return model
