# SPDX-License-Identifier: Apache-2.0
"""Readers of the files that a run writes, and a signal in the middle of one."""

import signal
from pathlib import Path
from typing import Any

import pytest

from sparse_bitnet.checkpoint.saved_steps import list_checkpoints
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet.training.metrics import METRICS_FILE, read_rows
from sparse_bitnet.training.run_folder import Interrupted
from sparse_bitnet.training.trainer import train


def logged(config: TrainConfig) -> list[dict[str, Any]]:
    """Return the metrics of each step and validation."""
    return read_rows(Path(config.out) / METRICS_FILE)


def losses(config: TrainConfig) -> list[float]:
    """Return the loss of each step."""
    return [row["loss"] for row in logged(config) if "loss" in row]


def final_weights(config: TrainConfig) -> bytes:
    """Return the file of weights that a finished run has written."""
    return Path(config.out, "final", "model.safetensors").read_bytes()


def interrupted(config: TrainConfig, step: int, number: int = signal.SIGINT) -> Path:
    """Train until a signal arrives in `step`; return the folder of the newest checkpoint."""

    def on_step(row: dict) -> None:
        if row["step"] == step:
            signal.raise_signal(number)

    with pytest.raises(Interrupted, match=f"after step {step}"):
        train(config, on_step=on_step)
    return list_checkpoints(Path(config.out))[-1].path
