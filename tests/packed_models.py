# SPDX-License-Identifier: Apache-2.0
"""Small packed models, and what transformers makes of them."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from factories import changed_tensors, logits_of, randomise_vectors_, tiny_model
from sparse_bitnet.checkpoint.load import from_pretrained
from sparse_bitnet.checkpoint.trained import save_pretrained
from sparse_bitnet.export.pack_checkpoint import pack_checkpoint
from sparse_bitnet.nn.convert import convert_
from sparse_bitnet.nn.layer import SparseBitConfig
from sparse_bitnet.packing.tensor_file import TensorFile, TensorFileWriter, TensorSpec

FAMILIES = (
    *("qwen2", "llama", "qwen3", "bitnet", "mistral", "gemma3_text", "hunyuan_v1_dense"),
    "qwen3_5_text",
)


def make_packed(
    folder: Path,
    family: str = "qwen2",
    *,
    format: str = "ternary-6:8",
    packed_format: str = "i2",
    embeddings: str = "float32",
    dense: str = "",
    **changes: Any,
) -> Path:
    """`folder`/packed: a random model; norms and biases are not their initial values.

    `dense`: end of the names of linears that stay as they are.
    """
    model = tiny_model(family, seed=7, **changes)

    def is_chosen(module: nn.Module, name: str) -> bool:
        kept = ("lm_head", "in_proj_a", "in_proj_b", *([dense] if dense else []))
        return not name.endswith(kept)

    convert_(model, SparseBitConfig.parse(format), is_chosen)
    save_pretrained(randomise_vectors_(model), folder / "trained")
    pack_checkpoint(
        folder / "trained", folder / "packed", format=packed_format, embeddings=embeddings
    )
    return folder / "packed"


def edit_packed(folder: Path, changes: dict[str, Any], **stated: Any) -> None:
    """Rewrite a packed file with right checksums: other tensors as in `edit_tensors`, other metadata."""
    path = folder / "model.safetensors"
    file = TensorFile(path)
    tensors = {name: file.tensor(name).clone() for name in file.entries}
    metadata = {key: value for key, value in file.metadata.items() if key != "crc32"} | stated
    path.unlink()
    changed = changed_tensors(tensors, changes)
    specs = [TensorSpec(name, value.dtype, tuple(value.shape)) for name, value in changed.items()]
    with TensorFileWriter(path, specs, metadata) as writer:
        for name, value in changed.items():
            writer.write(name, [value])


def load_reference(folder: Path) -> Any:
    return from_pretrained(folder, dtype=torch.float32).eval()


def reference_logits(folder: Path, tokens: list[int]) -> np.ndarray:
    """float32 [tokens, vocab]."""
    return logits_of(load_reference(folder), tokens)


def all_logits(engine: Any, tokens: list[int], what: str = "all") -> np.ndarray:
    """float32 [tokens, vocab] of a fresh sequence of the CPU engine, or its hidden states."""
    sequence = engine.new_sequence()
    (logits,) = engine.forward([(sequence, tokens)], what)
    sequence.close()
    return logits


def engine_logits(folder: Path, tokens: list[int], what: str = "all", **options: Any) -> np.ndarray:
    """`all_logits` of a folder, by the weight format and instruction set of the options; by default
    neither the cache nor the head is rounded."""
    from sparse_bitnet.engine.engine import Engine

    exact = {"head": "stored", "kv_cache": "float32", "threads": 1}
    engine = Engine.load(folder, **(exact | options))
    for name in ("weight_format", "isa"):
        assert options.get(name, "auto") in ("", "auto", getattr(engine, name))
    try:
        return all_logits(engine, tokens, what)
    finally:
        engine.close()


def errors(logits: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """|difference| / |expected| of each position, both Euclidean."""
    return np.linalg.norm(logits - expected, axis=-1) / np.linalg.norm(expected, axis=-1)


def typical_error(logits: np.ndarray, expected: np.ndarray) -> float:
    """The error that a quarter of the positions keep to.

    The last bit of a float, which the processor decides, can turn the rounding of an int8 activation.
    That moves one position by up to 0.02, and those behind it, which attend to it, by less.
    """
    return float(np.quantile(errors(logits, expected), 0.25))


def relative_error(logits: np.ndarray, expected: np.ndarray) -> float:
    """The largest error of a position."""
    return float(errors(logits, expected).max())


def assert_close(logits: np.ndarray, expected: np.ndarray) -> None:
    """Require the same up to roundings of int8 activations."""
    assert typical_error(logits, expected) < 1e-5
    assert relative_error(logits, expected) < 5e-2
