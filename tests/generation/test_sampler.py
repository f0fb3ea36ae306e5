# SPDX-License-Identifier: Apache-2.0
"""Sampling has transformers' definitions, and draws that depend on seed and place alone."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig, GenerationMixin

from sparse_bitnet.errors import UserError
from sparse_bitnet.generation.sampling import Sampler, candidates, uniform
from sparse_bitnet.generation.sampling_options import SamplingOptions


class Processors(GenerationMixin):
    """The processors that transformers' `generate` applies, in its order."""

    config = SimpleNamespace(is_encoder_decoder=False)

    def of(self, options):
        chosen = GenerationConfig(
            do_sample=True,
            temperature=float(options.temperature),
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            repetition_penalty=float(options.repetition_penalty),
        )
        return self._get_logits_processor(chosen, input_ids_seq_length=1)


def theirs(logits, seen, options):
    """Return the logits that transformers' `generate` samples from, float32 [vocab_size] with -inf."""
    ids = torch.tensor([seen], dtype=torch.long)
    return Processors().of(options)(ids, torch.from_numpy(logits.copy())[None])[0].numpy()


def ours(logits, seen, options):
    kept = candidates(logits, seen, options)
    assert np.all(np.diff(kept.tokens) > 0)
    scores = np.full_like(logits, -np.inf)
    scores[kept.tokens] = kept.scores
    return scores


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([5, 700, 9000]),
    st.one_of(st.floats(0.05, 3), st.sampled_from([1e-4, 1.0, 100.0])),
    st.sampled_from([0, 1, 5, 40, 20000]),
    st.sampled_from([0.0, 1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
    st.sampled_from([0.0, 1e-9, 0.02, 0.3, 1.0]),
    st.sampled_from([0.01, 0.7, 1.0, 1.3, 100.0]),
    st.sampled_from([0.0, 0.3, 0.95]),
    st.sampled_from([0.0, 0.5]),
)
def test_candidates_and_probabilities_are_those_of_transformers(
    seed, vocab_size, temperature, top_k, top_p, min_p, penalty, forbidden, step
):
    random = np.random.default_rng(seed)
    logits = random.normal(scale=3, size=vocab_size).astype(np.float32)
    if (
        step and top_p == 1
    ):  # of equally likely tokens, transformers' top-p keeps whichever sort put last
        logits = np.round(logits / step).astype(np.float32) * np.float32(step)
    logits[random.random(vocab_size) < forbidden] = -np.inf
    logits[random.integers(vocab_size)] = 1
    seen = random.integers(0, vocab_size, 6).tolist()
    options = SamplingOptions(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty
    )
    np.testing.assert_array_equal(ours(logits, seen, options), theirs(logits, seen, options))


def test_equally_likely_tokens_stay_as_in_transformers():
    logits = np.repeat(np.array([2, 1, 0, -1], np.float32), 3)
    for top_k in (1, 2, 4, 7):
        options = SamplingOptions(top_k=top_k)
        np.testing.assert_array_equal(ours(logits, [], options), theirs(logits, [], options))
    flat = np.zeros(3000, np.float32)
    for top_p in (0.0, 0.25, 0.7):
        kept = candidates(flat, [], SamplingOptions(top_p=top_p))
        assert len(kept.tokens) == max(1, round(3000 * top_p))


def test_temperature_0_is_the_most_likely_token_after_the_penalty():
    logits = np.array([1.0, 3.0, 2.5, -1.0], np.float32)
    greedy = SamplingOptions(temperature=0)
    assert greedy.is_greedy
    assert SamplingOptions(temperature=1e-300).is_greedy
    assert not SamplingOptions(temperature=1e-4).is_greedy
    assert Sampler(greedy, [1]).draw(logits) == 1
    penalised = SamplingOptions(temperature=0, repetition_penalty=1.5)
    sampler = Sampler(penalised, [1])
    assert [sampler.draw(logits) for _ in range(3)] == [2, 1, 1]
    assert logits.tolist() == [1.0, 3.0, 2.5, -1.0]


def test_penalties_and_bias_change_the_logits():
    logits = np.array([1.0, 3.0, 2.5, -1.0], np.float32)

    def drawn(count, **options):
        sampler = Sampler(SamplingOptions(temperature=0, **options), [1, 1, 1])
        return [sampler.draw(logits) for _ in range(count)]

    assert drawn(3, presence_penalty=1) == [1, 2, 1]
    assert drawn(6, frequency_penalty=1) == [1, 2, 1, 2, 0, 1]
    assert drawn(3, presence_penalty=-2) == [1, 1, 1]
    assert drawn(2, logit_bias=((3, 4.5), (900, 100.0))) == [3, 3]
    options = SamplingOptions(repetition_penalty=2, presence_penalty=0.5, logit_bias=((0, 1.0),))
    kept = candidates(logits, [0], options, {0: 2})
    assert kept.scores.tolist() == [(1 + 1) / 2 - 0.5, 3.0, 2.5, -1.0]
    assert logits.tolist() == [1.0, 3.0, 2.5, -1.0]


def test_draws_follow_the_probabilities():
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
    sampler = Sampler(SamplingOptions(seed=3), [])
    counts = np.bincount([sampler.draw(logits) for _ in range(4000)], minlength=4)
    np.testing.assert_allclose(counts / 4000, [0.5, 0.25, 0.125, 0.125], atol=0.03)


def test_tokens_without_probability_are_not_drawn():
    """Not even where a block's float32 sum is above its float64 sum, as at this seed's 919th draw."""
    logits = np.random.default_rng(1).standard_normal(300).astype(np.float32) * 4
    logits[100:] = -np.inf
    sampler = Sampler(SamplingOptions(seed=40153), [])
    assert max(sampler.draw(logits) for _ in range(919)) < 100


def test_draws_depend_on_seed_and_place_only():
    random = np.random.default_rng(0)
    rows = random.normal(size=(20, 50)).astype(np.float32)

    def text(seed, between=lambda: None):
        sampler = Sampler(SamplingOptions(seed=seed), [1, 2])
        return [(between(), sampler.draw(row))[1] for row in rows]

    other = Sampler(SamplingOptions(seed=9), [])
    assert text(1) == text(1) == text(1, lambda: other.draw(rows[0])) != text(2)
    # Fixed numbers: a seed gives the same text with every version.
    assert [uniform(seed, place) for seed, place in [(0, 0), (1, 0), (2**64 - 1, 7)]] == [
        0.011546754286331562,
        0.3035680343067586,
        0.6865660636114761,
    ]


OUTSIDE = {
    "temperature": [-1, 100.1, np.nan],
    "repetition_penalty": [0, 1e-300, 1e300, np.inf],
    **{"frequency_penalty": [-2.1], "top_p": [np.nan, 1.1], "top_k": [-1], "min_p": [-0.1]},
    "seed": [-1, 2**64],
}


@pytest.mark.parametrize(("name", "value"), [(k, v) for k, each in OUTSIDE.items() for v in each])
def test_options_outside_their_range_are_named(name, value):
    with pytest.raises(UserError, match=f"^{name}=.*must be"):
        SamplingOptions(**{name: value})


@pytest.mark.parametrize("others", [0.0, -np.inf])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_numbers_are_refused(bad, others):
    logits = np.array([others, bad, others], np.float32)
    if bad == -np.inf and others == 0:
        assert Sampler(SamplingOptions(), []).draw(logits) in (0, 2)
        return
    for options in (SamplingOptions(), SamplingOptions(temperature=0), SamplingOptions(top_p=0.5)):
        with pytest.raises(UserError, match="weights are damaged"):
            Sampler(options, []).draw(logits)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 5e-324},
        {"temperature": 1e-300},
        {"temperature": 1e-4},
        {"temperature": 100},
        {"temperature": 1e-4, "top_p": 5e-324, "min_p": 1},
        {"temperature": 1e-4, "repetition_penalty": 100, "top_k": 2**63 - 1},
        {"repetition_penalty": 0.01, "top_p": 1 - 2**-53, "min_p": 5e-324},
    ],
)
def test_extreme_options_give_finite_numbers(changes):
    """Also for the largest logits that the greatest penalty leaves finite."""
    options = SamplingOptions(**changes)
    for scale in (1, 3e36, 1e-45):
        logits = np.array([-1, 1, -np.inf, 0.5, 0, 1], np.float32) * np.float32(scale)
        logits[2] = -np.inf
        kept = candidates(logits, [0, 1, 3], options)
        assert len(kept.tokens)
        assert not np.isnan(kept.scores).any()
        assert np.isfinite(kept.scores.max())
        sampler = Sampler(options, [0, 1, 3, 999])
        assert all(sampler.draw(logits) != 2 for _ in range(20))
