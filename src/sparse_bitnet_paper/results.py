# SPDX-License-Identifier: Apache-2.0
"""The folder of one set of results: what is committed, and what is only needed to go on.

setting.json      scale, sizes, recipe, text, precision: one folder holds results of one setting
results.jsonl     one line per finished run
curves/NAME.jsonl thinned curves of each run
weights/NAME.json weight statistics of dense runs, at the start, on the way and at the end
downstream.jsonl  one line per model scored on tasks
machines.jsonl    how fast each machine that trained multiplies
data/, runs/      prepared text and run folders with checkpoints; not for a repository
"""

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from sparse_bitnet.checkpoint.model_folder import read_json
from sparse_bitnet.errors import UserError
from sparse_bitnet.files import make_folder, write_atomic
from sparse_bitnet.training.config import as_written_now
from sparse_bitnet_paper.result_row import ResultRow, read_lines, read_rows, write_rows
from sparse_bitnet_paper.scales import DENSE_PATTERN, four_formats
from sparse_bitnet_paper.setting import SETTING, read_setting, setting_changes

MACHINES = "machines.jsonl"
CURVE_POINTS = 100
"""Most points of a thinned curve: 100 runs then fit into a megabyte."""

VARIED = (
    *("learning_rate", "batch_size", "masters", "initial_weights"),
    *("final_learning_rate_fraction", "final_weight_decay_fraction"),
)
"""Fields of the recipe in which runs of one set may differ."""


class Results:
    """One set: its files, and its rows as experiments ask for them."""

    def __init__(self, path: Path) -> None:
        self.path, self.data = path, path / "data"

    @cached_property
    def name(self) -> str:
        """Of its chapter and figures: the scale, or the folder where a page has several sets of it."""
        return self.setting["scale"]

    @cached_property
    def setting(self) -> dict[str, Any]:
        """Raises `UserError` when the folder holds no set."""
        return read_setting(self.path / SETTING)

    @cached_property
    def rows(self) -> list[ResultRow]:
        """Every finished run, in the order of finishing. Raises `UserError` for a broken line."""
        return read_rows(self.path / "results.jsonl")

    @property
    def losses(self) -> dict[str, float]:
        """Of the finished runs by name, as `paper_runs.plan` takes them."""
        return {row.name: row.loss for row in self.rows}

    def check(self, setting: dict[str, Any]) -> None:
        """Raise `UserError` that names what of the folder's setting differs."""
        if changed := setting_changes(self.setting, setting):
            raise UserError(
                f"{self.path} holds results of another setting ({'; '.join(changed)}); choose "
                "another --out"
            )

    def open(self, setting: dict[str, Any]) -> None:
        """Make this the folder of a setting, new or continued. Raises `UserError` as `check` does."""
        known = self.path / SETTING
        if known.is_file():
            self.check(setting)
        make_folder(self.path)
        write_atomic(known, json.dumps(setting, indent=2) + "\n")
        if not (self.path / ".gitignore").exists():
            write_atomic(self.path / ".gitignore", "/data/\n/runs/\n/.lock\n")
        self.setting = setting

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
        make_folder((self.path / relative).parent)
        write_atomic(self.path / relative, text)

    def curves(self, row: ResultRow) -> list[dict[str, Any]]:
        """Rows of the thinned curves; see `measured_run.thinned`. Raises `UserError` when missing."""
        return [line for _, line in read_lines(self.path / row.curves)]

    def weights(self, row: ResultRow) -> dict[str, Any]:
        """Weight statistics of a dense run; see `measured_run.weight_history`."""
        assert row.weights is not None
        path = self.path / row.weights
        return _with_keys(read_json(path), ("overall",), f"{path}")

    def scores(self) -> list[dict[str, Any]]:
        """Lines of downstream.jsonl; see `downstream`."""
        return self._lines("downstream.jsonl", ("run", "asked", "tasks", "questions"))

    @property
    def machines(self) -> list[dict[str, Any]]:
        """Lines of machines.jsonl; see `machine`."""
        keys = ("hardware", "threads", "precision", "operations_per_second")
        return self._lines(MACHINES, keys)

    def product_rate(self, row: ResultRow) -> float | None:
        """Operations a second of large products where and as a run was trained; None if not measured."""
        where = (
            row.provenance.get("hardware"),
            row.config.get("threads") or row.provenance["threads"],
            row.precision,
        )
        for each in self.machines:
            if (each["hardware"], each["threads"], each["precision"]) == where:
                return each["operations_per_second"]
        return None

    def _lines(self, relative: str, keys: Sequence[str]) -> list[dict[str, Any]]:
        path = self.path / relative
        lines = read_lines(path) if path.exists() else ()
        return [_with_keys(line, keys, where) for where, line in lines]

    @property
    def main(self) -> str:
        """The model of the experiments that have one size."""
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

    def learning_rate(self, model: str) -> float:
        """The one that all runs of a size have but those of the search."""
        return self.setting["learning_rates"].get(model, self.setting["recipe"]["learning_rate"])

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
        model = model or self.main
        shared = {"learning_rate": self.learning_rate(model)}
        recipe = as_written_now(self.setting["recipe"]) | shared | changes
        steps = changes.get("steps", self.setting["sizes"].get(model))
        dense = format.endswith(f"-{DENSE_PATTERN}")
        percent = (0 if dense else 100) if sparse_percent is None else sparse_percent
        found = {
            row.seed: row
            for row in self.rows
            if row.variant == format
            and row.model == model
            and row.sparse_percent == percent
            and row.steps == steps
            and all(as_written_now(row.config)[name] == recipe[name] for name in VARIED)
        }
        return dict(sorted(found.items()))

    def by_rate(
        self, format: str, *, model: str | None = None, **changes: Any
    ) -> dict[float, dict[int, ResultRow]]:
        """As `by_seed`, by learning rate: of the rates that seed 0 has."""
        rates = {row.config["learning_rate"] for row in self.rows if row.variant == format}
        found = {
            rate: self.by_seed(format, model=model, learning_rate=rate, **changes)
            for rate in sorted(rates)
        }
        return {rate: rows for rate, rows in found.items() if 0 in rows}

    def at_own_rates(self, model: str) -> dict[str, dict[int, ResultRow]]:
        """Runs of the four models by seed, each at the rate that is best for seed 0; none before all have
        tried two."""
        tried = {format: self.by_rate(format, model=model) for format in self.four_formats}
        if min(map(len, tried.values())) < 2:
            return {}
        shared = self.learning_rate(model)
        return {
            format: by_rate[min(by_rate, key=lambda r: (by_rate[r][0].loss, r != shared))]
            for format, by_rate in tried.items()
        }

    def at_chosen_rate(self, model: str) -> dict[str, dict[int, ResultRow]]:
        """Runs of the four models by seed at the one rate that is best for them together, by the mean of
        seed 0's losses; none before all have tried two."""
        tried = [self.by_rate(format, model=model) for format in self.four_formats]
        rates = sorted(set.intersection(*map(set, tried)))
        if len(rates) < 2:
            return {}
        shared = self.learning_rate(model)
        best = min(rates, key=lambda r: (sum(by_rate[r][0].loss for by_rate in tried), r != shared))
        return {f: by_rate[best] for f, by_rate in zip(self.four_formats, tried, strict=True)}

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


def _with_keys(values: dict[str, Any], keys: Sequence[str], where: str) -> dict[str, Any]:
    if missing := [key for key in keys if key not in values]:
        raise UserError(f"{where}: damaged, it lacks {missing[0]}")
    return values
