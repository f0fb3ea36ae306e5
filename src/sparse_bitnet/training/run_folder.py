# SPDX-License-Identifier: Apache-2.0
"""A run folder belongs to one config, and to one process at a time, which stops only between steps."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparse_bitnet.checkpoint.model_folder import read_json
from sparse_bitnet.errors import UserError
from sparse_bitnet.files import check_ours, locked_folder
from sparse_bitnet.training.config import TrainConfig, read_config

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
    """Return the result of this config's run where `run` holds it and it is finished; write nothing.

    Args:
        run: the folder.
        config: the config to train.
        data: its text, see `RunResult.data`.

    Raises `UserError` when the folder holds a run of another config or of other data, or files that are
    not a run.
    """
    cache, own = Path(config.logit_cache or run).absolute(), run.absolute()
    inside = cache.relative_to(own).parts[:1] if cache.is_relative_to(own) else ()
    check_ours(run, ["config.json", *inside], "a run folder")  # a cache of logits is written first
    if not (run / "config.json").is_file():
        return None
    if changed := read_config(run).difference(config):
        listed = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in changed.items())
        raise UserError(f"{run} holds a run of another config ({listed}); choose another --out")
    if not (path := run / RESULT).is_file():
        return None
    try:
        result = RunResult(**read_json(path))
    except TypeError as error:
        raise UserError(f"{path} is damaged: {error}") from error
    if result.data != data:
        raise UserError(f"{run} holds a run on other data; use its data or choose another --out")
    return result


@contextmanager
def stop_signals(on_first: Callable[[], None]) -> Iterator[None]:
    """Inside, in the main thread, the first SIGINT or SIGTERM calls `on_first`, and the second is a
    `KeyboardInterrupt`."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def receive(*_: Any) -> None:
        for number in previous:
            signal.signal(number, signal.default_int_handler)
        on_first()

    previous: dict[int, Any] = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        previous[number] = signal.signal(number, receive)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
