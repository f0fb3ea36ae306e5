# SPDX-License-Identifier: Apache-2.0
"""How many parameters, bytes and operations a model of some shape takes in training. Free of torch.

Bytes follow the code of this package: float32 masters, gradients and AdamW moments. Activations are those
that autograd keeps, counted tensor by tensor; a test compares both with what a model really holds.
"""

from sparse_bitnet.layer_config import SparseBitConfig
from sparse_bitnet.presets import Shape

LOSS_CHUNK = 512
"""Tokens, of vocabularies as large as Qwen2.5's."""


def parameter_counts(shape: Shape, vocab_size: int | None = None) -> tuple[int, int, int]:
    """(weights of the blocks' linears, of the embedding, of biases and norms)."""
    embedding = shape.hidden_size * (vocab_size or shape.vocab_size)
    return shape.block_weights, embedding, shape.vector_values


def converted_weights(shape: Shape, config: SparseBitConfig) -> int:
    """Weights of the blocks' linears that do not stay dense."""
    linears = config.converted(shape.linears, "the model")
    return sum(rows * in_features for rows, in_features in linears.values())


def mask_bytes(config: SparseBitConfig) -> float:
    """Bytes a weight of a mask: one integer a group, and bools where a step computes with them."""
    if config.pattern.is_dense:
        return 0.0
    m = config.pattern.m
    words = (1 if m <= 8 else 2 if m <= 16 else 4) / m
    return words + (config.weight == "full" or config.mask_gradient == "masked")


def activation_bytes(
    shape: Shape,
    config: SparseBitConfig,
    tokens: int,
    *,
    checkpointing: bool = False,
    compute_bytes: int = 2,
    chunk_tokens: int = LOSS_CHUNK,
) -> int:
    """What the backward pass needs of one forward of `tokens` tokens, and the loss's chunk of logits.

    Per token and layer, in bytes: of the residual width the norms' float32 inputs and outputs, the
    products' inputs (int8 or the compute type), queries and attention output; of the MLP's width its
    inner products; of the key width keys and values; and the scales of tokens and norms.
    """
    hidden, inner = shape.hidden_size, shape.intermediate_size
    wide = compute_bytes == 4
    layer = (32 if wide else 30) * hidden + (16 if wide else 8) * inner + 24
    if config.activation == "int8":
        int8 = (30 if wide else 26) * hidden + (13 if wide else 7) * inner + 52
        # Layers that stay dense keep their inputs in the compute type: counted by their share.
        share = converted_weights(shape, config) / shape.block_weights
        layer = round(share * int8 + (1 - share) * layer)
    layer += 2 * compute_bytes * shape.key_size
    outside = 12 * hidden + 12
    kept = layer * shape.num_hidden_layers
    if checkpointing:
        kept = 4 * hidden * shape.num_hidden_layers + layer
    logits = 8 * min(chunk_tokens, tokens) * shape.vocab_size
    return tokens * (kept + outside) + logits


def flops_per_token(shape: Shape, sequence_length: int, vocab_size: int | None = None) -> int:
    """Forward and backward: 6 per weight (the tied head included, the look-up not), and 6 per layer,
    channel and token of context for causal attention."""
    block, embedding, _ = parameter_counts(shape, vocab_size)
    attention = 6 * shape.num_hidden_layers * shape.hidden_size * sequence_length
    return 6 * (block + embedding) + attention
