# SPDX-License-Identifier: Apache-2.0
"""A run folder belongs to one config, and to one process at a time, which stops only between steps."""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparse_bitnet.checkpoint.model_folder import read_json
from sparse_bitnet.checkpoint.saved_steps import list_checkpoints
from sparse_bitnet.errors import UserError, os_errors_as
from sparse_bitnet.files import check_ours, locked_folder, write_atomic
from sparse_bitnet.progress import say
from sparse_bitnet.training.config import TrainConfig, read_config
from sparse_bitnet.training.schedule import learning_rate

RESULT = "result.json"


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """Result of a finished run; `result.json` of the run folder."""

    run: str
    format: str
    steps: int
    tokens: int
    training_loss: float | None
    """Loss of the last step; None where it had nothing to learn."""
    validation_loss: float
    validation_perplexity: float
    validation_tokens: int
    flip_rate: float | None
    zero_fraction: float
    data: dict[str, Any]
    """`TokenDataset.identity` of each split."""

    def write(self, run: Path) -> None:
        """Beside the checkpoints: from then on the run is finished."""
        write_atomic(run / RESULT, json.dumps(asdict(self), indent=2) + "\n")


class Interrupted(Exception):
    """The run was stopped by a signal after saving a checkpoint; the same command continues it."""


@contextmanager
def run_lock(run: Path) -> Iterator[None]:
    """Hold the folder for this process alone; where it was not there, and nothing was written into it,
    it is removed again.

    Raises `UserError` when another process holds it, and when it cannot be written.
    """
    made = [folder for folder in (run, *run.parents) if not folder.exists()]
    with locked_folder(run, f"{run} is in use by another running process"):
        try:
            yield
        finally:
            if made and os.listdir(run) == [".lock"]:
                with suppress(OSError):  # a system where what is open cannot be removed
                    (run / ".lock").unlink()
                    for folder in made:
                        folder.rmdir()


def check_run(run: Path, config: TrainConfig, data: dict[str, Any]) -> RunResult | None:
    """The result of this config's run where `run` holds it and it is finished; nothing is written.

    Args:
        run: the folder.
        config: what is asked for.
        data: its text, see `RunResult.data`.

    Raises `UserError` when the folder holds a run of another config, of other data or without the
    checkpoint to continue from, or files that are not a run.
    """
    cache, own = Path(config.logit_cache or run).absolute(), run.absolute()
    inside = cache.relative_to(own).parts[:1] if cache.is_relative_to(own) else ()
    check_ours(run, ["config.json", *inside], "a run folder")  # a cache of logits is written first
    if not (run / "config.json").is_file():
        return None
    stored = read_config(run)
    result = _result(run)
    finished = result is not None and result.steps == stored.steps
    if result is not None and result.data != data:
        raise UserError(f"{run} holds a run on other data; use its data or choose another --out")
    changed = stored.difference(config)
    if changed and not (finished and _prolongs(stored, config)):
        listed = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in changed.items())
        more = "; a finished run takes more --steps" if set(changed) == {"steps"} else ""
        raise UserError(
            f"{run} holds a run of another config ({listed}); choose another --out{more}"
        )
    if finished and not changed:
        return result
    if result is not None and not list_checkpoints(run):
        raise UserError(
            f"{run} holds a run whose checkpoints are gone: bring them back, or choose another --out"
        )
    return None


def _result(run: Path) -> RunResult | None:
    if not (path := run / RESULT).is_file():
        return None
    stored = read_json(path)
    try:
        return RunResult(**stored)
    except TypeError as error:
        raise UserError(f"{path} is damaged: {error}") from error


def _prolongs(stored: TrainConfig, config: TrainConfig) -> bool:
    return set(stored.difference(config)) == {"steps"} and config.steps > stored.steps


def begin(run: Path, config: TrainConfig) -> None:
    """Write the config into a folder that is held and checked, once its checkpoint fits.

    A finished run of fewer steps is prolonged: its model and result are kept as `final-STEPS` and
    `result-STEPS.json`.
    """
    before = _result(run)
    before = before if before is not None and before.steps < config.steps else None
    if before is not None:
        rate = learning_rate(config, before.steps + 1)
        say(
            f"{config.out}: prolonged from {before.steps} to {config.steps} steps; all schedules are "
            f"those of {config.steps}, so the learning rate continues at {rate:.2e}"
        )
    write_atomic(run / "config.json", config.to_json())
    if before is not None:
        with os_errors_as(f"cannot write {run}"):
            if (run / "final").is_dir():
                os.replace(run / "final", run / f"final-{before.steps}")
            os.replace(run / RESULT, run / f"result-{before.steps}.json")


@contextmanager
def stop_signals(on_first: Callable[[], None]) -> Iterator[None]:
    """Inside, in the main thread, the first SIGINT or SIGTERM calls `on_first`, and the second is a
    `KeyboardInterrupt`."""
    received = False

    def receive(number: int, frame: Any) -> None:
        nonlocal received
        if received:
            raise KeyboardInterrupt
        received = True
        on_first()

    previous = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, receive)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
