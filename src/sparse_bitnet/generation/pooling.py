# SPDX-License-Identifier: Apache-2.0
"""How the hidden states of a text's tokens become one vector: as sentence-transformers' files of an
embedding model say, else as is usual for causal models, whose last token has seen all others."""

from pathlib import Path
from typing import Any, Literal

import numpy as np

from sparse_bitnet.checkpoint.model_folder import read_json_if_there
from sparse_bitnet.errors import UserError

Pooling = Literal["lasttoken", "mean", "weightedmean"]
"""sentence-transformers' names; "weightedmean": the n-th token counts n times."""

_SWITCHES: dict[str, Pooling] = {
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}


def read_pooling(folder: str | Path) -> Pooling:
    """Return the pooling of 1_Pooling/config.json; "lasttoken" where there is none.

    Raises `UserError` for one that is not supported, and for layers that follow it (N_Dense).
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
    """One text's vector, from its hidden states as they come."""

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self._tokens = 0
        self._weight = 0.0
        self._sum: np.ndarray | float = 0.0

    def add(self, states: np.ndarray) -> None:
        """The next tokens' states, float32 [tokens, hidden_size]."""
        places = np.arange(self._tokens, self._tokens + len(states))
        self._tokens += len(states)
        if self._pooling == "lasttoken":
            self._sum, self._weight = states[-1].astype(np.float64), 1.0
            return
        weights = places + 1.0 if self._pooling == "weightedmean" else np.ones(len(states))
        self._sum = self._sum + weights @ states.astype(np.float64)
        self._weight += float(weights.sum())

    def vector(self) -> np.ndarray:
        """float32 [hidden_size]; after at least one token."""
        return np.asarray(self._sum / self._weight, np.float32)
