# SPDX-License-Identifier: Apache-2.0
"""How many parameters and operations a model of some shape takes in training. Free of torch."""

from sparse_bitnet.presets import Shape

GPU_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}
"""Dense bfloat16 FLOP/s of the SXM boards, from the makers' data sheets."""

UTILISATION = 0.4
"""Share of the bfloat16 rate that a well-tuned training run of dense models reaches."""


def parameter_counts(shape: Shape, vocab_size: int | None = None) -> tuple[int, int, int]:
    """(weights of the blocks' linears, of the embedding, of biases and norms)."""
    embedding = shape.hidden_size * (vocab_size or shape.vocab_size)
    return shape.block_weights, embedding, shape.vector_values


def flops_per_token(shape: Shape, sequence_length: int, vocab_size: int | None = None) -> int:
    """Forward and backward: 6 per weight (the tied head included, the look-up not), and 6 per layer,
    channel and token of context for causal attention."""
    block, embedding, _ = parameter_counts(shape, vocab_size)
    attention = 6 * shape.num_hidden_layers * shape.hidden_size * sequence_length
    return 6 * (block + embedding) + attention
