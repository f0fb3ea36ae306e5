# SPDX-License-Identifier: Apache-2.0
"""Child processes that hold the measured engines; requests and answers are JSON, one object per line.

    python -m sparse_bitnet.bench.child     # the CPU engine

Each engine has a process of its own, so that its memory is measured alone, its environment is its
own, and its threads are idle while another engine is measured. A child works only on request. Tokens
are random and the same for every engine; nothing is sampled, as in llama.cpp's llama-bench.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparse_bitnet.engine.protocol import EngineSequence, InferenceEngine
from sparse_bitnet.errors import UserError

if TYPE_CHECKING:
    from sparse_bitnet.engine.engine import Engine

OURS = ("-m", "sparse_bitnet.bench.child")
"""Python's arguments for a child process with the CPU engine."""


class Child(subprocess.Popen[str]):
    """The parent's side of a child process, a context manager."""

    def __init__(self, arguments: Sequence[str], environment: dict[str, str] | None = None) -> None:
        """Start this Python with `arguments` and with `environment` added to the present one."""
        super().__init__(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return the answer. Raises `UserError` with the child's error, or if the child has ended."""
        assert self.stdout is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(question), file=self.stdin, flush=True)
            line = self.stdout.readline()
        if not line:
            raise UserError(
                f"the measured process died (exit code {self.wait()}): measure smaller sizes"
            )
        answer = json.loads(line)
        if "error" in answer:
            raise UserError(answer["error"])
        return answer

    def __exit__(self, *error: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # a dead child has not read the question
            super().__exit__(*error)


def serve(handle: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """The child's side: answer every line of standard input with `handle` until it ends.

    A `UserError` of `handle` is an answer; any other exception ends the child with its traceback.
    """
    # Output of libraries must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = sys.stderr  # one buffer keeps the order of output
    for line in sys.stdin:
        try:
            answer = handle(json.loads(line))
        except UserError as error:
            # The engine's errors name another one, which is not measured here.
            answer = {"error": str(error).partition("; use --engine")[0]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def resident_bytes(process: int | str = "self") -> int | None:
    """Return the memory of a process that is in RAM; None if the system does not report it."""
    statm = Path(f"/proc/{process}/statm")
    pages = int(statm.read_text().split()[1]) if statm.exists() else None
    return None if pages is None else pages * os.sysconf("SC_PAGE_SIZE")


def cache_tokens(prefills: list[int], contexts: list[int], batches: list[int], steps: int) -> int:
    """Return the cache size for the measurements: a prompt, the kept contexts, and a decoding batch."""
    from sparse_bitnet._cpu import PAGE_TOKENS

    # A fork takes one page of its own and more as it grows; each sequence ends within a page.
    batch = max(batches, default=1) * (steps + 2 * PAGE_TOKENS)
    kept = sum(contexts) + len(contexts) * PAGE_TOKENS
    return kept + max([*prefills, batch]) + 2 * PAGE_TOKENS


def read_bytes(engine: "Engine") -> dict[str, float]:
    """Return the bytes that a decode step reads: weights and output head with scales, and keys and
    values per cached token; and what it reads and writes of each sequence's recurrent state.
    `block_weights` is the number of weights in the blocks, zeros included."""
    sizes = engine.architecture
    bits = {"float32": 32, "float16": 16, "int8": 8, "int4": 4}[engine.kv_cache]
    scale_bytes = 4 if engine.kv_cache.startswith("int") else 0
    vectors = 2 * (sizes.layers - sum(sizes.delta_layers)) * sizes.kv_heads
    net = sizes.delta_net
    state = 8 * net.value_heads * net.key_dim * net.value_dim if net else 0
    of_blocks = sum(
        rows * columns
        for layer in range(sizes.layers)
        for rows, columns in sizes.linear_shapes(layer).values()
    )
    return {
        "weight_bytes": engine.weight_bytes + engine.head_bytes,
        "cache_token_bytes": vectors * (sizes.head_dim * bits / 8 + scale_bytes),
        "state_bytes": state * sum(sizes.delta_layers),
        "block_weights": of_blocks,
    }


class EngineMeter:
    """Measures a loaded engine. Contexts, once computed, are kept and forked."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine
        self._contexts: dict[int, EngineSequence] = {}
        # The first forward touches memory and wakes threads: part of loading, not of speed.
        self.prefill(min(2, engine.context_length))

    def prefill(self, tokens: int) -> float:
        """Return the seconds for a prompt of this many tokens, with the logits of the last one."""
        prompt = self._tokens(tokens)
        sequence = self._engine.new_sequence()
        began = time.perf_counter()
        self._engine.forward([(sequence, prompt)])
        seconds = time.perf_counter() - began
        sequence.close()
        return seconds

    def decode(self, context: int, batch: int, steps: int) -> float:
        """Return the seconds per step, over `steps` steps of one token for each of `batch` sequences.

        Every sequence starts with the same `context` tokens and shares their memory with the others.
        """
        sequences = [self._context(context).fork() for _ in range(batch)]
        tokens = [[token] for token in self._tokens(batch)]
        entries = list(zip(sequences, tokens, strict=True))
        began = time.perf_counter()
        for _ in range(steps):
            self._engine.forward(entries)
        seconds = (time.perf_counter() - began) / steps
        for sequence in sequences:
            sequence.close()
        return seconds

    def _context(self, length: int) -> EngineSequence:
        if length not in self._contexts:
            self._contexts[length] = sequence = self._engine.new_sequence()
            if length:
                self._engine.forward([(sequence, self._tokens(length))], logits="none")
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
