"""How long a run will take, from those that have ended."""

from collections.abc import Sequence

from sparse_bitnet.experiments.store import RunRow
from sparse_bitnet.models import PRESETS
from sparse_bitnet.training.config import TrainConfig

OVERHEAD = 1.1
"""Validation, checkpoints and measuring, over the optimiser steps alone."""


class Speed:
    """Seconds by model, once one of its runs has ended; before that by the size of the model."""

    def __init__(self, rows: Sequence[RunRow]) -> None:
        self._seconds: dict[str, float] = {}
        self._cost: dict[str, float] = {}
        for row in rows:
            self.add(row)

    def add(self, row: RunRow) -> None:
        for key in (row.model, "any"):
            self._seconds[key] = self._seconds.get(key, 0.0) + row.seconds
            self._cost[key] = self._cost.get(key, 0.0) + _cost(row.model, row.tokens)

    def cost(self, config: TrainConfig) -> float:
        """Tokens times weights: comparable between models before any was timed."""
        return _cost(config.model, config.steps * config.tokens_per_step)

    def seconds(self, config: TrainConfig) -> float | None:
        """None before the first run has ended."""
        key = config.model if config.model in self._cost else "any"
        if key not in self._cost:
            return None
        return OVERHEAD * self.cost(config) * self._seconds[key] / self._cost[key]


def _cost(model: str, tokens: int) -> float:
    shape = PRESETS[model]
    return float(tokens * (shape.block_weights + shape.hidden_size * shape.vocab_size))
