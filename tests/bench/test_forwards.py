# SPDX-License-Identifier: Apache-2.0
"""benchmarks/forwards.py: curves, their distances, and what they decide."""

from types import ModuleType

import pytest

from benchmark_scripts import load_script


@pytest.fixture(scope="module")
def forwards() -> ModuleType:
    return load_script("forwards")


def test_curves_are_means_of_equal_parts(forwards):
    assert forwards.curve([1.0, 3.0, 5.0, 7.0, 100.0], windows=2) == [2.0, 6.0]
    assert forwards.distance([1.0, 2.0], [4.0, 6.0]) == pytest.approx(12.5**0.5)


@pytest.mark.parametrize(
    ("shifts", "finals", "agree"),
    [
        ((0.0, 0.0, 0.0), (0.0, 0.0, 0.0), True),
        ((0.05, -0.04, 0.01), (0.03, -0.05, 0.0), True),
        ((0.05, 0.05, 0.051), (0.03, -0.05, 0.0), False),
        ((0.05, -0.04, 0.01), (-0.05, -0.05, -0.051), False),
    ],
)
def test_the_noise_between_seeds_is_the_measure(forwards, shifts, finals, agree):
    """Seeds lie 0.1 apart, in curve and validation loss; the int8 forward by what is given."""
    runs = {}
    for seed, (shift, final) in enumerate(zip(shifts, finals, strict=True)):
        curve = [5 + 0.1 * seed, 4 + 0.1 * seed]
        runs["fake", seed] = {"curve": curve, "validation_loss": 4.0 + 0.1 * seed}
        shifted = {"curve": [x + shift for x in curve], "validation_loss": 4.0 + 0.1 * seed + final}
        runs["int8", seed] = shifted
    found = forwards.compare(runs)
    assert found["curve_distance_of_forwards"] == pytest.approx(sum(map(abs, shifts)) / 3)
    assert found["training_difference"] == pytest.approx(sum(shifts) / 3)
    assert found["validation_difference"] == pytest.approx(sum(finals) / 3)
    assert found["validation_deviation_of_seeds"] == pytest.approx(0.1)
    assert (found["seeds"], found["agree"]) == (3, agree)
