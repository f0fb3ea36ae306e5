# SPDX-License-Identifier: Apache-2.0
"""Whose a run folder is: one config, one process at a time, stopped only between steps."""

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparse_bitnet.errors import UserError
from sparse_bitnet.files import locked_folder, write_atomic
from sparse_bitnet.training.config import TrainConfig, read_config
from sparse_bitnet.training.schedule import learning_rate

RESULT = "result.json"


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a finished (or interrupted) run amounts to; `result.json` of the run folder."""

    run: str
    format: str
    steps: int
    tokens: int
    training_loss: float
    validation_loss: float
    validation_perplexity: float
    validation_tokens: int
    flip_rate: float | None
    zero_fraction: float

    def write(self, run: Path) -> None:
        """Beside the checkpoints: from then on the run is finished."""
        write_atomic(run / RESULT, json.dumps(asdict(self), indent=2) + "\n")


class Interrupted(Exception):
    """The run was stopped by a signal after saving a checkpoint; the same command continues it."""


def run_lock(run: Path) -> AbstractContextManager[None]:
    """Hold the folder for this process alone. Raises `UserError` when another process holds it."""
    return locked_folder(run, f"{run} is in use by another running process")


def check_run(run: Path, config: TrainConfig) -> dict[str, Any] | None:
    """The result of this config's run where `run` holds it and it is finished; nothing is written.

    Raises `UserError` when the folder holds a run of another config, or files that are not a run.
    """
    if (run / "config.json").is_file():
        stored = read_config(run)
        changed = stored.difference(config)
        finished = (run / RESULT).is_file()
        if changed and not (finished and _prolongs(stored, config)):
            listed = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in changed.items())
            more = "; a finished run takes more --steps" if set(changed) == {"steps"} else ""
            raise UserError(
                f"{run} holds a run of another config ({listed}); choose another --out{more}"
            )
        if finished and not changed:
            return json.loads((run / RESULT).read_text())
    elif run.is_dir() and any(not path.name.startswith(".lock") for path in run.iterdir()):
        raise UserError(f"{run} is neither empty nor a run folder; choose another --out")
    return None


def _prolongs(stored: TrainConfig, config: TrainConfig) -> bool:
    return set(stored.difference(config)) == {"steps"} and config.steps > stored.steps


@contextmanager
def open_run(run: Path, config: TrainConfig) -> Iterator[None]:
    """Hold `run`, new or continued, as the folder of this config for this process alone.

    A finished run of fewer steps is prolonged: its result is kept as `result-STEPS.json`.

    Raises `UserError` as `check_run` does, when another process holds the folder, and when it cannot be
    written.
    """
    with run_lock(run):
        check_run(run, config)
        if (run / RESULT).is_file():
            stored = read_config(run)
            if _prolongs(stored, config):
                say(_prolonged(stored, config))
                os.replace(run / RESULT, run / f"result-{stored.steps}.json")
        write_atomic(run / "config.json", config.to_json())
        yield


def _prolonged(stored: TrainConfig, config: TrainConfig) -> str:
    """What becomes of the schedules when a finished run gets more steps."""
    first = stored.steps + 1
    ended = learning_rate(stored, stored.steps)
    text = (
        f"{config.out}: prolonged from {stored.steps} to {config.steps} steps; the {config.schedule} "
        f"schedule is that of {config.steps}: the learning rate ended at {ended:.2e} and goes on with "
        f"{learning_rate(config, first):.2e}"
    )
    if config.first_sparse_step > first:
        text += f"; steps {first} to {config.first_sparse_step - 1} are dense again"
    return text


class StopSignal:
    """Turns the first SIGINT or SIGTERM into a flag looked at between steps."""

    def __init__(self) -> None:
        self.received = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def _receive(self, number: int, frame: Any) -> None:
        if self.received:
            raise KeyboardInterrupt
        self.received = True

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def say(message: str) -> None:
    """A line that belongs to no result, on stderr."""
    print(f"sparse-bitnet: {message}", file=sys.stderr, flush=True)
