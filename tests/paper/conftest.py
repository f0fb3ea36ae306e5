# SPDX-License-Identifier: Apache-2.0
"""Sets of made-up results."""

import gzip

import pytest

from made_up_results import NOISE, SCALE, WEIGHTS, flip_curve, paper_perplexity, row_of
from sparse_bitnet_paper.results import DETAILS, ROWS, Results, json_lines, make_setting
from sparse_bitnet_paper.runs import EXPERIMENTS, plan


@pytest.fixture
def make_set(tmp_path):
    """A set of results with a perplexity for each config, a little different by seed.

    `change` edits rows before they are written; `left_out` formats have none.
    """

    def make(
        perplexity=paper_perplexity,
        *,
        seeds=3,
        names=tuple(EXPERIMENTS),
        scale=SCALE,
        left_out=(),
        change=lambda row: row,
        folder=tmp_path / "set",
    ):
        results = Results(folder)
        text = {"train": {"tokens": 9, "vocab_size": 9}, "validation": {"tokens": 9}}
        results.open(make_setting(scale, text))
        rows, details = [], []
        for run in plan(scale, names, seeds):
            if run.config.format not in left_out:
                value = perplexity(run.config) * (1 + NOISE[run.config.seed])
                rows.append(change(row_of(run, value)))
                curves = list(flip_curve(run.config.format))
                weights = WEIGHTS if run.is_dense else None
                details.append({"run": run.name, "curves": curves, "weights": weights})
        (folder / ROWS).write_text(json_lines(rows))
        (folder / DETAILS).write_bytes(gzip.compress(json_lines(details).encode()))
        return results

    return make
