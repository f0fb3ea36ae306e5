"""Results as rows, ours and the paper's, and what is derived from them (paper, table 2)."""

import dataclasses
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Self

from sparse_bitnet.errors import UserError
from sparse_bitnet.files import write_atomic

DENSE_PATTERN = "8:8"


@dataclass(frozen=True, kw_only=True)
class ResultRow:
    """One finished run: one line of results.jsonl."""

    experiment: str
    format: str
    """Text form of the SparseBitConfig, for example "ternary-6:8"."""

    seed: int
    model: str
    steps: int
    tokens: int
    """Training tokens."""

    perplexity: float
    """Held-out, exp of `loss`."""

    loss: float
    """Held-out, nats per token."""

    validation_tokens: int
    training_loss: float
    """Of the last step's batch."""

    zero_fraction: float
    """Zeros among the weights that the forward uses."""

    flip_rate: float | None
    """Share of mask positions that changed at the last step; None for a dense model."""

    seconds: float
    """Spent in optimiser steps."""

    checkpoint: str
    """Folder of the trained model, relative to the results file."""

    config: dict[str, Any]
    """The resolved TrainConfig."""

    provenance: dict[str, Any]

    @property
    def weight(self) -> str:
        """ "ternary" or "full"."""
        return self.format.partition("-")[0]

    @property
    def pattern(self) -> str:
        """ "6:8", "8:8" is dense."""
        return self.format.partition("-")[2].partition(",")[0]

    @classmethod
    def from_json(cls, line: str, where: str) -> Self:
        """Raises `UserError`, naming `where`, for a line that is no result row."""
        try:
            return cls(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise UserError(f"{where}: not a result row ({error})") from error


def write_rows(path: Path, rows: Sequence[ResultRow]) -> None:
    """Replace `path` by one JSON line per row."""
    write_atomic(path, "".join(json.dumps(dataclasses.asdict(row)) + "\n" for row in rows))


def read_rows(path: Path) -> list[ResultRow]:
    """Rows of a file; none if it does not exist yet. Raises `UserError` for a broken line."""
    if not path.is_file():
        return []
    return [
        ResultRow.from_json(line, f"{path}:{number}")
        for number, line in enumerate(path.read_text().splitlines(), 1)
    ]


@dataclass(frozen=True)
class Spread:
    """One number per seed."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One of the paper's four models, over all seeds (of the paper's numbers: one)."""

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
    def is_dense(self) -> bool:
        return self.pattern == DENSE_PATTERN


def cells(rows: Sequence[ResultRow], pattern: str) -> list[Cell]:
    """The four models in the paper's order; only seeds of which all four are there count.

    Raises `UserError` when no seed is complete.
    """
    found = {(row.weight, row.pattern, row.seed): row for row in rows}
    seeds = sorted(
        seed
        for seed in {row.seed for row in rows}
        if all((w, p, seed) in found for w in ("full", "ternary") for p in (DENSE_PATTERN, pattern))
    )
    if not seeds:
        raise UserError("no seed has results of all four models; continue the experiment first")
    result = []
    for weight in ("full", "ternary"):
        dense = [found[weight, DENSE_PATTERN, seed] for seed in seeds]
        sparse = [found[weight, pattern, seed] for seed in seeds]
        result.append(_cell(dense, None))
        result.append(_cell(sparse, dense))
    return result


def _cell(rows: Sequence[ResultRow], dense: Sequence[ResultRow] | None) -> Cell:
    flips = [row.flip_rate for row in rows if row.flip_rate is not None]
    perplexity = [row.perplexity for row in rows]
    return Cell(
        weight=rows[0].weight,
        pattern=rows[0].pattern,
        zero_fraction=Spread(tuple(row.zero_fraction for row in rows)),
        flip_rate=Spread(tuple(flips)) if flips and dense else None,
        **_against(perplexity, [row.perplexity for row in dense] if dense else None),
    )


def _against(perplexity: Sequence[float], dense: Sequence[float] | None) -> dict[str, Any]:
    if not dense:
        return {"perplexity": Spread(tuple(perplexity))}
    pairs = list(zip(perplexity, dense, strict=True))
    return {
        "perplexity": Spread(tuple(perplexity)),
        "delta": Spread(tuple(ours - base for ours, base in pairs)),
        "relative": Spread(tuple(100 * (ours / base - 1) for ours, base in pairs)),
    }


def paper_results() -> dict[str, Any]:
    """Every number of the paper's tables that we compare with, by table."""
    return json.loads(files("sparse_bitnet.experiments").joinpath("paper_results.json").read_text())


def paper_cells(pattern: str) -> dict[str, list[Cell]]:
    """The paper's perplexities by model size ("0.5B", "1.5B", "3B"), four cells each.

    6:8 was trained at three sizes; 2:4, 2:8, 3:8, 5:8 and 7:8 at 0.5B. Empty for other patterns.
    """
    results = paper_results()
    if pattern == "6:8":
        table = results["validation_ppl"]
        return {
            size: _paper_cells(
                pattern,
                full=(table["dense_bf16"][i], table["sparse_bf16_6:8"][i]),
                ternary=(table["dense_bitnet"][i], table["sparse_bitnet_6:8"][i]),
            )
            for i, size in enumerate(table["models"])
        }
    sweep = results["nm_sweep_ppl_0.5B"]
    if pattern not in sweep["patterns"]:
        return {}
    dense, sparse = sweep["patterns"].index(DENSE_PATTERN), sweep["patterns"].index(pattern)
    full, ternary = sweep["bf16"], sweep["bitnet"]
    pairs = {"full": (full[dense], full[sparse]), "ternary": (ternary[dense], ternary[sparse])}
    return {"0.5B": _paper_cells(pattern, **pairs)}


def _paper_cells(pattern: str, **pairs: tuple[float, float]) -> list[Cell]:
    return [
        cell
        for weight, (dense, sparse) in pairs.items()
        for cell in (
            Cell(weight=weight, pattern=DENSE_PATTERN, **_against([dense], None)),
            Cell(weight=weight, pattern=pattern, **_against([sparse], [dense])),
        )
    ]
