# SPDX-License-Identifier: Apache-2.0
"""The paper's own numbers, for comparison with ours."""

import tomllib
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from statistics import fmean
from typing import Any

import pandas as pd


@cache
def paper() -> dict[str, Any]:
    """Return the paper's numbers: the content of paper.toml."""
    text = files("sparse_bitnet_paper").joinpath("paper.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def paper_perplexities(pattern: str) -> dict[str, pd.DataFrame]:
    """Return by model size ("0.5B") the perplexities of the paper's models, one column per format.

    The paper has 6:8 at three sizes and the patterns of its sweep at 0.5B; empty for other patterns.
    """
    sweep, models = paper()["sweep"], paper()["perplexity"] if pattern == "6:8" else {}
    if pattern in sweep["full"] and pattern != "6:8":
        models = {"0.5B": {f"{w}-{p}": sweep[w][p] for w in sweep for p in ("8:8", pattern)}}
    return {size: pd.DataFrame([own]) for size, own in models.items()}


def paper_gains(phase: str) -> dict[int, float]:
    """Return how much faster 6:8 is than dense at 3B by prompt length ("prefill") or batch ("decode").

    Empty for another phase.
    """
    theirs = paper()["throughput"].get(phase, {"sizes": [], "dense": [], "6:8": []})
    columns = zip(theirs["sizes"], theirs["6:8"], theirs["dense"], strict=True)
    return {size: sparse / dense for size, sparse, dense in columns}


def paper_accuracies(tasks: Iterable[str]) -> dict[str, dict[str, float]]:
    """Return by size and format the paper's average accuracy, in percent, on these tasks; nothing
    if one is not the paper's."""
    accuracy = paper()["accuracy"]
    known = {*tasks}
    is_papers = known and known <= accuracy["0.5B"]["full-8:8"].keys()
    return {
        size: {format: fmean(values[task] for task in known) for format, values in models.items()}
        for size, models in (accuracy.items() if is_papers else ())
    }
