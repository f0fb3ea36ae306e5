# SPDX-License-Identifier: Apache-2.0
"""Sizes of the Qwen2.5 models: the published ones, and small ones for CPUs. Free of torch.

Small presets keep the architecture (grouped-query attention, SwiGLU, RMSNorm, biases on q, k, v, tied
embeddings) and accept any vocabulary. Every linear of their blocks divides by 32, so any pattern with m
in 2, 4, 8, 16, 32 fits.
"""

from dataclasses import dataclass

from sparse_bitnet.errors import UserError


@dataclass(frozen=True)
class Shape:
    """Sizes of one Qwen2.5-shaped model."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int = 151936
    max_position_embeddings: int = 32768
    published: bool = False
    """A published model keeps its vocabulary; a small preset takes the tokenizer's."""

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Return (out_features, in_features) of every linear of the blocks by full name, in order."""
        hidden, ffn = self.hidden_size, self.intermediate_size
        keys = hidden // self.num_attention_heads * self.num_key_value_heads
        sizes = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (ffn, hidden),
            "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
        }
        return {
            f"model.layers.{layer}.{name}": size
            for layer in range(self.num_hidden_layers)
            for name, size in sizes.items()
        }

    @property
    def block_weights(self) -> int:
        """Number of weights in all linears of the blocks, without biases and norms."""
        return sum(rows * in_features for rows, in_features in self.linears.values())


PRESETS: dict[str, Shape] = {
    # Block weights 0.2 M to 28 M; the vocabulary adds hidden * vocab_size: 0.3 M to 37 M in all.
    "qwen2.5-0.3m": Shape(96, 256, 2, 3, 1, vocab_size=1024, max_position_embeddings=2048),
    "qwen2.5-0.5m": Shape(128, 352, 2, 4, 2, vocab_size=1024, max_position_embeddings=2048),
    "qwen2.5-1m": Shape(128, 352, 4, 4, 2, vocab_size=2048, max_position_embeddings=2048),
    "qwen2.5-3m": Shape(192, 544, 6, 6, 2, vocab_size=4096, max_position_embeddings=2048),
    "qwen2.5-10m": Shape(320, 896, 8, 5, 1, vocab_size=8192, max_position_embeddings=4096),
    "qwen2.5-30m": Shape(512, 1408, 10, 8, 2, vocab_size=16384, max_position_embeddings=4096),
    "qwen2.5-0.5b": Shape(896, 4864, 24, 14, 2, published=True),
    "qwen2.5-1.5b": Shape(1536, 8960, 28, 12, 2, published=True),
    "qwen2.5-3b": Shape(2048, 11008, 36, 16, 2, published=True),
}


def find_preset(name: str) -> Shape:
    """Return a preset's sizes. Raises `UserError` for an unknown name."""
    if name not in PRESETS:
        raise UserError(f"model {name!r} is not a preset: choose one of {', '.join(PRESETS)}")
    return PRESETS[name]
