# SPDX-License-Identifier: Apache-2.0
"""Export formats and the options of an export. Imports no torch, so `--help` is quick."""

from dataclasses import dataclass
from typing import Annotated, Literal

from sparse_bitnet.errors import UserError, check_least, refuse_unused

Precision = Literal["auto", "f32", "f16", "bf16", "q8_0"]

FORMATS = {
    "bitnet": ("Hugging Face bitnet, 2 bits", "transformers"),
    "compressed-tensors-w2a8": ("compressed-tensors pack-quantized, 2 bits", "transformers, vLLM"),
    "compressed-tensors-w8a8": (
        "compressed-tensors int-quantized, 8 bits, the widest support",
        "transformers, vLLM",
    ),
    "gguf-tq1_0": (
        "GGUF TQ1_0, 1.69 bits where rows fill blocks of 256; CPU",
        "llama.cpp, Ollama, LM Studio",
    ),
    "gguf-tq2_0": (
        "GGUF TQ2_0, 2.06 bits where rows fill blocks of 256; CPU, Metal, Vulkan",
        "llama.cpp, Ollama, LM Studio",
    ),
    "gguf-q2_0": (
        "GGUF Q2_0, 2.25 bits where rows fill blocks of 64; CPU, CUDA, Metal, Vulkan",
        "recent llama.cpp",
    ),
    "gguf-i2_s": (
        "GGUF I2_S, 2 bits where rows fill blocks of 128; CPU",
        "bitnet.cpp, ik_llama.cpp",
    ),
    "gguf-pq2_0": ("GGUF PQ2_0, 2.13 bits, also rotated weights", "llama.cpp of Prism ML"),
    "gguf-ptq1_0": ("GGUF PTQ1_0, 1.75 bits, also rotated weights", "llama.cpp of Prism ML"),
    "dense": (
        "plain effective weights, 16 or 32 bits, for tools without a ternary format",
        "transformers, vLLM",
    ),
}
"""Formats of other tools: a summary, and the tools that load it."""


@dataclass(kw_only=True)
class ExportConfig:
    """Write a trained model in a format that other tools read."""

    format: Annotated[str, "--to"]
    """Export format, from the list above."""

    embeddings: Precision | None = None
    """Data type of embedding and output head; in Hugging Face folders, of everything not ternary.
    Default: bf16; in GGUF auto, which keeps ternary ones ternary and stores others as f16. q8_0: GGUF
    only."""

    verify: bool = False
    """Load the export with the tool it is for, and compare the outputs with the trained model's."""

    text: str | None = None
    """With --verify: held-out text, a prepared folder or a text file. Default: the run's own validation
    data if it still exists, else a built-in text."""

    verify_tokens: int = 2048
    """With --verify: maximum number of tokens to compare."""

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise UserError(f"--to {self.format!r}: choose one of {', '.join(FORMATS)}")
        allowed: tuple[Precision, ...] = ("bf16", "f16", "f32")
        if self.format.startswith("gguf"):
            allowed = ("auto", "f16", "bf16", "f32", "q8_0")
        self.embeddings = self.embeddings or allowed[0]
        if self.embeddings not in allowed:
            raise UserError(
                f"embeddings={self.embeddings} is not possible in {self.format}: choose one of "
                f"{', '.join(allowed)}"
            )
        check_least(self, verify_tokens=2)
        if not self.verify:
            refuse_unused(self, ("text", "verify_tokens"), "only --verify reads text")
