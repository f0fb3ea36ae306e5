# SPDX-License-Identifier: Apache-2.0
"""Attention in causal blocks is transformers' eager attention, forward and backward."""

import pytest
import torch

from factories import tiny_model
from sparse_bitnet.training.causal_blocks import NAME
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet.training.device import compile_decoder_


@pytest.mark.parametrize("length", [1, 127, 129, 300])
def test_logits_and_gradients_are_those_of_eager_attention(length):
    tokens = torch.randint(64, (2, length), generator=torch.Generator().manual_seed(length))
    found = {}
    for name in ("eager", NAME):
        model = tiny_model(vocab_size=64, max_position_embeddings=512)
        model.set_attn_implementation(name)
        logits = model(input_ids=tokens, use_cache=False).logits
        logits.square().mean().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        found[name] = [logits.detach(), *gradients]
    assert len(found[NAME]) == len(found["eager"]) > 10
    for own, wanted in zip(found[NAME], found["eager"], strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("own", ["sdpa", "eager"])
def test_models_that_have_an_attention_of_their_own_keep_it(monkeypatch, own):
    monkeypatch.setattr(torch.nn.Module, "compile", lambda part, **options: None)
    model = tiny_model(vocab_size=64)
    model.set_attn_implementation(own)
    compile_decoder_(model, TrainConfig(), torch.device("cpu"), 1)
    assert model.config._attn_implementation == (NAME if own == "sdpa" else "eager")
