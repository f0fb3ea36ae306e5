"""The folder of one reproduced set: what is committed, and what is only needed to go on.

setting.json      scale, sizes, recipe, text, precision: one folder holds results of one setting
results.jsonl     one line per finished run
curves/NAME.jsonl thinned curves of each run
weights/NAME.json weight statistics of dense runs, at the start, on the way and at the end
downstream.jsonl  one line per model scored on tasks
data/, runs/      prepared text and run folders with checkpoints; not for a repository
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparse_bitnet.errors import UserError
from sparse_bitnet.experiments.results import ResultRow, write_rows
from sparse_bitnet.experiments.scales import Scale
from sparse_bitnet.files import write_atomic
from sparse_bitnet.training.config import TrainConfig

SETTING_VERSION = 1

MAY_CHANGE = ("summary", "search", "patterns", "sparse_percents")
"""What of a setting says which runs are wanted, and nothing about those that are there."""


@dataclass(frozen=True, kw_only=True)
class RunRow(ResultRow):
    """One finished run of a set; its `experiment` is the name of the scale."""

    name: str
    curves: str
    """File of its curves, relative to the results file."""

    weights: str | None
    """File of its weight statistics, dense runs only."""

    near_zero_mass: float
    """P(|W| / mean|W| < 0.5) over all block weights at the end."""

    code_zero_fraction: float
    """Zeros among the ternary codes before the mask; of full-precision weights, as if rounded."""

    epochs: float
    """Training tokens over tokens of the training text."""

    tokens_per_weight: float
    """Training tokens over weights, embedding included."""

    tokens_per_second: float
    """Median over the optimiser steps."""

    device: str
    precision: str
    """Compute type: "bfloat16" or "float32"."""

    @property
    def sparse_percent(self) -> int:
        """Share of sparse steps; 0 for a dense model."""
        dense = self.pattern == "8:8"
        return 0 if dense else round(100 * self.config["sparse_fraction"])


class ResultFolder:
    """Reads and writes the files of one set."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def results(self) -> Path:
        return self.path / "results.jsonl"

    def run(self, name: str) -> Path:
        return self.path / "runs" / name

    def open(self, setting: Mapping[str, Any]) -> None:
        """Make this the folder of a setting, new or continued.

        Raises `UserError` when it holds results of another setting, naming what differs.
        """
        known = self.path / "setting.json"
        wanted = json.loads(json.dumps(setting))
        if known.is_file():
            there = _complete(self.setting()) | {name: wanted[name] for name in MAY_CHANGE}
            if changed := _differences(there, wanted):
                raise UserError(
                    f"{self.path} holds results of another setting ({'; '.join(changed)}); choose "
                    "another --out"
                )
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path / ".gitignore", "/data/\n/runs/\n/.lock\n")
        write_atomic(known, json.dumps(wanted, indent=2) + "\n")

    def setting(self) -> dict[str, Any]:
        """Raises `UserError` when the folder holds no set."""
        path = self.path / "setting.json"
        if not path.is_file():
            raise UserError(f"{self.path} holds no results: it has no setting.json")
        setting = json.loads(path.read_text())
        if setting.get("version") != SETTING_VERSION:
            raise UserError(f"{path}: version {setting.get('version')}, expected {SETTING_VERSION}")
        return setting

    def rows(self) -> list[RunRow]:
        """Every finished run, in the order of finishing. Raises `UserError` for a broken line."""
        if not self.results.is_file():
            return []
        return [
            RunRow.from_json(line, f"{self.results}:{number}")
            for number, line in enumerate(self.results.read_text().splitlines(), 1)
        ]

    def add(self, row: RunRow) -> None:
        """Append one row; a kill leaves the file without it or with all of it."""
        rows = self.rows()
        assert row.name not in [known.name for known in rows]
        write_rows(self.results, [*rows, row])

    def curves(self, row: RunRow) -> list[dict[str, Any]]:
        """Rows of the thinned curves; see `measure.thinned`. Raises `UserError` when missing."""
        return [json.loads(line) for line in self._read(row.curves).splitlines()]

    def weights(self, row: RunRow) -> dict[str, Any]:
        """Weight statistics of a dense run; see `measure.weight_history`."""
        assert row.weights is not None
        return json.loads(self._read(row.weights))

    def downstream(self) -> list[dict[str, Any]]:
        """Task scores of models; see `downstream.py`."""
        path = self.path / "downstream.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def _read(self, relative: str) -> str:
        try:
            return (self.path / relative).read_text()
        except OSError as error:
            raise UserError(f"{self.path / relative}: {error.strerror}") from error

    def write(self, relative: str, text: str) -> None:
        (self.path / relative).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path / relative, text)


def _complete(setting: dict[str, Any]) -> dict[str, Any]:
    """With the defaults of fields of the recipe that did not exist when it was written."""
    defaults = _shared(TrainConfig())
    return {**setting, "recipe": {**defaults, **setting["recipe"]}}


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


def relative_config(config: dict[str, Any], name: str) -> dict[str, Any]:
    """A config as stored in a row: paths relative to the results file, equal on every machine."""
    return {**config, "data": "data", "out": f"runs/{name}"}


def make_setting(
    scale: Scale, data: Mapping[str, Any], device: str, precision: str
) -> dict[str, Any]:
    """Everything that all results of one folder have in common, as JSON.

    Args:
        scale: its numbers; seeds, which may be added later, and workers do not count.
        data: identity of the training and of the validation text.
        device: "cpu" or "cuda".
        precision: resolved compute type.
    """
    values = dataclasses.asdict(scale)
    for name in ("seeds", "workers"):
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
