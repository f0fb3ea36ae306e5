# SPDX-License-Identifier: Apache-2.0
"""The scheduler of a server: a thread of its own takes the steps, any thread submits."""

import itertools
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparse_bitnet.engine.protocol import ContextFull, InferenceEngine
from sparse_bitnet.errors import UserError
from sparse_bitnet.generation.request import Generation, GenerationRequest
from sparse_bitnet.generation.scheduler import Scheduler

_log = logging.getLogger(__name__)


class QueueFull(Exception):
    """No room in the waiting queue; trying later helps."""


class Stopping(Exception):
    """The scheduler takes no more requests."""


@dataclass(frozen=True)
class Load:
    """How busy a scheduler is."""

    waiting: int
    running: int
    free_tokens: int
    cache_tokens: int
    kept_prefixes: int


class ThreadedScheduler(Scheduler):
    """Its methods may be called from any thread; requests report through `deliver`."""

    def __init__(self, engine: InferenceEngine, *, max_queue: int = 128, **options: Any) -> None:
        """
        Args:
            max_queue: generations that may wait beside those that run.
            options: of `Scheduler`.
        """
        super().__init__(engine, **options)
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

        Raises `ContextFull` for a prompt that leaves no room for its `max_tokens`, `QueueFull`, and
        `Stopping`.
        """
        for request in requests:
            if len(request.prompt) + request.max_tokens > self.capacity:
                raise ContextFull(
                    f"the prompt has {len(request.prompt)} tokens and max_tokens is "
                    f"{request.max_tokens}: together above the context length of "
                    f"{self.capacity} tokens; shorten one of them"
                )
        with self._lock:
            if self._stop_at is not None:
                raise Stopping("the server is shutting down")
            room = self.max_queue + max(self.max_running - len(self._running), 0)
            if len(self._waiting) + len(requests) > room:
                raise QueueFull(f"{len(self._waiting)} requests are waiting already; try later")
            group = next(self._groups)
            generations = [Generation(request, group) for request in requests]
            self._waiting.extend(generations)
            self._lock.notify()
        return generations

    def cancel(self, *generations: Generation) -> None:
        """End generations soon; does nothing to those that have ended."""
        for generation in generations:
            generation.cancel_asked = True
        with self._lock:
            self._lock.notify()

    def stop(self, grace: float = 0.0) -> None:
        """Take no more requests, end waiting ones now and running ones after `grace` seconds at the
        latest. Returns at once; the thread ends when all have ended."""
        with self._lock:
            at = time.monotonic() + grace
            self._stop_at = at if self._stop_at is None else min(self._stop_at, at)
            self._lock.notify()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the thread; whether it has ended."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def is_alive(self) -> bool:
        """The thread takes steps."""
        return self._thread.is_alive()

    @property
    def stopping(self) -> bool:
        """`stop` was called."""
        return self._stop_at is not None

    def load(self) -> Load:
        """How busy it is."""
        with self._lock:
            return Load(
                len(self._waiting),
                len(self._running),
                self._free_tokens,
                self._cache_tokens,
                len(self._prefixes),
            )

    def _loop(self) -> None:
        while True:
            with self._lock:
                while not (self._waiting or self._running or self.stopping):
                    self._lock.wait()
                if self.stopping and not (self._waiting or self._running):
                    break
            self._step()
            # A defect of ours must not silence the server: those it hit have ended with an error.
            for generation in self._failed:
                is_defect = not isinstance(generation.failure, UserError)
                trace = generation.failure if is_defect else None
                _log.error("a generation failed: %r", generation.failure, exc_info=trace)
            self._failed.clear()
            self._free_tokens = self._engine.free_tokens
        self._prefixes.clear()
        self._free_tokens = self._engine.free_tokens

    def _end_unwanted(self) -> None:
        super()._end_unwanted()
        stop_at = self._stop_at
        late = stop_at is not None and time.monotonic() >= stop_at
        for generation in self._under_way() if stop_at is not None else ():
            if late or not generation.started:
                self._end(generation, "shutdown")
