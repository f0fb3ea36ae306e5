"""Whose a run folder is: one config, one process at a time, stopped only between steps."""

import fcntl
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sparse_bitnet.errors import UserError
from sparse_bitnet.files import write_atomic
from sparse_bitnet.training.config import TrainConfig, read_config


class Interrupted(Exception):
    """The run was stopped by a signal after saving a checkpoint; the same command continues it."""


def open_run(run: Path, config: TrainConfig) -> None:
    """Make `run` the folder of this config, new or continued.

    Raises `UserError` when it holds a run of another config, or files that are no run.
    """
    if (run / "config.json").is_file():
        if changed := read_config(run).difference(config):
            listed = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in changed.items())
            raise UserError(f"{run} holds a run of another config ({listed}); choose another --out")
    elif run.is_dir() and any(path.name != ".lock" for path in run.iterdir()):
        raise UserError(f"{run} is neither empty nor a run folder; choose another --out")
    run.mkdir(parents=True, exist_ok=True)
    write_atomic(run / "config.json", config.to_json())


@contextmanager
def run_lock(run: Path) -> Iterator[None]:
    """Hold the folder for this process alone; the system frees the lock of a process that died.

    Raises `UserError` when another process holds it.
    """
    with open(run / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{run} is in use by another running process") from None
        yield


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
