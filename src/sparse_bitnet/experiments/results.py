# SPDX-License-Identifier: Apache-2.0
"""The folder of one set of results: what is committed, and what is only needed to go on.

setting.json      scale, sizes, recipe, text, precision: one folder holds results of one setting
results.jsonl     one line per finished run
curves/NAME.jsonl thinned curves of each run
weights/NAME.json weight statistics of dense runs, at the start, on the way and at the end
downstream.jsonl  one line per model scored on tasks
data/, runs/      prepared text and run folders with checkpoints; not for a repository
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sparse_bitnet.errors import UserError
from sparse_bitnet.experiments.scales import DENSE_PATTERN, Scale, four_formats
from sparse_bitnet.files import write_atomic
from sparse_bitnet.training.config import TrainConfig, as_written_now

SETTING_VERSION = 1

CURVE_POINTS = 100
"""Most points of a thinned curve: 100 runs then fit into a megabyte."""

VARIED = (
    "learning_rate",
    "batch_size",
    "final_learning_rate_fraction",
    "final_weight_decay_fraction",
    "masters",
    "initial_weights",
)
"""Fields of the recipe in which runs of one set may differ."""

MAY_CHANGE = ("summary", "search", "wider", "patterns", "sparse_percents")
"""What of a setting says which runs are wanted, and nothing about those that are there."""

ADDED_LATER: dict[str, Any] = {"pattern": "6:8", "dense_layers": []}
"""Of settings; those written before have these."""


@dataclass(frozen=True, kw_only=True)
class ResultRow:
    """One finished run: one line of results.jsonl. Rows of old lack fields with a default."""

    experiment: str
    """Name of the scale."""

    format: str
    """Text form of the SparseBitConfig, for example "ternary-6:8"."""

    seed: int
    model: str
    steps: int
    tokens: int
    """Training tokens."""

    perplexity: float
    """Of the whole held-out text, exp of `loss`."""

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

    name: str = ""
    curves: str = ""
    """File of its curves, relative to the results file."""

    weights: str | None = None
    """File of its weight statistics, dense runs only."""

    near_zero_mass: float = 0.0
    """P(|W| / mean|W| < 0.5) over all block weights at the end."""

    code_zero_fraction: float = 0.0
    """Zeros among the ternary codes before the mask; of full-precision weights, as if rounded."""

    epochs: float = 0.0
    """Training tokens over tokens of the training text."""

    tokens_per_weight: float = 0.0
    """Training tokens over weights, embedding included."""

    tokens_per_second: float = 0.0
    """Median over the optimiser steps."""

    other_text: dict[str, Any] | None = None
    """Perplexity of another text: its name, tokens and perplexity."""

    device: str = "cpu"
    precision: str = ""
    """Compute type: "bfloat16" or "float32"."""

    @property
    def variant(self) -> str:
        """The format without its dense layers, which all runs of a set share."""
        return self.format.partition(",dense_layers=")[0]

    @property
    def weight(self) -> str:
        """ "ternary" or "full"."""
        return self.format.partition("-")[0]

    @property
    def pattern(self) -> str:
        """ "6:8", "8:8" is dense."""
        return self.format.partition("-")[2].partition(",")[0]

    @property
    def is_dense(self) -> bool:
        """Whether nothing is pruned."""
        return self.pattern == DENSE_PATTERN

    @property
    def sparse_percent(self) -> int:
        """Share of sparse steps; 0 for a dense model."""
        return 0 if self.is_dense else round(100 * self.config["sparse_fraction"])


def read_rows(path: Path) -> list[ResultRow]:
    """Rows of a file; none if it does not exist yet. Raises `UserError` for a broken line."""
    rows = []
    for number, line in enumerate(path.read_text().splitlines() if path.is_file() else (), 1):
        try:
            rows.append(ResultRow(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise UserError(f"{path}:{number}: not a result row ({error})") from error
    return rows


def write_rows(path: Path, rows: Sequence[ResultRow]) -> None:
    """Replace `path` by one JSON line per row."""
    write_atomic(path, "".join(json.dumps(dataclasses.asdict(row)) + "\n" for row in rows))


class Results:
    """One set: its files, and its rows as experiments ask for them."""

    def __init__(self, path: Path) -> None:
        self.path, self.data = path, path / "data"

    @cached_property
    def setting(self) -> dict[str, Any]:
        """Raises `UserError` when the folder holds no set."""
        path = self.path / "setting.json"
        if not path.is_file():
            raise UserError(f"{self.path} holds no results: it has no setting.json")
        setting = ADDED_LATER | json.loads(path.read_text())
        if setting.get("version") != SETTING_VERSION:
            raise UserError(f"{path}: version {setting.get('version')}, expected {SETTING_VERSION}")
        return setting

    @cached_property
    def rows(self) -> list[ResultRow]:
        """Every finished run, in the order of finishing. Raises `UserError` for a broken line."""
        return read_rows(self.path / "results.jsonl")

    def open(self, setting: Mapping[str, Any]) -> None:
        """Make this the folder of a setting, new or continued.

        Raises `UserError` when it holds results of another setting, naming what differs.
        """
        known = self.path / "setting.json"
        wanted = json.loads(json.dumps(setting))
        if known.is_file():
            there = self.setting | {name: wanted[name] for name in MAY_CHANGE}
            # Fields of the recipe that did not exist when it was written have their defaults.
            there["recipe"] = _shared(TrainConfig()) | as_written_now(there["recipe"])
            if changed := _differences(there, wanted):
                raise UserError(
                    f"{self.path} holds results of another setting ({'; '.join(changed)}); choose "
                    "another --out"
                )
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path / ".gitignore", "/data/\n/runs/\n/.lock\n")
        write_atomic(known, json.dumps(wanted, indent=2) + "\n")
        self.setting = wanted

    def run(self, name: str) -> Path:
        """Folder of a run."""
        return self.path / "runs" / name

    def add(self, row: ResultRow) -> None:
        """Append one row; a kill leaves the file without it or with all of it."""
        assert row.name not in [known.name for known in self.rows]
        self.rows.append(row)
        write_rows(self.path / "results.jsonl", self.rows)

    def write(self, relative: str, text: str) -> None:
        """Write one of the set's other files."""
        (self.path / relative).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path / relative, text)

    def curves(self, row: ResultRow) -> list[dict[str, Any]]:
        """Rows of the thinned curves; see `measure.thinned`. Raises `UserError` when missing."""
        return [json.loads(line) for line in self._read(row.curves).splitlines()]

    def weights(self, row: ResultRow) -> dict[str, Any]:
        """Weight statistics of a dense run; see `measure.weight_history`."""
        assert row.weights is not None
        return json.loads(self._read(row.weights))

    def scores(self) -> list[dict[str, Any]]:
        """Lines of downstream.jsonl; see `downstream`."""
        path = self.path / "downstream.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def _read(self, relative: str) -> str:
        try:
            return (self.path / relative).read_text()
        except OSError as error:
            raise UserError(f"{self.path / relative}: {error.strerror}") from error

    @property
    def main(self) -> str:
        """The model of all experiments but table 2."""
        return self.setting["main"]

    @property
    def four_formats(self) -> tuple[str, ...]:
        """Those of table 2."""
        return four_formats(self.setting["pattern"])

    @property
    def models(self) -> list[str]:
        """Sizes of table 2 of which there are results, small to large."""
        trained = {row.model for row in self.rows}
        return [model for model in self.setting["sizes"] if model in trained]

    @property
    def learning_rate(self) -> float:
        """The one that all runs but those of the search have."""
        return self.setting["recipe"]["learning_rate"]

    def by_seed(
        self,
        format: str,
        *,
        model: str | None = None,
        sparse_percent: int | None = None,
        **changes: Any,
    ) -> dict[int, ResultRow]:
        """Finished runs by seed, ascending.

        Args:
            format: text form of the format; "2:4" and other patterns as written.
            model: by default the main one.
            sparse_percent: of the steps; by default all of them, none of a dense format.
            changes: fields in which the runs' recipe is not that of the set.
        """
        recipe = as_written_now(self.setting["recipe"]) | changes
        steps = changes.get("steps", self.setting["sizes"].get(model or self.main))
        dense = format.endswith(f"-{DENSE_PATTERN}")
        percent = (0 if dense else 100) if sparse_percent is None else sparse_percent
        found = {
            row.seed: row
            for row in self.rows
            if row.variant == format
            and row.model == (model or self.main)
            and row.sparse_percent == percent
            and row.steps == steps
            and all(as_written_now(row.config)[name] == recipe[name] for name in VARIED)
        }
        return dict(sorted(found.items()))

    def relative(self, format: str, *, model: str | None = None) -> dict[int, float]:
        """NormPPL of a format by seed: perplexity over that of its own dense model (paper, 4.2)."""
        dense = self.by_seed(f"{format.partition('-')[0]}-{DENSE_PATTERN}", model=model)
        sparse = self.by_seed(format, model=model)
        return {
            seed: row.perplexity / dense[seed].perplexity
            for seed, row in sparse.items()
            if seed in dense
        }

    def downstream(self) -> list[tuple[ResultRow, dict[str, dict[str, float]]]]:
        """Models with their accuracies by task, in the order of scoring.

        Of what was asked for at different times (other tasks, a limit) the newest stands.
        """
        rows = {row.name: row for row in self.rows}
        lines = [line for line in self.scores() if line["run"] in rows]
        return [
            (rows[line["run"]], line["tasks"])
            for line in lines
            if line["asked"] == lines[-1]["asked"]
        ]


