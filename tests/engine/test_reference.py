# SPDX-License-Identifier: Apache-2.0
"""The engine over transformers returns the model's logits, however the tokens were fed."""

import numpy as np
import pytest
import torch

from factories import logits_of, tiny_model
from sparse_bitnet.engine.protocol import CacheFull, ContextFull
from sparse_bitnet.engine.transformers_engine import TransformersEngine
from sparse_bitnet.errors import UserError
from sparse_bitnet.nn.convert import convert_, sparse_layers
from sparse_bitnet.nn.layer import SparseBitConfig

TOKENS = [5, 17, 3, 90, 41, 8, 8, 60, 22, 1, 33, 70]


@pytest.fixture(params=["qwen2", "gpt_neox"])
def model(request):
    return tiny_model(request.param, seed=2).eval()


@pytest.fixture
def engine(model):
    engine = TransformersEngine(model)
    yield engine
    engine.close()


def close(a, b):
    np.testing.assert_allclose(a, b, atol=2e-5)


def test_all_logits_end_with_the_last_ones(model, engine):
    expected = logits_of(model, TOKENS)
    sequence = engine.new_sequence()
    assert engine.forward([(sequence, TOKENS[:4])], "none") == []
    (last,) = engine.forward([(sequence, TOKENS[4:6])])
    (every,) = engine.forward([(sequence, TOKENS[6:])], "all")
    assert last.dtype == every.dtype == np.float32
    close(last, expected[5])
    close(every, expected[6:])
    assert sequence.tokens == TOKENS
    assert len(sequence) == 12
    assert engine.vocab_size == 96
    assert engine.context_length == 64


def test_states_and_ropes_that_change_with_the_length_equal_one_forward():
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 8}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8}
    for model in (tiny_model("lfm2").eval(), tiny_model("llama", rope_parameters=rope).eval()):
        engine, expected = TransformersEngine(model), logits_of(model, TOKENS)
        sequence = engine.new_sequence()
        engine.forward([(sequence, TOKENS[:4])], "none")
        steps = [engine.forward([(sequence, [token])])[0] for token in TOKENS[4:]]
        close(steps[-1], expected[-1])
        (again,) = engine.forward([(sequence.fork(5), TOKENS[5:7])])
        close(again, steps[2])
        engine.close()


def test_an_interrupted_forward_is_undone(model, engine):
    first, second = engine.new_sequence(), engine.new_sequence()
    engine.forward([(first, TOKENS[:4]), (second, TOKENS[:4])])

    def memory_ends(module, given):
        if second.cache.get_seq_length() > 4:  # some of its layers have more
            raise MemoryError

    hook = model.base_model.layers[-1].register_forward_pre_hook(memory_ends)
    with pytest.raises(MemoryError):
        engine.forward([(first, TOKENS[4:]), (second, TOKENS[4:])])
    hook.remove()
    assert first.tokens == second.tokens == TOKENS[:4]
    for rows in engine.forward([(first, TOKENS[4:]), (second.fork(), TOKENS[4:])], "all"):
        close(rows, logits_of(model, TOKENS)[4:])


def test_hidden_states_come_after_the_final_norm(model, engine):
    sequence = engine.new_sequence()
    parts = [engine.forward([(sequence, part)], "hidden")[0] for part in (TOKENS[:5], TOKENS[5:])]
    with torch.no_grad():
        expected = model.base_model(torch.tensor([TOKENS])).last_hidden_state[0].numpy()
    assert engine.hidden_size == expected.shape[1]
    close(np.concatenate(parts), expected)


def test_forks_and_truncation_start_from_what_they_share(model, engine):
    first = engine.new_sequence()
    engine.forward([(first, TOKENS)], "none")
    branch, copy, empty = first.fork(5), first.fork(), first.fork(0)
    first.truncate(8)
    first.truncate(8)
    batch = [(first, [7]), (branch, [9, 10]), (copy, [11]), (empty, TOKENS)]
    tokens = [[*TOKENS[:8], 7], [*TOKENS[:5], 9, 10], [*TOKENS, 11], TOKENS]
    for logits, expected in zip(engine.forward(batch), tokens, strict=True):
        close(logits, logits_of(model, expected)[-1])
    assert [sequence.tokens for sequence, _ in batch] == tokens
    first.truncate(0)
    (logits,) = engine.forward([(first, TOKENS[:3])])
    close(logits, logits_of(model, TOKENS[:3])[-1])


def test_limits_are_checked_before_anything_changes(model):
    engine = TransformersEngine(model, context_length=10, cache_tokens=14)
    one, two = engine.new_sequence(), engine.new_sequence()
    engine.forward([(one, TOKENS[:8])], "none")
    with pytest.raises(ContextFull, match="8 tokens and 3 more pass the context length of 10"):
        engine.forward([(two, [1]), (one, [1, 2, 3])])
    with pytest.raises(CacheFull):
        engine.forward([(one, [1]), (two, TOKENS[:6])])
    with pytest.raises(CacheFull):
        one.fork()
    assert (len(one), len(two), engine.free_tokens) == (8, 0, 6)
    assert one.cache.get_seq_length() == 8
    one.close()
    one.close()
    assert engine.free_tokens == 14
    engine.forward([(two, TOKENS[:9])])


def test_a_context_beyond_the_models_positions_is_refused():
    import transformers

    sizes = {"n_embd": 16, "n_head": 2, "n_layer": 1, "vocab_size": 96, "n_positions": 16}
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ids))
    with pytest.raises(UserError, match="--context-length 17: the model was made for 1 to 16"):
        TransformersEngine(model, context_length=17)
    assert TransformersEngine(model, context_length=16).context_length == 16
    model.config.get_text_config = lambda: transformers.GPT2Config(**sizes | {"n_positions": 12})
    assert TransformersEngine(model).context_length == 12, "that of the text, in a nested config"


def test_masks_are_selected_while_the_engine_is_open():
    model = convert_(tiny_model(), SparseBitConfig.parse("ternary-6:8"))
    layers = sparse_layers(model).values()
    engine = TransformersEngine(model)
    assert all(layer.is_selected for layer in layers)
    engine.close()
    engine.close()
    assert not any(layer.is_selected for layer in layers)


def test_models_with_a_recurrent_state_compute_all_again():
    import transformers

    torch.manual_seed(0)
    config = transformers.MambaConfig(
        vocab_size=96, hidden_size=32, state_size=4, num_hidden_layers=2
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    engine = TransformersEngine(model, context_length=32)
    sequence = engine.new_sequence()
    engine.forward([(sequence, TOKENS[:6])], "none")
    fork = sequence.fork(4)
    (every,) = engine.forward([(fork, [7, 8])], "all")
    close(every, logits_of(model, [*TOKENS[:4], 7, 8])[4:])
