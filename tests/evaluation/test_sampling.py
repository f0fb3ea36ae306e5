# SPDX-License-Identifier: Apache-2.0
"""Text continues the prompt, the same for the same seed."""

import torch

from sparse_bitnet.checkpoint.load import from_pretrained, load_tokenizer
from sparse_bitnet.evaluation.sample_text import continue_text
from sparse_bitnet.nn.convert import sparse_layers


def test_same_seed_same_text(model_folder):
    model, tokenizer = from_pretrained(model_folder), load_tokenizer(model_folder)
    state = torch.get_rng_state()
    one, again, other = (
        continue_text(model, tokenizer, "weight", max_new_tokens=12, seed=seed)
        for seed in (1, 1, 2)
    )
    assert one == again != other
    assert not one.startswith("weight")
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(layer.is_selected for layer in sparse_layers(model).values())


def test_greedy_has_no_chance_in_it(model_folder):
    model, tokenizer = from_pretrained(model_folder), load_tokenizer(model_folder)
    texts = {
        continue_text(model, tokenizer, "mask", max_new_tokens=8, temperature=0, seed=seed)
        for seed in (1, 2)
    }
    assert len(texts) == 1
