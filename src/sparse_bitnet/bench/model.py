# SPDX-License-Identifier: Apache-2.0
"""Seconds of prefill and decode of one engine: the measured child process of `sparse-bitnet bench`.

    python -m sparse_bitnet.bench.model     # answers one JSON object a line, see child.py

Tokens are random and the same for everyone; nothing is sampled, as in llama.cpp's llama-bench.
"""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparse_bitnet import _cpu
from sparse_bitnet.bench.child import resident_bytes, serve
from sparse_bitnet.engine.protocol import EngineSequence, InferenceEngine

if TYPE_CHECKING:
    from sparse_bitnet.engine.engine import Engine

PAGE_TOKENS = _cpu.PAGE_TOKENS
"""Tokens a page of the engine's cache holds: a fork takes one page of its own and more as it grows."""


def cache_tokens(prefills: list[int], contexts: list[int], batches: list[int], steps: int) -> int:
    """Room in the cache for what is measured: a prompt, the kept contexts, a batch that decodes."""
    of_sequence = PAGE_TOKENS + -(-steps // PAGE_TOKENS) * PAGE_TOKENS
    kept = sum(-(-context // PAGE_TOKENS) * PAGE_TOKENS for context in contexts)
    prompt = -(-max(prefills, default=0) // PAGE_TOKENS) * PAGE_TOKENS
    return kept + max(prompt, max(batches, default=1) * of_sequence) + PAGE_TOKENS


def read_bytes(engine: "Engine") -> dict[str, float]:
    """What a decode step reads: of weights and output head, with their scales, and of keys and values a
    token; beside it the weights of the blocks, zeros included."""
    sizes = engine.architecture
    bits = {"float32": 32, "float16": 16, "int8": 8, "int4": 4}[engine.kv_cache]
    scale_bytes = 4 if engine.kv_cache.startswith("int") else 0
    vectors = 2 * sizes.layers * sizes.kv_heads
    of_block = sum(rows * columns for rows, columns in sizes.linear_shapes().values())
    return {
        "weight_bytes": engine.weight_bytes + engine.head_bytes,
        "cache_token_bytes": vectors * (sizes.head_dim * bits / 8 + scale_bytes),
        "block_weights": sizes.layers * of_block,
    }


class EngineMeter:
    """Measures a loaded engine. Contexts, once computed, are kept and forked."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine
        self._contexts: dict[int, EngineSequence] = {}
        # The first forward touches memory and wakes threads; that is loading, not speed.
        self.prefill(min(2, engine.context_length))

    def prefill(self, tokens: int) -> float:
        """Seconds for a prompt of this many tokens, with the logits of the last one."""
        prompt = self._tokens(tokens)
        sequence = self._engine.new_sequence()
        began = time.perf_counter()
        self._engine.forward([(sequence, prompt)])
        seconds = time.perf_counter() - began
        sequence.close()
        return seconds

    def decode(self, context: int, batch: int, steps: int) -> float:
        """Seconds a step, over `steps` steps of one token for each of `batch` sequences.

        Every sequence starts with the same `context` tokens and shares their memory with the others.
        """
        base = self._context(context)
        sequences = [
            self._engine.new_sequence() if base is None else base.fork() for _ in range(batch)
        ]
        tokens = [[token] for token in self._tokens(batch)]
        entries = list(zip(sequences, tokens, strict=True))
        began = time.perf_counter()
        for _ in range(steps):
            self._engine.forward(entries)
        seconds = (time.perf_counter() - began) / steps
        for sequence in sequences:
            sequence.close()
        return seconds

    def _context(self, length: int) -> EngineSequence | None:
        if length == 0:
            return None
        if length not in self._contexts:
            sequence = self._engine.new_sequence()
            self._engine.forward([(sequence, self._tokens(length))], logits="none")
            self._contexts[length] = sequence
        return self._contexts[length]

    def _tokens(self, count: int) -> list[int]:
        return np.random.default_rng(0).integers(0, self._engine.vocab_size, count).tolist()


def main() -> None:
    """Answer "load", then "prefill" and "decode"."""
    meter: EngineMeter | None = None

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        nonlocal meter
        if question["op"] == "load":
            from sparse_bitnet.engine.engine import Engine

            engine = Engine.load(Path(question["folder"]), **question["options"])
            meter = EngineMeter(engine)
            return {
                **read_bytes(engine),
                "load_seconds": engine.load_seconds,
                "resident_bytes": resident_bytes(),
                "isa": engine.isa,
                "weight_format": engine.weight_format,
                "head": engine.head_format,
            }
        assert meter is not None
        if question["op"] == "prefill":
            seconds = meter.prefill(question["tokens"])
        else:
            seconds = meter.decode(question["context"], question["batch"], question["steps"])
        return {"seconds": seconds, "resident_bytes": resident_bytes()}

    serve(answer)


if __name__ == "__main__":
    main()
