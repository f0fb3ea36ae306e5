"""Continuous batching: one thread owns the engine and moves every running generation by one token a
step, new prompts by a slice, so that long prompts do not hold up the others.

Sequences of ended generations are kept while the cache has room, and later prompts start from them.
When the cache is full, kept sequences go first; then the youngest generation is paused: its sequence is
given back, and it is computed again from its tokens when there is room.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sparse_bitnet.engine.protocol import (
    CacheFull,
    ContextFull,
    EngineSequence,
    InferenceEngine,
    WhichLogits,
)
from sparse_bitnet.errors import UserError
from sparse_bitnet.generation.batching import shares
from sparse_bitnet.generation.prefix_cache import PrefixCache, shared_length
from sparse_bitnet.generation.request import FinishReason, Generation, GenerationRequest, Output

_log = logging.getLogger(__name__)
_PAGE = 64
"""Room to leave for each running generation before another is let in; tokens."""
_WORTH_WAITING = 32
"""A prompt waits for another that is being computed if they share so many tokens more."""
_SCORED_SLICE = 32
"""Tokens a step where each needs logits: [tokens, vocab_size] floats are large."""


class QueueFull(Exception):
    """No room in the waiting queue; trying later helps."""


class Stopping(Exception):
    """The scheduler takes no more requests."""


class Observer:
    """What happens, for metrics. Called from the scheduler's thread."""

    def started(self, prompt_tokens: int, cached_tokens: int) -> None:
        """A generation runs for the first time."""

    def token(self, seconds: float, first: bool) -> None:
        """A token came so long after the one before, or the first so long after arrival."""

    def preempted(self) -> None:
        """A generation was paused for want of cache."""

    def ended(self, outcome: str, seconds: float) -> None:
        """A generation ended, so long after arrival."""


@dataclass(frozen=True)
class Load:
    """How busy a scheduler is."""

    waiting: int
    running: int
    free_tokens: int
    cache_tokens: int
    kept_prefixes: int


