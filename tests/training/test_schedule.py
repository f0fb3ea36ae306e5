# SPDX-License-Identifier: Apache-2.0
"""Learning rate and dense-to-sparse phase, step by step."""

import dataclasses
from itertools import pairwise

import pytest

from sparse_bitnet.errors import UserError
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet.training.schedule import format_of, learning_rate, weight_decay_factor


def rates(config: TrainConfig) -> list[float]:
    return [learning_rate(config, step) for step in range(1, config.steps + 1)]


def test_two_starts_of_the_mask_are_refused():
    gradual = {"format": "ternary-6:8,schedule=gradual"}
    assert format_of(TrainConfig(**gradual)).schedule == "gradual"
    with pytest.raises(UserError, match=r"sparse_fraction=0.5 contradicts schedule=gradual"):
        format_of(TrainConfig(**gradual, sparse_fraction=0.5))
    with pytest.raises(UserError, match=r"schedule until=7.0: must lie in 0..1"):
        format_of(TrainConfig(format="ternary-6:8,schedule=gradual:until=7"))


def test_cosine_rises_to_the_peak_and_falls_to_its_floor():
    config = TrainConfig(steps=100, learning_rate=1.0, warmup_fraction=0.1)
    values = rates(config)
    assert values[:10] == pytest.approx([0.1 * k for k in range(1, 11)])
    assert max(values) == values[9] == 1.0
    assert values[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in pairwise(values[10:]))
    assert learning_rate(TrainConfig(steps=3, warmup_fraction=0.0, learning_rate=1.0), 1) <= 1.0


def test_wsd_holds_the_peak_then_falls_in_a_straight_line():
    config = TrainConfig(
        steps=100, learning_rate=1.0, schedule="wsd", warmup_fraction=0.1, decay_fraction=0.2
    )
    values = rates(config)
    assert set(values[9:80]) == {1.0}
    steps = [a - b for a, b in pairwise(values[79:])]
    assert steps == pytest.approx([0.9 / 20] * 20)
    assert set(rates(dataclasses.replace(config, decay_fraction=0.0))[9:]) == {1.0}
    with pytest.raises(UserError, match="add up to more than 1"):
        dataclasses.replace(config, decay_fraction=0.95)


def test_weight_decay_goes_to_its_end_in_a_straight_line():
    steps = range(1, 12)
    assert {weight_decay_factor(TrainConfig(steps=11), step) for step in steps} == {1.0}
    falling = TrainConfig(steps=11, final_weight_decay_fraction=0.0)
    factors = [weight_decay_factor(falling, step) for step in steps]
    assert factors == pytest.approx([1 - k / 10 for k in range(11)])
