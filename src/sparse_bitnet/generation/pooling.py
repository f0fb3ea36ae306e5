# SPDX-License-Identifier: Apache-2.0
"""Pooling of a text's hidden states into one vector: as the files of sentence-transformers in an
embedding model say, else the last token's, which has seen all others in a causal model."""

from pathlib import Path
from typing import Any, Literal

import numpy as np

from sparse_bitnet.checkpoint.model_folder import read_json_if_there
from sparse_bitnet.errors import UserError

Pooling = Literal["lasttoken", "mean", "weightedmean"]
"""Names of sentence-transformers; "weightedmean": the n-th token counts n times."""

_SWITCHES: dict[str, Pooling] = {
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}


def read_pooling(folder: str | Path) -> Pooling:
    """Return the pooling in 1_Pooling/config.json; "lasttoken" without that file.

    Raises `UserError` for an unsupported pooling, and for layers that follow it (N_Dense).
    """
    path = Path(folder) / "1_Pooling" / "config.json"
    for layer in sorted(Path(folder).glob("[2-9]_*")):
        if not layer.name.endswith("_Normalize"):
            raise UserError(f"{layer} follows the pooling: layers after it are not supported")
    if not path.is_file():
        return "lasttoken"
    config = read_json_if_there(path)
    on = [name for name, value in config.items() if name.startswith("pooling_") and value is True]
    named = config.get("pooling_mode")
    chosen: list[Any] = [named] if named else [_SWITCHES.get(name, name) for name in on]
    if len(chosen) == 1 and chosen[0] in _SWITCHES.values():
        return chosen[0]
    what = ", ".join(map(str, chosen)) or "none"
    raise UserError(f"{path}: pooling by {what}: supported are {', '.join(_SWITCHES.values())}")


class PooledStates:
    """One text's vector, computed from its hidden states as they come."""

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self._tokens = 0
        self._weight = 0.0
        self._sum: np.ndarray | float = 0.0

    def add(self, states: np.ndarray) -> None:
        """Add the next tokens' states, float32 [tokens, hidden_size]."""
        places = np.arange(self._tokens, self._tokens + len(states))
        self._tokens += len(states)
        if self._pooling == "lasttoken":
            self._sum, self._weight = states[-1].astype(np.float64), 1.0
            return
        weights = places + 1.0 if self._pooling == "weightedmean" else np.ones(len(states))
        self._sum = self._sum + weights @ states.astype(np.float64)
        self._weight += float(weights.sum())

    def vector(self) -> np.ndarray:
        """Return the vector, float32 [hidden_size], after at least one token."""
        return np.asarray(self._sum / self._weight, np.float32)
