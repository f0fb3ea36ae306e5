# SPDX-License-Identifier: Apache-2.0
"""litespark-inference as a measured child process of peers.py: its runtime without torch, greedy steps.

Its loader takes bfloat16 masters from the hub alone, so its model is filled here: random ternary codes
in its own layout, four a byte as code + 1, the first lowest, with the shape of a packed folder's
config.json; embedding and head in int8, as ours. Threads are OpenMP's, set in the environment.
"""

import importlib.metadata
import json
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from sparse_bitnet.bench.child import resident_bytes, serve
from sparse_bitnet.engine.architecture import BLOCK_LINEARS, read_architecture
from sparse_bitnet.errors import UserError

CHUNK = 64
"""Tokens of a prompt at once: given more, the products of 1.0.3 (LSPK_MAX_T) return without computing."""


class Litespark:
    """A random model of a BitNet b1.58 shape."""

    def __init__(self, folder: str, context_length: int) -> None:
        from litespark_inference.torchless import model as parts
        from litespark_inference.torchless import runtime

        self._runtime, self._context_length = runtime, context_length
        config = json.loads((Path(folder) / "config.json").read_text())
        shape = read_architecture(config, folder)
        if shape.model_type != "bitnet":
            raise UserError(f"litespark-inference runs BitNet b1.58, not {shape.model_type}")
        random = np.random.default_rng(0)
        codes = [
            sum(c << 2 * place for place, c in enumerate(four))
            for four in product(range(3), repeat=4)
        ]
        table = np.array(codes, np.uint8)

        def projection(rows: int, columns: int) -> Any:
            packed = table[random.integers(0, len(table), (rows, columns // 4), np.uint8)]
            sums = np.zeros(rows, np.int32)
            return parts.PackedProjection(packed, sums, 0.02, columns, rows)

        lengths = {"hidden": shape.hidden, "intermediate": shape.intermediate}
        ones = {name: np.ones(length, np.float32) for name, length in lengths.items()}
        norms = (ones["hidden"], ones["hidden"], ones["hidden"], ones["intermediate"])
        shapes = shape.linear_shapes()
        embedding = random.integers(-127, 128, (shape.vocab, shape.hidden), np.int8)
        self._vocab = shape.vocab
        self._model = parts.PackedBitNetModel(
            config=parts.BitNetConfig(
                hidden_size=shape.hidden,
                num_layers=shape.layers,
                num_heads=shape.heads,
                num_kv_heads=shape.kv_heads,
                intermediate_size=shape.intermediate,
                vocab_size=shape.vocab,
                max_position_embeddings=shape.positions,
                rms_norm_eps=shape.norm_epsilon,
                rope_theta=config["rope_parameters"]["rope_theta"],
            ),
            embed_tokens=None,
            final_norm=ones["hidden"],
            layers=[
                parts.PackedLayer(
                    *(projection(*shapes[name]) for name in BLOCK_LINEARS.values()), *norms
                )
                for _ in range(shape.layers)
            ],
            embed_int8=embedding,
            embed_scale=np.full(shape.vocab, 0.0005, np.float32),
        )

    def prefill(self, tokens: int) -> float:
        """Return the seconds for a prompt of `tokens` tokens, with the logits of the last one."""
        state = self._runtime.init_state(self._model, t_max=self._context_length)
        prompt = np.random.default_rng(0).integers(0, self._vocab, tokens).tolist()
        began = time.perf_counter()
        for start in range(0, tokens, CHUNK):
            logits = self._runtime.forward_prefill(
                self._model, state, prompt[start : start + CHUNK]
            )
        seconds = time.perf_counter() - began
        if not np.isfinite(logits).all():
            raise UserError(f"litespark-inference made no numbers of a prompt of {tokens} tokens")
        return seconds

    def decode(self, steps: int) -> float:
        """Return the seconds per token over `steps` tokens, one at a time."""
        state = self._runtime.init_state(self._model, t_max=self._context_length)
        began, token = time.perf_counter(), 1
        for _ in range(steps):
            token = int(np.argmax(self._runtime.forward_one(self._model, state, token)))
        return (time.perf_counter() - began) / steps


def main() -> None:
    engine: Litespark | None = None

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        nonlocal engine
        if question["op"] == "load":
            engine = Litespark(question["folder"], question["context_length"])
            return {"version": importlib.metadata.version("litespark-inference")}
        assert engine is not None
        if question["op"] == "prefill":
            seconds = engine.prefill(question["tokens"])
        else:
            seconds = engine.decode(question["steps"])
        return {"seconds": seconds, "resident_bytes": resident_bytes()}

    serve(answer)


if __name__ == "__main__":
    main()
