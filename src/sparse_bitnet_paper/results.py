# SPDX-License-Identifier: Apache-2.0
"""The folder of one set of results: its files, and its rows as one DataFrame.

setting.json      settings that all runs share: scale, sizes, recipe, text, precision
results.jsonl     one line per finished run; see `COLUMNS`
details.jsonl.gz  one line per finished run: its thinned curves, and a dense one's weights over training
downstream.jsonl  one line per model scored on tasks; see `reproduce.score`
notes.md          interpretation of the results, by hand
data/, runs/      prepared text, and run folders with checkpoints; not for a repository
"""

import dataclasses
import gzip
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from sparse_bitnet.checkpoint.model_folder import read_json
from sparse_bitnet.errors import UserError, library_errors_as, os_errors_as
from sparse_bitnet.files import make_folder, write_atomic
from sparse_bitnet_paper.scales import DENSE_PATTERN, Scale, four_formats

SETTING, ROWS, DETAILS = "setting.json", "results.jsonl", "details.jsonl.gz"
DOWNSTREAM = "downstream.jsonl"

COLUMNS = {
    "name": "of its folder and its details",
    "model": "preset",
    "format": 'text form of the SparseBitConfig, for example "ternary-6:8"',
    "seed": "of weights and batches",
    "recipe": 'how the recipe differs from that of the set, in words; "" where only the rate may',
    "steps": "optimiser steps",
    "tokens": "training tokens",
    "epochs": "training tokens over tokens of the training text",
    "tokens_per_weight": "training tokens over weights, embedding included",
    "perplexity": "of the whole held-out text, exp of `loss`",
    "loss": "held-out, nats per token",
    "validation_tokens": "of the held-out text",
    "other_text": "name, tokens and perplexity of another held-out text, or None",
    "training_loss": "of the last step's batch",
    "zero_fraction": "zeros among the weights that the forward uses",
    "code_zero_fraction": "zeros among the codes before the mask; full precision as if rounded",
    "near_zero_start": "P(|W| / mean|W| < 0.5) of all block weights of the initial model; of dense runs",
    "near_zero_mass": "the same at the end",
    "flip_rate": "share of mask positions that changed at the last step; None of a dense model",
    "seconds": "spent in optimiser steps",
    "tokens_per_second": "median over the optimiser steps",
    "product_share": "operations a second over those of large products, in finished sets; else None",
    "device": '"cpu" or "cuda"',
    "precision": 'compute type: "bfloat16" or "float32"',
    "checkpoint": "folder of the trained model, relative to the results file",
    "config": "the resolved TrainConfig",
    "provenance": "commit, hardware, threads, versions and date",
}
"""Fields of a line of results.jsonl, which describes a finished run."""

CURVE_COLUMNS = ("run", "step", "loss", "flip_rate", "flip_noise", "validation_loss")
CURVE_POINTS = 100
"""Most points of a thinned curve: 100 runs then fit into a megabyte."""

Measured = tuple[dict[str, Any], dict[str, Any]]
"""A finished run: its row by `COLUMNS`, and its details."""

_WHICH_RUNS = ("name", "seeds", "workers", "needs_gpu")
_OF_ONE_RUN = ("data", "out", "model", "format", "seed", "data_seed", "steps", "sparse_fraction")


