# SPDX-License-Identifier: Apache-2.0
"""The server's scheduler: a thread of its own steps it, and other threads submit, cancel and stop."""

import itertools
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from sparse_bitnet.engine.protocol import InferenceEngine
from sparse_bitnet.errors import UserError
from sparse_bitnet.generation.request import Generation, GenerationRequest
from sparse_bitnet.generation.scheduler import Scheduler

_log = logging.getLogger(__name__)


class QueueFull(Exception):
    """Raised when the waiting queue has no room; trying later helps."""


class Stopping(Exception):
    """Raised when the scheduler accepts no more requests."""


class Load(NamedTuple):
    """How busy a scheduler is."""

    waiting: int
    running: int
    free_tokens: int
    cache_tokens: int
    kept_prefixes: int


class ThreadedScheduler(Scheduler):
    """A scheduler with its own thread. Any thread may call its methods; `deliver` gets the output."""

    _room_ahead = 64

    def __init__(
        self,
        engine: InferenceEngine,
        *,
        max_queue: int = 128,
        prefill_slice: int = 32,
        **options: Any,
    ) -> None:
        """Create a scheduler with `options` of `Scheduler`; `start` starts its thread. `max_queue`:
        maximum number of waiting generations."""
        super().__init__(engine, prefill_slice=prefill_slice, **options)
        self.max_queue = max_queue
        self._stop_at: float | None = None
        self._groups = itertools.count()
        self._cache_tokens = self._free_tokens = engine.free_tokens
        self._thread = threading.Thread(target=self._loop, name="scheduler", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Queue all of them or none.

        Raises `UserError` as `run` does, `QueueFull`, and `Stopping`.
        """
        group = next(self._groups)
        for prompt in {id(each.prompt): each.prompt for each in requests}.values():
            self._check_tokens(prompt)
        generations = [self._checked(request, self.capacity, group) for request in requests]
        with self._lock:
            if self._stop_at is not None:
                raise Stopping("the server is shutting down")
            room = self.max_queue + max(self.max_running - len(self._running), 0)
            if len(self._waiting) + len(requests) > room:
                raise QueueFull(f"{len(self._waiting)} requests are waiting already; try later")
            self._waiting.extend(generations)
            self._lock.notify()
        return generations

    def cancel(self, *generations: Generation) -> None:
        """End generations soon; does nothing to those that have ended."""
        for generation in generations:
            generation.cancel_requested = True
        with self._lock:
            self._lock.notify()

    def stop(self, grace: float = 0.0) -> None:
        """Accept no more requests; end waiting ones now, and running ones after `grace` seconds at the
        latest. Returns at once; the thread ends when all generations have ended."""
        with self._lock:
            at = time.monotonic() + grace
            self._stop_at = at if self._stop_at is None else min(self._stop_at, at)
            self._lock.notify()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the thread; return whether it has ended."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def status(self) -> str:
        """Return "ok" while the thread runs, "stopping" after `stop`, else "stopped"."""
        if self._stop_at is not None:
            return "stopping"
        return "ok" if self._thread.is_alive() else "stopped"

    def load(self) -> Load:
        """Return how busy the scheduler is."""
        sizes = self._free_tokens, self._cache_tokens, len(self._prefixes)
        with self._lock:
            return Load(len(self._waiting), len(self._running), *sizes)

    def _loop(self) -> None:
        while True:
            with self._lock:
                while not (self._waiting or self._running):
                    if self._stop_at is not None:
                        self._prefixes.clear()
                        self._free_tokens = self._engine.free_tokens
                        return
                    self._lock.wait()
            self._step()
            # A defect of ours must not stop the server: the generations that it hit end with an error.
            for generation in self._failed:
                is_defect = not isinstance(generation.failure, UserError)
                trace = generation.failure if is_defect else None
                _log.error("a generation failed: %r", generation.failure, exc_info=trace)
            self._failed.clear()
            self._free_tokens = self._engine.free_tokens

    def _end_unwanted(self) -> None:
        super()._end_unwanted()
        stop_at = self._stop_at
        late = stop_at is not None and time.monotonic() >= stop_at
        for generation in self._under_way() if stop_at is not None else ():
            if late or not generation.started:
                self._end(generation, "shutdown")