class Scheduler:
    """Runs generations on one engine. `submit`, `cancel`, `stop` and `load` may be called from any
    thread."""

    def __init__(
        self,
        engine: InferenceEngine,
        *,
        max_queue: int = 128,
        max_running: int = 32,
        prefill_slice: int = 64,
        prefill_alone: int = 512,
        kept_prefixes: int = 64,
        observer: Observer | None = None,
    ) -> None:
        """`prefill_slice`: prompt tokens a step while others wait for their next token;
        `prefill_alone`: while nobody does, if that is more."""
        self.capacity = min(engine.context_length, engine.free_tokens)
        """Most tokens of one generation, prompt included."""
        self.max_queue, self.max_running = max_queue, max_running
        self._engine = engine
        self._slices = (prefill_slice, max(prefill_slice, prefill_alone))
        self._observer = observer or Observer()
        self._prefixes = PrefixCache(kept_prefixes)
        self._waiting: deque[Generation] = deque()
        self._running: list[Generation] = []
        self._wake = threading.Condition()
        self._stop_at: float | None = None
        self._cache_tokens = self._free_tokens = engine.free_tokens
        self._thread = threading.Thread(target=self._loop, name="scheduler", daemon=True)

    def start(self) -> None:
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
        generations = [Generation(request) for request in requests]
        with self._wake:
            if self._stop_at is not None:
                raise Stopping("the server is shutting down")
            room = self.max_queue + max(self.max_running - len(self._running), 0)
            if len(self._waiting) + len(generations) > room:
                raise QueueFull(f"{len(self._waiting)} requests are waiting already; try later")
            self._waiting.extend(generations)
            self._wake.notify()
        return generations

    def cancel(self, generation: Generation) -> None:
        """End a generation soon; does nothing if it has ended."""
        generation.cancel_asked.set()
        with self._wake:
            self._wake.notify()

    def stop(self, grace: float = 0.0) -> None:
        """Take no more requests, end waiting ones now and running ones after `grace` seconds at the
        latest. Returns at once; the thread ends when all have ended."""
        with self._wake:
            if self._stop_at is None:
                self._stop_at = time.monotonic() + grace
            else:
                self._stop_at = min(self._stop_at, time.monotonic() + grace)
            self._wake.notify()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the thread; whether it has ended."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def stopping(self) -> bool:
        return self._stop_at is not None

    def load(self) -> Load:
        with self._wake:
            return Load(
                len(self._waiting),
                len(self._running),
                self._free_tokens,
                self._cache_tokens,
                len(self._prefixes),
            )

    def _loop(self) -> None:
        while True:
            with self._wake:
                while not (self._waiting or self._running or self.stopping):
                    self._wake.wait()
                if self.stopping and not (self._waiting or self._running):
                    break
            try:
                self._step()
            except Exception as error:
                # A defect of ours must not silence the server: those it hit end with an error.
                _log.exception("a step of the scheduler failed")
                for generation in list(self._running):
                    self._fail(generation, error)
            self._free_tokens = self._engine.free_tokens
        self._prefixes.clear()
        self._free_tokens = self._engine.free_tokens

    def _step(self) -> None:
        self._end_unwanted()
        self._admit()
        scored = [generation for generation in self._running if generation.scores_wanted]
        for generation in scored:
            self._forward([(generation, min(_SCORED_SLICE, generation.missing))], "all")
        batch = shares([g for g in self._running if g not in scored], *self._slices)
        ready = any(size == generation.missing for generation, size in batch)
        if batch:
            self._forward(batch, "last" if ready else "none")

    def _end_unwanted(self) -> None:
        with self._wake:
            waiting = list(self._waiting)
            stop_at = self._stop_at
        late = stop_at is not None and time.monotonic() >= stop_at
        for generation in waiting:
            if generation.cancel_asked.is_set():
                self._end(generation, "cancelled")
            elif late or (stop_at is not None and not generation.started):
                self._end(generation, "shutdown")
        for generation in list(self._running):
            if generation.cancel_asked.is_set():
                self._end(generation, "cancelled")
            elif late:
                self._end(generation, "shutdown")

    def _admit(self) -> None:
        """Let waiting generations in, in order, while there is room."""
        with self._wake:
            waiting = list(self._waiting)
        for generation in waiting:
            if len(self._running) >= self.max_running:
                return
            # The last token is computed again, for its logits.
            tokens = np.asarray(generation.tokens[:-1], dtype=np.int32)
            source, shared = None, 0
            if not generation.scores_wanted:
                running = [(g.sequence, g.prompt_array[: g.in_cache]) for g in self._running]
                source, shared = self._prefixes.longest(tokens, running)
                if self._shares_more_with_one_on_its_way(tokens, shared):
                    continue
            try:
                if not self._start(generation, source, shared):
                    return
            except Exception as error:
                self._fail(generation, error)

    def _shares_more_with_one_on_its_way(self, tokens: np.ndarray, shared: int) -> bool:
        for other in self._running:
            coming = shared_length(other.prompt_array, tokens)
            if coming >= shared + _WORTH_WAITING and coming > other.in_cache:
                return True
        return False

    def _start(self, generation: Generation, source: EngineSequence | None, shared: int) -> bool:
        """Open its sequence; False if there is no room as long as others run."""
        sequence = None
        while True:
            try:
                if sequence is None:
                    sequence = source.fork(shared) if source else self._engine.new_sequence()
                needed = len(generation.tokens) - shared + _PAGE
                needed += sum(_PAGE + other.missing for other in self._running)
                if self._engine.free_tokens >= needed or not (self._running or self._prefixes):
                    break
            except CacheFull:
                # Nothing can be shared while everything is full.
                source, shared = None, 0
            if not self._prefixes.evict():
                if not self._running:
                    continue
                if sequence is not None:
                    sequence.close()
                return False
        with self._wake:
            self._waiting.remove(generation)
            self._running.append(generation)
        generation.sequence = sequence
        if not generation.started:
            generation.started, generation.cached = True, shared
            self._observer.started(len(generation.request.prompt), shared)
        return True

    def _forward(self, batch: list[tuple[Generation, int]], which: WhichLogits) -> None:
        """Compute, making room in the cache where needed, then choose the tokens."""
        while batch := [(g, size) for g, size in batch if g.sequence is not None]:
            try:
                results = self._run(batch, which)
                break
            except CacheFull as error:
                if self._prefixes.evict():
                    continue
                if len(self._running) == 1:
                    self._fail(self._running[0], error)
                else:
                    self._pause(self._running[-1])
            except Exception as error:
                if len(batch) == 1:
                    self._fail(batch[0][0], error)
                    return
                # One of them may be the cause; the others go on alone.
                for one in batch:
                    self._forward([one], which)
                return
        if batch and which != "none":
            self._take([generation for generation, _ in batch], results, which)

    def _run(self, batch: list[tuple[Generation, int]], which: WhichLogits) -> list[np.ndarray]:
        entries = []
        for generation, size in batch:
            assert generation.sequence is not None
            at = generation.in_cache
            entries.append((generation.sequence, generation.tokens[at : at + size]))
        before = [len(sequence) for sequence, _ in entries]
        try:
            return self._engine.forward(entries, which)
        except Exception:
            for (sequence, _), length in zip(entries, before, strict=True):
                if len(sequence) > length:
                    sequence.truncate(length)
            raise

    def _take(
        self, generations: list[Generation], results: list[np.ndarray], which: WhichLogits
    ) -> None:
        """Choose the next token of each whose tokens are all computed."""
        for generation, logits in zip(generations, results, strict=True):
            try:
                if which == "all":
                    generation.take_prompt_logits(logits)
                if not generation.missing:
                    last = logits[-1] if which == "all" else logits
                    self._hand_out(generation, generation.take_logits(last))
            except Exception as error:
                self._fail(generation, error)

    def _hand_out(self, generation: Generation, output: Output) -> None:
        if generation.generated:
            now = time.perf_counter()
            since = generation.last_token_at or generation.arrived
            self._observer.token(now - since, generation.last_token_at is None)
            generation.last_token_at = now
        if output.finish is not None:
            self._end(generation, output.finish, output)
        elif output.text or output.scores:
            generation.request.deliver(generation, output)

    def _pause(self, generation: Generation) -> None:
        generation.forget()
        with self._wake:
            self._running.remove(generation)
            self._waiting.appendleft(generation)
        self._observer.preempted()

    def _fail(self, generation: Generation, error: Exception) -> None:
        if generation.finish is not None:
            return
        _log.error("a generation failed: %r", error, exc_info=not isinstance(error, UserError))
        generation.error = str(error) if isinstance(error, UserError) else type(error).__name__
        self._end(generation, "error")

    def _end(self, generation: Generation, why: FinishReason, output: Output | None = None) -> None:
        generation.finish = why
        with self._wake:
            for group in (self._running, self._waiting):
                if generation in group:
                    group.remove(generation)
        if why == "error":
            generation.forget()
        sequence, generation.sequence = generation.sequence, None
        if sequence is not None:
            held = generation.tokens[: len(sequence)]
            self._prefixes.keep(sequence, np.asarray(held, dtype=np.int32))
        self._observer.ended(why, time.perf_counter() - generation.arrived)
        try:
            generation.request.deliver(generation, output or Output("", (), why))
        except Exception:
            _log.exception("the receiver of a generation failed")