class Results:
    """One set of results: its files, and its rows as a DataFrame."""

    def __init__(self, path: Path) -> None:
        self.path, self.data = path, path / "data"
        self.name = path.resolve().name

    @cached_property
    def setting(self) -> dict[str, Any]:
        """Settings of all runs. Raises `UserError` when the folder holds no set, or a damaged one."""
        path = self.path / SETTING
        if not path.is_file():
            raise UserError(f"{self.path} was not written by `reproduce`: it has no {SETTING}")
        setting = read_json(path)
        _check_keys(setting, ("data", "main", "patterns", "recipe", "scale", "sizes", "text"), path)
        return setting

    @cached_property
    def rows(self) -> pd.DataFrame:
        """Every finished run, in the order of finishing. Raises `UserError` for a broken line."""
        return read_rows(self.path / ROWS)

    @cached_property
    def details(self) -> dict[str, dict[str, Any]]:
        """Curves and weights of each run by name; see `record`. Raises `UserError` for a damaged file."""
        lines = read_lines(self.path / DETAILS, ("run", "curves", "weights"))
        details = {line.pop("run"): line for line in lines}
        if lost := set(self.rows.name) - details.keys():
            raise UserError(f"{self.path / DETAILS} lacks {min(lost)}: bring the file back")
        return details

    @cached_property
    def curves(self) -> pd.DataFrame:
        """Thinned curves of all runs: `CURVE_COLUMNS`."""
        own = [pd.DataFrame(each["curves"]).assign(run=run) for run, each in self.details.items()]
        joined = pd.concat(own, ignore_index=True) if own else pd.DataFrame()
        return joined.reindex(columns=list(CURVE_COLUMNS))

    @property
    def scores(self) -> list[dict[str, Any]]:
        """Lines of downstream.jsonl: accuracies and numbers of questions by task."""
        return read_lines(self.path / DOWNSTREAM, ("run", "asked", "tasks", "questions"))

    def check(self, setting: dict[str, Any]) -> None:
        """Raise `UserError` that names the differences if the folder has another setting."""
        # Flatten nested JSON to one value for each dotted path.
        old, new = (pd.json_normalize(each).iloc[0].to_dict() for each in (self.setting, setting))
        changed = [
            f"{name} {json.dumps(old.get(name))} -> {json.dumps(new.get(name))}"
            for name in sorted((old.keys() | new.keys()) - {"summary"})
            if old.get(name) != new.get(name)
        ]
        if changed:
            raise UserError(
                f"{self.path} holds results of another setting ({'; '.join(changed)}); choose "
                "another folder"
            )

    def open(self, setting: dict[str, Any]) -> None:
        """Make this the folder of a setting, new or continued. Raises `UserError` as `check` does."""
        if (self.path / SETTING).is_file():
            self.check(setting)
        make_folder(self.path)
        write_atomic(self.path / SETTING, json.dumps(setting, indent=2) + "\n")
        if not (self.path / ".gitignore").exists():
            write_atomic(self.path / ".gitignore", "/data/\n/runs/\n/.lock\n")
        self.setting = setting

    def run(self, name: str) -> Path:
        """Return the folder of a run."""
        return self.path / "runs" / name

    def add(self, measured: Measured) -> None:
        """Keep a finished run. After a kill, the set has either nothing of the run or all of it."""
        row, self.details[row["name"]] = measured
        details = json_lines({"run": run} | each for run, each in self.details.items())
        write_atomic(self.path / DETAILS, gzip.compress(details.encode(), mtime=0))
        path = self.path / ROWS
        before = path.read_text(encoding="utf-8").rstrip("\n") if path.is_file() else ""
        write_atomic(path, before + "\n" * bool(before) + json_lines([row]))
        self.rows = read_rows(path)

    @property
    def main(self) -> str:
        """The model of the experiments that use a single size."""
        return self.setting["main"]

    @property
    def four_formats(self) -> tuple[str, ...]:
        """The formats of table 2."""
        return four_formats(self.setting["pattern"])

    @property
    def models(self) -> list[str]:
        """Sizes of table 2 that have results, small to large."""
        return [model for model in self.setting["sizes"] if model in set(self.rows.model)]

    @property
    def learning_rate(self) -> float:
        """The learning rate that all runs share, except those of a search."""
        return self.setting["recipe"]["learning_rate"]

    def by_seed(
        self,
        format: str,
        *,
        model: str | None = None,
        sparse_percent: int | None = None,
        learning_rate: float | None = None,
        recipe: str = "",
    ) -> pd.DataFrame:
        """Return the finished runs of one model, indexed by seed, ascending.

        Args:
            format: text form of the format; "2:4" and other patterns as written.
            model: by default the main one.
            sparse_percent: share of sparse steps; by default all, and none of a dense format.
            learning_rate: by default the one that runs share.
            recipe: the column of that name.
        """
        rows, dense = self.rows, format.endswith(f"-{DENSE_PATTERN}")
        percent = (0 if dense else 100) if sparse_percent is None else sparse_percent
        matching = rows[
            (rows.variant == format)
            & (rows.model == (model or self.main))
            & (rows.sparse_percent == percent)
            & (rows.learning_rate == (learning_rate or self.learning_rate))
            & (rows.recipe == recipe)
        ]
        return matching.set_index("seed").sort_index()

    def tried(self, formats: Sequence[str], model: str, recipe: str = "") -> pd.DataFrame:
        """Return held-out losses of seed 0: one row per learning rate, one column per format."""
        rows = self.rows
        rows = rows[(rows.model == model) & (rows.seed == 0) & (rows.recipe == recipe)]
        rows = rows[rows.sparse_percent.isin((0, 100)) & rows.variant.isin(formats)]
        return rows.pivot_table("loss", "learning_rate", "variant").reindex(columns=list(formats))

    def at_best_rates(self, model: str, *, shared: bool) -> dict[str, pd.DataFrame]:
        """Return the runs of the four models at the learning rates that are best for seed 0.

        `shared`: all at the rate with the lowest mean loss of the four; else each at its own best. Empty
        unless there are two rates to choose from.
        """
        losses = self.tried(self.four_formats, model)
        if shared:
            losses = losses.dropna()
            losses = losses.apply(lambda _: losses.mean(axis=1))
        if losses.count().min() < 2:
            return {}
        return {
            format: self.by_seed(format, model=model, learning_rate=rate)
            for format, rate in losses.idxmin().items()
        }

    def losses(self, model: str, **choice: Any) -> pd.DataFrame:
        """Return held-out losses of the four models: one row per seed, one column per format."""
        rows = {format: self.by_seed(format, model=model, **choice) for format in self.four_formats}
        return pd.DataFrame({format: own.loss for format, own in rows.items()})

    def relative(self, format: str, *, model: str | None = None) -> pd.Series:
        """Return NormPPL by seed: perplexity over the dense model's of the same weights (paper, 4.2)."""
        dense = self.by_seed(f"{format.partition('-')[0]}-{DENSE_PATTERN}", model=model)
        return (self.by_seed(format, model=model).perplexity / dense.perplexity).dropna()