def make_setting(
    scale: Scale, data: Mapping[str, Any], device: str, precision: str
) -> dict[str, Any]:
    """Everything that all results of one folder have in common, as JSON.

    Args:
        scale: its numbers; seeds, which may be added later, names and workers do not count.
        data: identity of the training and of the validation text.
        device: "cpu" or "cuda".
        precision: resolved compute type.
    """
    values = dataclasses.asdict(scale)
    for name in ("seeds", "workers", "size_by_size", "plain_names", "needs_gpu"):
        del values[name]
    values["sizes"] = {size["model"]: size["steps"] for size in values["sizes"]}
    return {
        "version": SETTING_VERSION,
        "scale": values.pop("name"),
        **values,
        "recipe": _shared(scale.recipe),
        "data": data,
        "device": device,
        "precision": precision,
    }


def _shared(recipe: TrainConfig) -> dict[str, Any]:
    """The fields of a recipe that a scale's runs have in common."""
    own = ("data", "out", "model", "format", "seed", "data_seed", "steps", "sparse_fraction")
    return {name: value for name, value in dataclasses.asdict(recipe).items() if name not in own}


def _differences(old: Any, new: Any, where: str = "") -> list[str]:
    """Leaves that differ between two JSON values, as "a.b old -> new"."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for key in sorted(old.keys() | new.keys()):
            found += _differences(old.get(key), new.get(key), f"{where}.{key}" if where else key)
        return found
    return [] if old == new else [f"{where} {json.dumps(old)} -> {json.dumps(new)}"]
