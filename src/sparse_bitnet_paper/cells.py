# SPDX-License-Identifier: Apache-2.0
"""The paper's four models: our numbers, the paper's own, and what is derived from both (table 2)."""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from statistics import fmean
from typing import Any

from sparse_bitnet_paper.result_row import ResultRow
from sparse_bitnet_paper.results import Results
from sparse_bitnet_paper.scales import DENSE_PATTERN, four_formats
from sparse_bitnet_paper.spread import Spread


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One of the four models, over all seeds (of the paper's numbers: one)."""

    weight: str
    pattern: str
    perplexity: Spread
    zero_fraction: Spread | None = None
    flip_rate: Spread | None = None
    delta: Spread | None = None
    """Perplexity minus that of the dense model of the same format and seed; None if dense."""

    relative: Spread | None = None
    """`delta` in percent of that dense model's perplexity."""

    @property
    def label(self) -> str:
        """See `model_label`."""
        return model_label(self.weight, self.pattern)


def model_label(weight: str, pattern: str) -> str:
    """The name of one of the four models: "full, dense", "ternary, 6:8"."""
    return f"{weight}, {'dense' if pattern == DENSE_PATTERN else pattern}"


def cells(rows: Iterable[ResultRow], pattern: str) -> list[Cell]:
    """The four models in the paper's order, over the seeds that have all four; none without one."""
    found = {(row.variant, row.seed): row for row in rows}
    formats = four_formats(pattern)
    seeds = [
        seed
        for seed in sorted({seed for _, seed in found})
        if all((format, seed) in found for format in formats)
    ]
    result = []
    for format in formats if seeds else ():
        mine = [found[format, seed] for seed in seeds]
        dense = [found[f"{mine[0].weight}-{DENSE_PATTERN}", seed] for seed in seeds]
        shares: dict[str, Any] = {
            "zero_fraction": Spread(tuple(row.zero_fraction for row in mine)),
        }
        flips = [row.flip_rate for row in mine if row.flip_rate is not None]
        if flips and not mine[0].is_dense:
            shares["flip_rate"] = Spread(tuple(flips))
        result.append(
            _cell(format, [row.perplexity for row in mine], [r.perplexity for r in dense], **shares)
        )
    return result


def cells_of(results: Results, model: str) -> list[Cell]:
    """`cells` of one size of a set."""
    rows = (results.by_seed(format, model=model).values() for format in results.four_formats)
    return cells(itertools.chain(*rows), results.setting["pattern"])


def _cell(format: str, ours: Sequence[float], dense: Sequence[float], **shares: Any) -> Cell:
    weight, _, pattern = format.partition("-")
    cell = {"weight": weight, "pattern": pattern, "perplexity": Spread(tuple(ours)), **shares}
    if pattern != DENSE_PATTERN:
        pairs = list(zip(ours, dense, strict=True))
        cell["delta"] = Spread(tuple(mine - base for mine, base in pairs))
        cell["relative"] = Spread(tuple(100 * (mine / base - 1) for mine, base in pairs))
    return Cell(**cell)


@cache
def paper_results() -> dict[str, Any]:
    """Every number of the paper's tables that we compare with, by table."""
    return json.loads(files("sparse_bitnet_paper").joinpath("paper_results.json").read_text())


def paper_sweep() -> dict[str, dict[str, float]]:
    """By weight format and pattern the perplexity of the paper's 0.5B models."""
    table = paper_results()["nm_sweep_ppl_0.5B"]
    return {
        weight: dict(zip(table["patterns"], table[name], strict=True))
        for weight, name in (("full", "bf16"), ("ternary", "bitnet"))
    }


def paper_gains(phase: str) -> tuple[str, dict[int, float]]:
    """Of "prefill" or "decode" the GPU of the paper's table 3, and by prompt length or batch the speed of
    6:8 over that of dense; of another phase nothing."""
    for name, found in paper_results()["throughput_qwen2.5_3B_tokens_per_second"].items():
        if name.startswith(f"{phase}_"):
            sizes, dense, sparse = found.values()
            pairs = zip(sparse, dense, strict=True)
            gains = dict(zip(sizes, (ours / base for ours, base in pairs), strict=True))
            return name.partition("_")[2], gains
    return "", {}


def paper_cells(pattern: str) -> dict[str, list[Cell]]:
    """The paper's perplexities by model size ("0.5B", "1.5B", "3B"), four cells each.

    6:8 was trained at three sizes; 2:4, 2:8, 3:8, 5:8 and 7:8 at 0.5B. Empty for other patterns.
    """
    if pattern == "6:8":
        table = paper_results()["validation_ppl"]
        names = ("dense_bf16", "sparse_bf16_6:8", "dense_bitnet", "sparse_bitnet_6:8")
        return {
            size: _paper_column(pattern, [table[name][i] for name in names])
            for i, size in enumerate(table["models"])
        }
    sweep = paper_sweep()
    if pattern not in sweep["full"]:
        return {}
    values = [sweep[weight][p] for weight in sweep for p in (DENSE_PATTERN, pattern)]
    return {"0.5B": _paper_column(pattern, values)}


def _paper_column(pattern: str, values: Sequence[float]) -> list[Cell]:
    return [
        _cell(format, [value], [values[index - index % 2]])
        for index, (format, value) in enumerate(zip(four_formats(pattern), values, strict=True))
    ]


def paper_accuracies(tasks: Iterable[str]) -> dict[str, list[float]]:
    """By size the paper's average accuracy on those of its tasks, of its four models in percent."""
    table = paper_results()["downstream_accuracy_percent"]
    places = [table["tasks"].index(task) for task in tasks if task in table["tasks"]]
    sizes = [name for name in table if name.endswith("B")] if places else []
    return {
        size: [fmean(model[place] for place in places) for model in table[size].values()]
        for size in sizes
    }


def average_accuracy(scores: Mapping[str, Mapping[str, float]]) -> float:
    """Of all tasks, in percent: the paper's average."""
    return 100 * sum(values["acc"] for values in scores.values()) / len(scores)
