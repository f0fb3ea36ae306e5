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
from sparse_bitnet.evaluation.perplexity import Perplexity, Window, evaluate, perplexity, windows
from sparse_bitnet.nn.convert import sparse_layers
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet.training.loss import SummedLoss, held_out_windows, validation_loss


@given(tokens=st.integers(0, 300), context=st.integers(1, 40), data=st.data())
def test_windows_score_each_prediction_once_with_enough_context(tokens, context, data):
    stride = data.draw(st.integers(1, context))
    scored = []
    for start, end, scored_from in windows(tokens, context, stride):
        assert 0 <= start <= scored_from < end <= start + context
        scored += range(scored_from, end)
        if start:
            assert scored_from - start >= context - stride
    assert scored == list(range(max(0, tokens - 1)))


def test_overlapping_windows_score_their_end():
    assert list(windows(10, 4, 4)) == [Window(0, 4, 0), Window(4, 8, 4), Window(8, 9, 8)]
    assert list(windows(9, 4, 2)) == [Window(0, 4, 0), Window(2, 6, 4), Window(4, 8, 6)]


@pytest.fixture
def model(model_folder):
    return from_pretrained(model_folder)


@pytest.fixture
def tokens():
    return np.random.default_rng(0).integers(0, 300, 203).astype(np.uint16)


def reference(model, tokens, context, stride):
    """Mean negative log-likelihood in float64 from whole logits, one window at a time."""
    total, count = 0.0, 0
    model.eval()
    for start, end, scored_from in windows(len(tokens), context, stride):
        ids = torch.from_numpy(tokens[start : end + 1].astype(np.int64))
        with torch.no_grad():
            logits = model(ids[None, :-1]).logits[0].double()
        losses = -torch.log_softmax(logits, -1).gather(-1, ids[1:, None])[:, 0]
        total += losses[scored_from - start :].sum().item()
        count += end - scored_from
    return total / count, count


@pytest.mark.parametrize(("context", "stride"), [(32, 32), (32, 8), (7, 3), (500, 500)])
def test_equals_plain_computation(model, tokens, context, stride):
    expected, count = reference(model, tokens, context, stride)
    found = perplexity(model, tokens, context_length=context, stride=stride, batch_size=3)
    assert found.tokens == count == len(tokens) - 1
    assert found.mean_nll == pytest.approx(expected, rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(expected), rel=1e-5)


def test_leaves_the_model_as_it_was(model, tokens):
    model.train()
    perplexity(model, tokens, context_length=64)
    assert model.training
    assert not any(layer.is_selected for layer in sparse_layers(model).values())


def test_bfloat16_is_close(model, tokens):
    exact = perplexity(model, tokens, context_length=64).mean_nll
    rounded = perplexity(model, tokens, context_length=64, dtype=torch.bfloat16).mean_nll
    assert rounded == pytest.approx(exact, rel=2e-2)


def test_equals_the_trainers_validation(model, prepared):
    config = TrainConfig(data=str(prepared), sequence_length=32, batch_size=4, validation_tokens=0)
    loss, scored = validation_loss(
        SummedLoss(model),
        config,
        held_out_windows(config),
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    tokens = TokenDataset.open(prepared, "validation")[0 : scored + 1]
    found = perplexity(model, tokens, context_length=32, batch_size=4)
    assert found.tokens == scored
    assert found.mean_nll == pytest.approx(loss, rel=1e-12)


def test_bits_per_byte():
    found = Perplexity(mean_nll=math.log(2), tokens=30, context_length=8, stride=8, text_bytes=10)
    assert found.bits_per_byte == pytest.approx(3)
    assert found.perplexity == pytest.approx(2)
    assert Perplexity(mean_nll=1, tokens=3, context_length=8, stride=8).bits_per_byte is None
    assert Perplexity(mean_nll=1e9, tokens=3, context_length=8, stride=8).perplexity == math.inf
    nothing = Perplexity(mean_nll=math.nan, tokens=3, context_length=8, stride=8)
    assert math.isnan(nothing.perplexity)


def test_progress_counts_every_token(model, tokens):
    seen = []
    perplexity(model, tokens, context_length=16, batch_size=4, on_batch=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == len(tokens) - 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context_length": 0}, "context_length"),
        ({"context_length": 8, "stride": 9}, "stride"),
        ({"context_length": 8, "stride": 0}, "stride"),
        ({"context_length": 4096}, "2048 positions"),
    ],
)
def test_bad_windows_are_refused(model, tokens, options, message):
    with pytest.raises(UserError, match=message):
        perplexity(model, tokens, **options)


def test_unknown_token_and_empty_text_are_refused(model):
    with pytest.raises(UserError, match="token 300 is outside the model's vocabulary of 300"):
        perplexity(model, np.array([1, 2, 300]), context_length=8)
    with pytest.raises(UserError, match="1 tokens"):
        perplexity(model, np.array([1]), context_length=8)


def test_evaluate_prepared_data(model_folder, prepared):
    found = evaluate(model_folder, prepared, precision="float32", device="cpu", context_length=32)
    dataset = TokenDataset.open(prepared, "validation")
    assert found.tokens == len(dataset) - 1
    assert found.text_bytes == dataset.manifest.splits["validation"].text_bytes
    assert found.format == "ternary-6:8"
    assert found.precision == "float32"
    flat = found.to_dict()
    assert flat["perplexity"] == found.perplexity
    assert flat["checkpoint"] == str(model_folder)
    assert json.loads(json.dumps(flat)) == flat


def test_first_tokens_only(model_folder, prepared):
    found = evaluate(model_folder, prepared, device="cpu", max_tokens=100, context_length=32)
    assert found.tokens == 100
    assert found.bits_per_byte is None


def test_default_context_is_that_of_the_model(model_folder, prepared):
    assert evaluate(model_folder, prepared, device="cpu").context_length == 2048
