# SPDX-License-Identifier: Apache-2.0
"""N:M patterns: how many of every m consecutive weights are kept. Free of torch."""

import re
from dataclasses import dataclass

from sparse_bitnet.errors import UserError

MAX_GROUP = 32


@dataclass(frozen=True)
class NMPattern:
    """Keep `n` of every `m` consecutive weights along `in_features`; n == m is dense.

    Raises `UserError` unless 1 <= n <= m <= 32.
    """

    n: int
    m: int

    def __post_init__(self) -> None:
        if not type(self.n) is type(self.m) is int:
            raise UserError(f"pattern {self.n}:{self.m}: n and m must be of type int")
        if not 1 <= self.n <= self.m <= MAX_GROUP:
            raise UserError(f"pattern {self.n}:{self.m}: needs 1 <= n <= m <= {MAX_GROUP}")

    @classmethod
    def parse(cls, text: str) -> "NMPattern":
        """Read "n:m", for example "6:8". Raises `UserError` for anything else."""
        match = re.fullmatch(r"\s*(\d{1,3})\s*:\s*(\d{1,3})\s*", text)
        if match is None:
            raise UserError(f"pattern {text!r}: write it as n:m, for example 6:8 or 2:4")
        return cls(int(match[1]), int(match[2]))

    @property
    def is_dense(self) -> bool:
        """Whether every weight is kept."""
        return self.n == self.m

    @property
    def density(self) -> float:
        """Share of the weights that are kept, n / m."""
        return self.n / self.m

    def check_divides(self, in_features: int, name: str) -> None:
        """Raise `UserError`, naming the layer and the sizes, when groups of m do not fill a row."""
        if not self.is_dense and in_features % self.m:
            raise UserError(
                f"layer {name}: in_features {in_features} is not a multiple of {self.m}, so the "
                f"pattern {self} does not fit; choose another m, or leave the "
                "layer dense (--dense-layers, dense_layers)"
            )

    def __str__(self) -> str:
        return f"{self.n}:{self.m}"
