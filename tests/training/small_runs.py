# SPDX-License-Identifier: Apache-2.0
"""Losses of a run, and a signal in the middle of one."""

import signal
from pathlib import Path

import pytest

from sparse_bitnet.checkpoint.saved_steps import list_checkpoints
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet.training.metrics import METRICS_FILE, read_rows
from sparse_bitnet.training.run_folder import Interrupted
from sparse_bitnet.training.trainer import train


def losses(config: TrainConfig) -> list[float]:
    """Return the loss of each step."""
    return [row["loss"] for row in read_rows(Path(config.out) / METRICS_FILE) if "loss" in row]


def interrupted(config: TrainConfig, step: int, number: int = signal.SIGINT) -> Path:
    """Train until a signal arrives in `step`; return the folder of the newest checkpoint."""

    def on_step(row: dict) -> None:
        if row["step"] == step:
            signal.raise_signal(number)

    with pytest.raises(Interrupted, match=f"after step {step}"):
        train(config, on_step=on_step)
    return list_checkpoints(Path(config.out))[-1].path
