# SPDX-License-Identifier: Apache-2.0
"""One finished run: what is kept of it, as a line of results.jsonl."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparse_bitnet.errors import UserError, os_errors_as
from sparse_bitnet.files import write_atomic
from sparse_bitnet_paper.scales import DENSE_PATTERN

_ORIGIN = {"commit", "date", "hardware", "versions"}


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


def read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each object of a JSON-lines file, after where it stands. Raises `UserError` for what is none."""
    with os_errors_as(f"cannot read {path}"):
        lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}:{number}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number}: not a JSON object")
        yield f"{path}:{number}", row


def read_rows(path: Path) -> list[ResultRow]:
    """Rows of a file; none if it does not exist yet. Raises `UserError` for a broken line."""
    rows = []
    for where, line in read_lines(path) if path.is_file() else ():
        try:
            rows.append(ResultRow(**line))
            if missing := _ORIGIN - rows[-1].provenance.keys():
                raise TypeError(f"no {min(missing)} in its provenance")
        except (TypeError, AttributeError) as error:
            raise UserError(f"{where}: not a result row ({error})") from error
    return rows


def write_rows(path: Path, rows: Sequence[ResultRow]) -> None:
    """Replace `path` by one JSON line per row."""
    write_atomic(path, "".join(json.dumps(dataclasses.asdict(row)) + "\n" for row in rows))