def read_rows(path: Path) -> pd.DataFrame:
    """Return the rows of a results.jsonl, none if it does not exist yet.

    Besides `COLUMNS` they have: `variant`, the format without its dense layers, which all runs of a set
    share; its `weight` ("full" or "ternary") and `pattern`; `learning_rate`; and `sparse_percent`, the
    share of sparse steps, 0 of a dense model.

    Raises `UserError` for a broken line.
    """
    rows = pd.DataFrame(read_lines(path, COLUMNS), columns=list(COLUMNS))
    parts = rows.format.astype(str).str.extract(
        r"(?P<variant>(?P<weight>\w+)-(?P<pattern>[^,]*).*?)(?:,dense_layers=|$)"
    )
    with library_errors_as(f"{path} is damaged"):
        percent = (100 * rows.config.str["sparse_fraction"].astype(float)).round()
        rows = rows.join(parts).assign(
            learning_rate=rows.config.str["learning_rate"].astype(float),
            sparse_percent=percent.where(parts.pattern != DENSE_PATTERN, 0),
        )
    for column in ("loss", "perplexity", "steps", "learning_rate"):
        for number, value in enumerate(rows[column], 1):
            if type(value) not in (int, float) or not abs(value) < 1e300:
                raise UserError(f"{path}:{number}: its {column} is no number: remove that line")
    if (repeated := rows.name.duplicated()).any():
        raise UserError(f"{path}:{repeated.argmax() + 1}: a second line of that run: remove it")
    return rows


def read_lines(path: Path, keys: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return the objects of a JSON-lines file, compressed or not; none if it does not exist yet.

    Raises `UserError` for a line that is not an object, or lacks one of `keys`.
    """
    if not path.exists():
        return []
    failure = f"cannot read {path}"
    with library_errors_as(failure), os_errors_as(failure):
        content = path.read_bytes()
        lines = (gzip.decompress(content) if path.suffix == ".gz" else content).splitlines()
    rows = []
    for number, line in enumerate(lines, 1):
        with library_errors_as(f"{path}:{number}: not JSON"):
            row = json.loads(line)
        _check_keys(row, keys, f"{path}:{number}")
        rows.append(row)
    return rows


def json_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return one JSON line for each of `rows`."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def make_setting(scale: Scale, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything that all results of one folder have in common, as JSON: the scale without its
    seeds, rates and workers, the identity of its `data`, and this machine's device and compute type."""
    from sparse_bitnet.training.device import resolve_device, resolve_dtype

    device = resolve_device(scale.recipe.device)
    precision = resolve_dtype(scale.recipe.precision, device)
    shared, recipe = dataclasses.asdict(scale), dataclasses.asdict(scale.recipe)
    setting = {
        "scale": scale.name,
        **{name: value for name, value in shared.items() if name not in _WHICH_RUNS},
        "sizes": {size.model: size.steps for size in scale.sizes},
        "recipe": {name: value for name, value in recipe.items() if name not in _OF_ONE_RUN},
        "data": data,
        "device": device.type,
        "precision": str(precision).removeprefix("torch."),
    }
    return json.loads(json.dumps(setting))  # as read back from a file


def _check_keys(values: Any, keys: Collection[str], where: object) -> None:
    if not isinstance(values, dict):
        raise UserError(f"{where}: not a JSON object")
    if missing := [key for key in keys if key not in values]:
        raise UserError(f"{where}: damaged, it lacks {missing[0]}")
