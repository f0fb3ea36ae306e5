# SPDX-License-Identifier: Apache-2.0
"""llama.cpp as a measured child process of peers.py, through the low-level functions of llama-cpp-python.

The Python sampling loop of that package would cost it speed: here are only `llama_decode` calls, as in
llama.cpp's own llama-bench. Answers one JSON object a line (sparse_bitnet.bench.child).
"""

import ctypes
import importlib.metadata
import time
from typing import Any

import numpy as np

from sparse_bitnet.bench.child import resident_bytes, serve
from sparse_bitnet.errors import UserError

BATCH = 512


class LlamaCpp:
    """One loaded GGUF file with one context of one sequence."""

    def __init__(self, path: str, context_length: int) -> None:
        import llama_cpp

        self._library = llama_cpp
        self._silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        began = time.perf_counter()
        model_options = llama_cpp.llama_model_default_params()
        model_options.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), model_options)
        if not self._model:
            raise UserError(f"llama.cpp cannot load {path}")
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = context_length
        options.n_batch = options.n_ubatch = BATCH
        self._context = llama_cpp.llama_init_from_model(self._model, options)
        if not self._context:
            raise UserError(f"llama.cpp gives no context of {context_length} tokens for {path}")
        self.load_seconds = time.perf_counter() - began
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocabulary)

    def prefill(self, tokens: int, threads: int) -> float:
        """Return the seconds for a prompt of `tokens` tokens, with the logits of the last one."""
        self._start(threads)
        began = time.perf_counter()
        self._append(tokens)
        return time.perf_counter() - began

    def decode(self, steps: int, context: int, threads: int) -> float:
        """Return the seconds per token over `steps` tokens, one at a time, after `context` tokens."""
        self._start(threads)
        self._append(context)
        began = time.perf_counter()
        for _ in range(steps):
            self._append(1)
        return (time.perf_counter() - began) / steps

    def _start(self, threads: int) -> None:
        library = self._library
        library.llama_memory_clear(library.llama_get_memory(self._context), True)
        library.llama_set_n_threads(self._context, threads, threads)
        self._random = np.random.default_rng(0)

    def _append(self, count: int) -> None:
        library = self._library
        for first in range(0, count, BATCH):
            size = min(BATCH, count - first)
            tokens = self._random.integers(0, self._vocab_size, size, np.int32)
            array = (library.llama_token * size)(*tokens.tolist())
            if library.llama_decode(self._context, library.llama_batch_get_one(array, size)):
                raise UserError("llama_decode failed")
        # The logits are read, because a lazy engine could put their computation off until then.
        if count and not np.isfinite(library.llama_get_logits_ith(self._context, -1)[0]):
            raise UserError("llama.cpp computed logits that are not finite")


def main() -> None:
    engine: LlamaCpp | None = None

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        nonlocal engine
        if question["op"] == "load":
            engine = LlamaCpp(question["path"], question["context_length"])
            version = importlib.metadata.version("llama-cpp-python")
            return {"load_seconds": engine.load_seconds, "version": f"llama-cpp-python {version}"}
        assert engine is not None
        if question["op"] == "prefill":
            seconds = engine.prefill(question["tokens"], question["threads"])
        else:
            seconds = engine.decode(question["steps"], question["context"], question["threads"])
        return {"seconds": seconds, "resident_bytes": resident_bytes()}

    serve(answer)


if __name__ == "__main__":
    main()
