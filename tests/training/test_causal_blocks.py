# SPDX-License-Identifier: Apache-2.0
"""Attention in causal blocks is transformers' eager attention, forward and backward."""

import pytest
import torch

from factories import tiny_model
from sparse_bitnet.training.causal_blocks import NAME


def make_model(family):
    """Doge has one mask per head, Bart optional attention to an encoder; without dropout."""
    if family == "inkling":
        return inkling()
    return tiny_model(family, vocab_size=64, max_position_embeddings=512).eval()


def inkling():
    """A model with a position bias, with and without windows."""
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    sizes |= {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16}
    sizes |= {"d_rel": 8, "rel_extent": 64, "sliding_window_size": 50, "local_layer_ids": [0]}
    module = pytest.importorskip("transformers.models.inkling.modeling_inkling")
    dense = {"head_dim": 16, "mlp_layer_types": ["dense"] * 2}
    return module.InklingForCausalLM(module.InklingTextConfig(**sizes, **dense))


@pytest.mark.parametrize(
    ("family", "length"),
    [
        *(("qwen2", 1), ("qwen2", 127), ("qwen2", 129), ("qwen2", 300)),
        *(("doge", 129), ("bart", 129), ("inkling", 129)),
    ],
)
def test_logits_and_gradients_are_those_of_eager_attention(family, length):
    tokens = torch.randint(64, (2, length), generator=torch.Generator().manual_seed(length))
    results = {}
    for name in ("eager", NAME):
        torch.manual_seed(0)
        model = make_model(family)
        model.set_attn_implementation(name)
        logits = model(input_ids=tokens, use_cache=False).logits
        logits.square().mean().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        results[name] = [logits.detach(), *gradients]
    assert len(results[NAME]) == len(results["eager"]) > 10
    for own, wanted in zip(results[NAME], results["eager"], strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", ["qwen2", "doge", "inkling"])
def test_tokens_behind_cached_ones_have_the_logits_of_the_whole(family):
    model, tokens = make_model(family).eval(), torch.arange(300).view(1, -1) % 64
    model.set_attn_implementation(NAME)
    with torch.no_grad():
        whole, first = model(tokens).logits, model(tokens[:, :150], use_cache=True)
        rest = model(tokens[:, 150:], past_key_values=first.past_key_values).logits
    torch.testing.assert_close(rest, whole[:, 150:], rtol=1e-4, atol=1e-6)
