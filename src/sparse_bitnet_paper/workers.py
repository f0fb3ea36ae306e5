# SPDX-License-Identifier: Apache-2.0
"""Trains runs in this process, one after another, or several at once in processes of their own.

Models of a few million weights keep one core busy and hardly two: two runs of one thread each take
little more than half the time of the same two runs with two threads, and give the same numbers.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import ForkServerContext
from queue import Empty
from typing import Any

from sparse_bitnet.errors import UserError
from sparse_bitnet.training.run_folder import Interrupted, stop_signals
from sparse_bitnet_paper.record import OnStep
from sparse_bitnet_paper.results import Measured
from sparse_bitnet_paper.runs import Run

TrainOne = Callable[[Run, OnStep], Measured]
"""Trains one run; a picklable function. Raises what `train` raises."""

Ended = tuple[Run, Measured | UserError]
"""A run that was trained, or could not be."""

_REPORT_SECONDS = 0.25
_IMPORTED = [
    "sparse_bitnet_paper.record",
    "torch.distributed.checkpoint",
    "transformers.models.qwen2.modeling_qwen2",
]


def serial(runs: Iterable[Run], train_one: TrainOne, on_step: OnStep) -> Iterator[Ended]:
    """Train in this process; the next run is asked for when the one before has been dealt with.

    Raises `Interrupted` on SIGINT.
    """
    for run in runs:
        try:
            yield run, train_one(run, on_step)
        except UserError as error:
            yield run, error


def parallel(
    runs: Iterable[Run], train_one: TrainOne, on_step: OnStep, workers: int
) -> Iterator[Ended]:
    """Train `workers` runs at a time, in the order of `runs`, yielded as they end.

    On SIGINT every run under way saves a checkpoint; then `Interrupted` is raised.
    """
    context = forked_from_imports()
    steps = context.Queue()
    pool = ProcessPoolExecutor(workers, context, _begin_worker, (steps,))
    waiting, stopped = iter(runs), threading.Event()
    under_way: dict[Future[Measured], Run] = {}

    def stop() -> None:
        stopped.set()
        for process in multiprocessing.active_children():
            with contextlib.suppress(ProcessLookupError):
                assert process.pid is not None
                os.kill(process.pid, signal.SIGINT)

    with pool, stop_signals(stop):
        try:
            while True:
                while len(under_way) < workers and not stopped.is_set():
                    if (run := next(waiting, None)) is None:
                        break
                    under_way[pool.submit(_in_worker, train_one, run)] = run
                if not under_way:
                    break
                ended, _ = wait(under_way, timeout=_REPORT_SECONDS, return_when=FIRST_COMPLETED)
                with contextlib.suppress(Empty):
                    while True:
                        on_step(*steps.get_nowait())
                for future in ended:
                    run = under_way.pop(future)
                    try:
                        yield run, future.result()
                    except UserError as error:
                        yield run, error
                    except Interrupted:
                        stopped.set()
        except BrokenProcessPool as error:
            raise UserError(
                "a worker process died, perhaps for want of memory; the same command goes on, "
                "and --workers 1 needs the least"
            ) from error
        except BaseException:
            if not stopped.is_set():
                stop()
            raise
    if stopped.is_set():
        raise Interrupted("stopped; every run under way has a checkpoint")


def forked_from_imports() -> ForkServerContext:
    """Return processes forked from one that has imported what training takes, and nothing else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    return context


_worker_steps: Any = None
_asked_to_stop = threading.Event()


def _begin_worker(steps: Any) -> None:
    """Leave the terminal's process group, so that Ctrl-C comes once, from the first process."""
    global _worker_steps
    _worker_steps = steps
    os.setpgrp()
    # `train` listens by itself, once its model is built; while measuring there is nothing to save.
    signal.signal(signal.SIGINT, lambda number, frame: _asked_to_stop.set())
    # Half-sent progress must not keep a worker from ending.
    steps.cancel_join_thread()


def _in_worker(train_one: TrainOne, run: Run) -> Measured:
    reported, parent = 0.0, multiprocessing.parent_process()

    def report(name: str, row: dict[str, Any]) -> None:
        nonlocal reported
        if parent is not None and not parent.is_alive():
            signal.raise_signal(signal.SIGTERM)
        if _asked_to_stop.is_set():
            _asked_to_stop.clear()
            signal.raise_signal(signal.SIGINT)
        if time.monotonic() - reported > _REPORT_SECONDS or row["step"] == run.config.steps:
            reported = time.monotonic()
            _worker_steps.put((name, {key: row[key] for key in ("step", "loss")}))

    try:
        return train_one(run, report)
    finally:
        if parent is not None and not parent.is_alive():
            os._exit(1)
