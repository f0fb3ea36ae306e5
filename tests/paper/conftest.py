# SPDX-License-Identifier: Apache-2.0
"""Made-up results of finished experiments."""

import pytest

from sparse_bitnet_paper.result_row import ResultRow


def result_row(format="ternary-6:8", seed=0, perplexity=38.0, **changes):
    dense = format.endswith("8:8")
    values = {
        "experiment": "quickstart",
        "format": format,
        "seed": seed,
        "model": "qwen2.5-1m",
        "steps": 10,
        "tokens": 2560,
        "perplexity": perplexity,
        "loss": 3.6,
        "validation_tokens": 100,
        "training_loss": 3.5,
        "zero_fraction": {"full-8:8": 0.0, "full-6:8": 0.25}.get(format, 0.4),
        "flip_rate": None if dense else 0.00123,
        "seconds": 1.5,
        "checkpoint": f"runs/seed-{seed}/{format.replace(':', 'of')}/final",
        "config": {"steps": 10},
        "provenance": {
            "commit": "abc",
            "hardware": "a processor, 2 cores",
            "threads": 2,
            "versions": {"python": "3.11"},
            "date": "2026-01-02T03:04:05+00:00",
        },
    }
    return ResultRow(**values | changes)


def result_rows(seeds=1):
    perplexities = {"full-8:8": 35.0, "full-6:8": 36.4, "ternary-8:8": 40.0, "ternary-6:8": 39.8}
    return [
        result_row(format, seed, perplexity + seed * (1 if format.endswith("8:8") else 1.5))
        for seed in range(seeds)
        for format, perplexity in perplexities.items()
    ]


@pytest.fixture
def make_row():
    """One row, by default of the sparse ternary model; fields by name."""
    return result_row


@pytest.fixture
def make_rows():
    """The four models' rows of so many seeds."""
    return result_rows
