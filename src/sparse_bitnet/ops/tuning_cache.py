# SPDX-License-Identifier: Apache-2.0
"""Tuning cache: which product a layer uses for how many tokens, by times measured on this machine.

Paths: "dense" (int8 tensor cores, the baseline), "sparse" (2:4 sparse tensor cores), "packed" (packed
weights, few tokens). A path other than dense is chosen only where it was clearly faster than dense at
the measured token counts on both sides, so a choice is never slower than dense by more than noise, and
without a measurement everything is dense.
"""

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self, cast

from sparse_bitnet.errors import UserError
from sparse_bitnet.files import write_atomic
from sparse_bitnet.host import cache_folder
from sparse_bitnet.pattern import NMPattern

Route = Literal["dense", "sparse", "packed"]
ROUTES: tuple[Route, ...] = ("dense", "sparse", "packed")

VERSION = 1
GAIN = 0.97
"""A path takes over from dense below this share of dense's time: more than the noise of medians."""

WINS = 0.75
"""Share of the interleaved rounds in which a path has to be faster than dense, or its median is noise."""

TOKENS = (1, 8, 64, 256, 1024, 4096, 16384)
"""Token counts that are measured by default."""

Times = Mapping[str, float]

_DAMAGE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


@dataclass(frozen=True)
class LayerShape:
    """What the times of a layer depend on, besides the tokens."""

    out_features: int
    in_features: int
    pattern: NMPattern


@dataclass(kw_only=True)
class TuningCache:
    """Median seconds of every path, by shape and token count, of one machine."""

    machine: str
    """GPU and library versions, see `machine_name`; times of another one say nothing."""

    seconds: dict[LayerShape, dict[int, Times]] = field(default_factory=dict)

    def choose(self, shape: LayerShape, tokens: int) -> Route:
        """The path for this many tokens: faster than dense at the nearest measured counts, or dense."""
        measured = self.seconds.get(shape)
        if not measured:
            return "dense"
        below = max((count for count in measured if count <= tokens), default=min(measured))
        above = min((count for count in measured if count >= tokens), default=max(measured))
        near = (measured[below], measured[above])
        best, best_time = "dense", sum(times["dense"] for times in near)
        for route in ROUTES[1:]:
            if all(times.get(route, float("inf")) < GAIN * times["dense"] for times in near):
                total = sum(times[route] for times in near)
                if total < best_time:
                    best, best_time = route, total
        return cast(Route, best)

    def routes(self, shape: LayerShape) -> set[Route]:
        """Every path that some measured token count uses: the forms of the weight to keep in memory."""
        return {"dense", *(self.choose(shape, count) for count in self.seconds.get(shape, ()))}

    def add(self, shape: LayerShape, tokens: int, times: Times) -> None:
        """Store the median seconds of the paths; dense is always among them."""
        assert "dense" in times, times
        self.seconds.setdefault(shape, {})[tokens] = dict(times)

    def add_rounds(
        self, shape: LayerShape, tokens: int, taken: Mapping[str, Sequence[float]]
    ) -> None:
        """Store the medians of interleaved measurements of every path. One whose median is below dense's,
        but which was not faster in most rounds, is left out: it is then never chosen."""
        medians = {name: statistics.median(times) for name, times in taken.items()}
        kept = {
            name: seconds
            for name, seconds in medians.items()
            if seconds >= medians["dense"] or _share_won(taken[name], taken["dense"]) >= WINS
        }
        self.add(shape, tokens, kept)

    def save(self, path: Path) -> None:
        """Write as JSON, whole or not at all."""
        rows = [
            {
                "out_features": shape.out_features,
                "in_features": shape.in_features,
                "pattern": str(shape.pattern),
                "tokens": tokens,
                "seconds": dict(times),
            }
            for shape, by_tokens in self.seconds.items()
            for tokens, times in sorted(by_tokens.items())
        ]
        entry = {"version": VERSION, "machine": self.machine, "rows": rows}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(entry, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path, machine: str) -> Self:
        """The cache at `path`; an empty one where there is none, or one of another machine.

        Raises `UserError` for a file that is not such a table.
        """
        table = cls(machine=machine)
        if not path.is_file():
            return table
        try:
            entry = json.loads(path.read_text())
            if (entry["version"], entry["machine"]) != (VERSION, machine):
                return table
            for row in entry["rows"]:
                pattern = NMPattern.parse(row["pattern"])
                shape = LayerShape(int(row["out_features"]), int(row["in_features"]), pattern)
                times = {name: float(value) for name, value in row["seconds"].items()}
                if "dense" not in times or not all(value > 0 for value in times.values()):
                    raise ValueError("times are positive and include dense")
                table.add(shape, int(row["tokens"]), times)
        except _DAMAGE as error:
            raise UserError(
                f"{path} is not a tuning cache of kernels ({error}): delete it"
            ) from error
        return table


def _share_won(times: Sequence[float], others: Sequence[float]) -> float:
    return sum(a < b for a, b in zip(times, others, strict=True)) / len(times)


def cache_path(machine: str) -> Path:
    """Where the table of a machine lies: SPARSE_BITNET_TUNING_CACHE, or the user's cache folder."""
    if given := os.environ.get("SPARSE_BITNET_TUNING_CACHE"):
        return Path(given)
    slug = "-".join("".join(c if c.isalnum() or c == "." else " " for c in machine).split())
    return cache_folder() / f"tuning-{slug}.json"


def machine_name() -> str:
    """The current GPU and the libraries that run on it, in words."""
    import torch

    if not torch.cuda.is_available():
        return f"cpu torch {torch.__version__}"
    library = getattr(torch.backends, "cusparselt", None)
    version = library.version() if library is not None and library.is_available() else None
    name = torch.cuda.get_device_name()
    return f"{name} torch {torch.__version__} cuda {torch.version.cuda} cusparselt {version}"
