# SPDX-License-Identifier: Apache-2.0
"""What can be exported to, and the options of doing it. Free of torch, so `--help` is quick."""

import typing
from dataclasses import dataclass
from typing import Literal

from sparse_bitnet.errors import UserError

FormatName = Literal[
    "bitnet",
    "compressed-tensors-w2a8",
    "compressed-tensors-w8a8",
    "gguf-tq1_0",
    "gguf-tq2_0",
    "gguf-q2_0",
    "gguf-i2_s",
    "dense",
]
Precision = Literal["f32", "f16", "bf16", "q8_0"]

_GGUF: tuple[Precision, ...] = ("f16", "bf16", "f32", "q8_0")
_HUGGING_FACE: tuple[Precision, ...] = ("bf16", "f16", "f32")


@dataclass(frozen=True, kw_only=True)
class FormatInfo:
    """One format of other tools."""

    summary: str
    bits_per_weight: float
    """Of the sparse layers, scales included where they are per block."""
    embeddings: tuple[Precision, ...]
    """Precisions that embeddings and head may have; the first is the default."""
    readers: str
    """Tools that load it."""


FORMATS: dict[str, FormatInfo] = {
    "bitnet": FormatInfo(
        summary="Hugging Face bitnet, 2 bits",
        bits_per_weight=2,
        embeddings=_HUGGING_FACE,
        readers="transformers",
    ),
    "compressed-tensors-w2a8": FormatInfo(
        summary="compressed-tensors pack-quantized, 2 bits",
        bits_per_weight=2,
        embeddings=_HUGGING_FACE,
        readers="transformers, vLLM",
    ),
    "compressed-tensors-w8a8": FormatInfo(
        summary="compressed-tensors int-quantized, 8 bits, the widest support",
        bits_per_weight=8,
        embeddings=_HUGGING_FACE,
        readers="transformers, vLLM",
    ),
    "gguf-tq1_0": FormatInfo(
        summary="GGUF TQ1_0, 1.69 bits where rows fill blocks of 256; CPU",
        bits_per_weight=1.6875,
        embeddings=_GGUF,
        readers="llama.cpp, Ollama, LM Studio",
    ),
    "gguf-tq2_0": FormatInfo(
        summary="GGUF TQ2_0, 2.06 bits where rows fill blocks of 256; CPU, Metal, Vulkan",
        bits_per_weight=2.0625,
        embeddings=_GGUF,
        readers="llama.cpp, Ollama, LM Studio",
    ),
    "gguf-q2_0": FormatInfo(
        summary="GGUF Q2_0, 2.25 bits where rows fill blocks of 64; CPU, CUDA, Metal, Vulkan",
        bits_per_weight=2.25,
        embeddings=_GGUF,
        readers="recent llama.cpp",
    ),
    "gguf-i2_s": FormatInfo(
        summary="GGUF I2_S, 2 bits where rows fill blocks of 128; CPU",
        bits_per_weight=2,
        embeddings=_GGUF,
        readers="bitnet.cpp, ik_llama.cpp",
    ),
    "dense": FormatInfo(
        summary="plain effective weights, 16 or 32 bits, for tools without a ternary format",
        bits_per_weight=16,
        embeddings=_HUGGING_FACE,
        readers="transformers, vLLM",
    ),
}
assert tuple(FORMATS) == typing.get_args(FormatName)


@dataclass(kw_only=True)
class ExportConfig:
    """Write a trained model in a format that other tools read."""

    format: FormatName
    """Format to write."""

    embeddings: Precision | None = None
    """Precision of embeddings and head; in Hugging Face folders of all that is not ternary. Default:
    bf16, in GGUF f16. q8_0: GGUF only."""

    verify: bool = False
    """Load the export with its real reader and compare it with the trained model."""

    text: str | None = None
    """Held-out text to verify on: a prepared folder or a text file. Default: the validation data the
    run was trained with where it still exists, else a built-in text."""

    verify_tokens: int = 2048
    """Maximum number of tokens to verify on."""

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise UserError(f"format {self.format!r}: choose one of {', '.join(FORMATS)}")
        allowed = FORMATS[self.format].embeddings
        if self.embeddings is None:
            self.embeddings = allowed[0]
        if self.embeddings not in allowed:
            raise UserError(
                f"embeddings={self.embeddings} is not possible in {self.format}: choose one of "
                f"{', '.join(allowed)}"
            )
        if self.verify_tokens < 2:
            raise UserError(f"verify_tokens={self.verify_tokens}: needs at least 2")
