# SPDX-License-Identifier: Apache-2.0
"""Against a plain float64 computation from the logits, and against the trainer's own validation."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_bitnet.checkpoint.load import from_pretrained
from sparse_bitnet.data.shards import TokenDataset
from sparse_bitnet.errors import UserError
from sparse_bitnet.evaluation.perplexity import (
    Evaluation,
    Perplexity,
    evaluate,
    perplexity,
    read_text,
    windows,
)
from sparse_bitnet.nn.convert import sparse_layers
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet.training.loss import SummedLoss, held_out_windows, validation_loss


@given(tokens=st.integers(0, 300), context=st.integers(1, 40))
def test_windows_score_each_prediction_once(tokens, context):
    scored = []
    for start, end in windows(tokens, context):
        assert 0 <= start < end <= start + context
        scored += range(start, end)
    assert scored == list(range(max(0, tokens - 1)))


@pytest.fixture
def model(model_folder):
    return from_pretrained(model_folder)


@pytest.fixture
def tokens():
    return np.random.default_rng(0).integers(0, 300, 203).astype(np.uint16)


def reference(model, tokens, context):
    """Mean negative log-likelihood in float64 from whole logits, one window at a time."""
    total, count = 0.0, 0
    model.eval()
    for start, end in windows(len(tokens), context):
        ids = torch.from_numpy(tokens[start : end + 1].astype(np.int64))
        with torch.no_grad():
            logits = model(ids[None, :-1]).logits[0].double()
        losses = -torch.log_softmax(logits, -1).gather(-1, ids[1:, None])[:, 0]
        total += losses.sum().item()
        count += end - start
    return total / count, count


@pytest.mark.parametrize("context", [32, 7, 500])
def test_perplexity_equals_a_plain_float64_computation(model, tokens, context):
    expected, count = reference(model, tokens, context)
    measured = perplexity(model, tokens, context_length=context, batch_size=3)
    assert measured.tokens == count == len(tokens) - 1
    assert measured.mean_nll == pytest.approx(expected, rel=1e-6)
    assert measured.perplexity == pytest.approx(math.exp(expected), rel=1e-5)


def test_perplexity_leaves_the_model_as_it_was(model, tokens):
    model.train()
    perplexity(model, tokens, context_length=64)
    assert model.training
    assert not any(layer.is_selected for layer in sparse_layers(model).values())


def test_perplexity_in_bfloat16_is_close(model, tokens):
    exact = perplexity(model, tokens, context_length=64).mean_nll
    rounded = perplexity(model, tokens, context_length=64, dtype=torch.bfloat16).mean_nll
    assert rounded == pytest.approx(exact, rel=2e-2)


def test_perplexity_equals_the_trainers_validation(model, prepared):
    config = TrainConfig(data=str(prepared), sequence_length=32, batch_size=4, validation_tokens=0)
    where = {"device": torch.device("cpu"), "dtype": torch.float32}
    loss, scored = validation_loss(SummedLoss(model), config, held_out_windows(config), **where)
    tokens = TokenDataset.open(prepared, "validation")[0 : scored + 1]
    measured = perplexity(model, tokens, context_length=32, batch_size=4)
    assert measured.tokens == scored
    assert measured.mean_nll == pytest.approx(loss, rel=1e-12)


def test_bits_per_byte_follow_from_the_size_of_the_text():
    words = dict.fromkeys(("checkpoint", "format", "data", "precision", "device"), "")
    where = {"context_length": 8, "text_bytes": 10} | words
    measured = Evaluation(mean_nll=math.log(2), tokens=30, **where)
    assert measured.bits_per_byte == pytest.approx(3)
    assert measured.perplexity == pytest.approx(2)
    where["text_bytes"] = None
    assert Evaluation(mean_nll=1, tokens=3, **where).bits_per_byte is None
    assert Perplexity(mean_nll=1e9, tokens=3).perplexity == math.inf
    assert math.isnan(Perplexity(mean_nll=math.nan, tokens=3).perplexity)


def test_progress_counts_every_token(model, tokens):
    seen = []
    perplexity(model, tokens, context_length=16, batch_size=4, on_batch=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == len(tokens) - 1


def test_unscorable_data_is_refused(model):
    with pytest.raises(UserError, match="1 tokens"):
        perplexity(model, np.array([1]), context_length=8)


def test_evaluate_scores_prepared_data(model_folder, prepared):
    measured = evaluate(*read_text(model_folder, prepared), precision="float32", device="cpu")
    dataset = TokenDataset.open(prepared, "validation")
    assert measured.tokens == len(dataset) - 1
    assert measured.text_bytes == dataset.manifest.splits["validation"].text_bytes
    assert measured.format == "ternary-6:8"
    assert (measured.precision, measured.context_length) == ("float32", 2048)
    flat = measured.to_dict()
    assert flat["perplexity"] == measured.perplexity
    assert flat["checkpoint"] == str(model_folder)
    assert json.loads(json.dumps(flat)) == flat


def test_max_tokens_scores_the_first_tokens_only(model_folder, prepared):
    read = read_text(model_folder, prepared, context_length=32)
    measured = evaluate(*read, device="cpu", max_tokens=100)
    assert measured.tokens == 100
    assert measured.bits_per_byte is None
