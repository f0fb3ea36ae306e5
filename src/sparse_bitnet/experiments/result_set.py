"""A set of results as experiments ask for it: rows by model, format, schedule and learning rate."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparse_bitnet.experiments.store import ResultFolder, RunRow


class ResultSet:
    """The finished runs of one folder; all of them share its setting."""

    def __init__(
        self, rows: Sequence[RunRow], setting: Mapping[str, Any], folder: ResultFolder
    ) -> None:
        self.rows, self.setting, self.folder = list(rows), setting, folder

    @classmethod
    def read(cls, path: Path) -> "ResultSet":
        """Raises `UserError` when the folder holds no results."""
        folder = ResultFolder(path)
        return cls(folder.rows(), folder.setting(), folder)

    @property
    def main(self) -> str:
        """The model of all experiments but table 2."""
        return self.setting["main"]

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
        learning_rate: float | None = None,
    ) -> dict[int, RunRow]:
        """Finished runs by seed, ascending.

        Args:
            format: text form of the format; "2:4" and other patterns as written.
            model: by default the main one.
            sparse_percent: of the steps; by default all of them, none of a dense format.
            learning_rate: by default that of the set.
        """
        rate = self.learning_rate if learning_rate is None else learning_rate
        percent = (
            (0 if format.endswith("-8:8") else 100) if sparse_percent is None else sparse_percent
        )
        found = {
            row.seed: row
            for row in self.rows
            if row.format == format
            and row.model == (model or self.main)
            and row.sparse_percent == percent
            and row.config["learning_rate"] == rate
            and row.steps == self.setting["sizes"].get(row.model)
        }
        return dict(sorted(found.items()))

    def relative(self, format: str, *, model: str | None = None) -> dict[int, float]:
        """NormPPL of a format by seed: perplexity over that of its own dense model (paper, 4.2)."""
        dense = self.by_seed(f"{format.partition('-')[0]}-8:8", model=model)
        sparse = self.by_seed(format, model=model)
        return {
            seed: row.perplexity / dense[seed].perplexity
            for seed, row in sparse.items()
            if seed in dense
        }

    def downstream(self) -> list[tuple[RunRow, dict[str, dict[str, float]]]]:
        """Models with their accuracies by task, in the order of scoring.

        Of what was asked for at different times (other tasks, a limit) the newest stands.
        """
        rows = {row.name: row for row in self.rows}
        lines = [line for line in self.folder.downstream() if line["run"] in rows]
        return [
            (rows[line["run"]], line["tasks"])
            for line in lines
            if line["asked"] == lines[-1]["asked"]
        ]
