# SPDX-License-Identifier: Apache-2.0
"""A packed model as the decoder in C++ takes it (csrc/decoder.h): sizes, and addresses of weights."""

import numpy as np

from sparse_bitnet import _cpu
from sparse_bitnet.engine.architecture import BLOCK_LINEARS, Architecture
from sparse_bitnet.engine.runtime_weights import Weights


def build_model(
    architecture: Architecture, weights: Weights, activation_group: int
) -> _cpu.ModelBuilder:
    """Addresses are of what `weights` keeps; `activation_group` inputs share a scale, 0: all of them."""
    # The decoder copies the frequencies or keeps their address: they live as long as the weights.
    ropes = (architecture.rope, architecture.local_rope)
    frequencies = [np.ascontiguousarray(rope.inverse_frequencies, np.float32) for rope in ropes]
    weights.kept += frequencies
    model = _cpu.ModelBuilder(
        architecture.hidden,
        architecture.intermediate,
        architecture.heads,
        architecture.kv_heads,
        architecture.head_dim,
        architecture.vocab,
        architecture.norm_epsilon,
        _cpu.Activation(architecture.activation),
        frequencies[0].ctypes.data,
        architecture.rope.scaling,
        activation_group,
        architecture.query_scale,
        architecture.embedding_scale,
        architecture.norms_rotated,
    )
    local = architecture.local_rope.scaling != architecture.rope.scaling
    local |= not np.array_equal(frequencies[0], frequencies[1])
    if local:
        model.add_rope(frequencies[1].ctypes.data, architecture.local_rope.scaling)
    model.set_embedding(weights.embedding)
    model.set_head(weights.head)
    model.set_final_norm(weights.vectors["model.norm.weight"].ctypes.data)
    sub_norms = ("self_attn.attn_sub_norm.weight", "mlp.ffn_sub_norm.weight")
    own_norms: tuple[str, ...] = ()
    if architecture.linear_norms:
        q, k, v, o, gate, up, down = BLOCK_LINEARS
        sub_norms, own_norms = (f"{o}.norm.weight", f"{down}.norm.weight"), (q, k, v, gate, up)
    head_norms, out_norms = architecture.head_norms or ("", ""), ("", "")
    if architecture.out_norms:
        out_norms = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")
    for layer in range(architecture.layers):
        block = f"model.layers.{layer}"
        window = architecture.windows[layer] if architecture.windows else 0

        def vector(name: str, block: str = block) -> int:
            found = weights.vectors.get(f"{block}.{name}")
            return 0 if found is None else found.ctypes.data

        model.add_block(
            *(weights.matrices[f"{block}.{name}"] for name in BLOCK_LINEARS),
            input_norm=vector("input_layernorm.weight"),
            post_attention_norm=vector(architecture.feed_forward_norm),
            q_bias=vector("self_attn.q_proj.bias"),
            k_bias=vector("self_attn.k_proj.bias"),
            v_bias=vector("self_attn.v_proj.bias"),
            o_bias=vector("self_attn.o_proj.bias"),
            attention_sub_norm=vector(sub_norms[0]),
            ffn_sub_norm=vector(sub_norms[1]),
            linear_norms=[vector(f"{name}.norm.weight") for name in own_norms],
            q_norm=vector(head_norms[0]),
            k_norm=vector(head_norms[1]),
            attention_out_norm=vector(out_norms[0]),
            ffn_out_norm=vector(out_norms[1]),
            window=window,
            rope=int(local and window > 0),
        )
    return model
