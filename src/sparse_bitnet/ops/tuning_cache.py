# SPDX-License-Identifier: Apache-2.0
"""Tuning cache: which product a layer uses for how many tokens, by times measured on this machine.

Paths: "dense" (int8 tensor cores, the baseline), "sparse" (2:4 sparse tensor cores), "packed" (packed
weights, few tokens). A path other than dense is chosen only where it was clearly the fastest at the
measured token counts on both sides, so a choice is never slower than dense by more than noise, and
without a measurement everything is dense.
"""

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

from sparse_bitnet.errors import UserError
from sparse_bitnet.files import make_folder, write_atomic
from sparse_bitnet.host import cache_folder
from sparse_bitnet.pattern import NMPattern

Route = Literal["dense", "sparse", "packed"]
ROUTES: tuple[Route, ...] = ("dense", "sparse", "packed")

VERSION = 3
GAIN = 0.97
"""A path takes over from dense below this share of dense's time: more than the noise of medians."""

WINS = 0.75
"""Share of the interleaved rounds in which a path has to be faster than dense, or its median is noise."""

TOKENS = (1, 8, 64, 256, 1024, 4096, 16384)
"""Token counts that are measured by default."""

_DAMAGE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


@dataclass(frozen=True)
class LayerShape:
    """What the times of a layer depend on, besides the tokens."""

    out_features: int
    in_features: int
    pattern: NMPattern


@dataclass(kw_only=True)
class TuningCache:
    """The fastest path of one machine, by shape and token count."""

    machine: str = ""
    """GPU and library versions, see `machine_name`; what was fastest on another one says nothing."""

    fastest: dict[LayerShape, dict[int, Route]] = field(default_factory=dict)

    def choose(self, shape: LayerShape, tokens: int) -> Route:
        """The path for this many tokens: that of both nearest measured counts, or dense."""
        measured = self.fastest.get(shape)
        if not measured:
            return "dense"
        below = max((count for count in measured if count <= tokens), default=min(measured))
        above = min((count for count in measured if count >= tokens), default=max(measured))
        return measured[below] if measured[below] == measured[above] else "dense"

    def routes(self, shape: LayerShape) -> set[Route]:
        """Every path that some token count uses: the forms of the weight to keep in memory."""
        return {"dense", *self.fastest.get(shape, {}).values()}

    def add(self, shape: LayerShape, tokens: int, taken: Mapping[Route, Sequence[float]]) -> None:
        """Store the path with the least median of interleaved measurements; dense, one of them, where no
        other has both a median clearly below and been faster in most rounds."""
        dense = taken["dense"]
        best: Route = "dense"
        least = GAIN * statistics.median(dense)
        for route, times in taken.items():
            won = sum(a < b for a, b in zip(times, dense, strict=True))
            if won >= WINS * len(dense) and (seconds := statistics.median(times)) < least:
                best, least = route, seconds
        self.fastest.setdefault(shape, {})[tokens] = best

    def save(self, path: Path) -> None:
        """Write as JSON, whole or not at all."""
        rows = [
            [shape.out_features, shape.in_features, str(shape.pattern), found]
            for shape, found in self.fastest.items()
        ]
        entry = {"version": VERSION, "machine": self.machine, "rows": rows}
        make_folder(path.parent)
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
            for rows, columns, pattern, found in entry["rows"]:
                shape = LayerShape(int(rows), int(columns), NMPattern.parse(pattern))
                table.fastest[shape] = {
                    int(tokens): ROUTES[ROUTES.index(route)] for tokens, route in found.items()
                }
        except _DAMAGE as error:
            raise UserError(
                f"{path} is not a tuning cache of kernels ({error}): delete it"
            ) from error
        return table


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
