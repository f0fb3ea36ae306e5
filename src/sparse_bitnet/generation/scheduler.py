# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: in each step every running generation gets one token and new prompts a slice, so
that long prompts do not hold up the others.

Sequences of ended generations are kept while the cache has room, and later prompts start from them.
When the cache is full, kept sequences go first; then the youngest generation is paused: its sequence is
closed, and computed again from its tokens when there is room.
"""

import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from sparse_bitnet.engine.protocol import (
    CacheFull,
    ContextFull,
    EngineSequence,
    InferenceEngine,
    WhichLogits,
)
from sparse_bitnet.errors import UserError
from sparse_bitnet.generation.prefix_cache import PrefixCache, shared_length
from sparse_bitnet.generation.request import FinishReason, Generation, GenerationRequest, Output
from sparse_bitnet.generation.speculation import Speculation

_PREFILL_ALONE = 512
_WORTH_WAITING = 32
"""A prompt waits for another that is being computed if they share this many tokens more."""


class Observer:
    """Receives events for metrics. Called from the scheduler's thread."""

    def token(self, seconds: float, first: bool) -> None:
        """A token came `seconds` after the one before, or the first one after the request's arrival."""

    def ended(self, generation: Generation) -> None:
        """A generation ended; its fields are final."""


def shares(
    generations: Sequence[Generation], prefill_slice: int, prefill_alone: int
) -> list[tuple[Generation, int]]:
    """Return how many tokens of each generation to compute in a step: one for those that decode, equal
    parts of a slice for those in prefill.

    Args:
        prefill_slice: total of prompt tokens while one generation decodes; one fewer for every two that
            decode, down to a quarter, so that a step of a large batch does not take twice as long.
        prefill_alone: total of prompt tokens while none decodes.
    """
    prompts = [generation for generation in generations if generation.missing > 1]
    generating = len(generations) - len(prompts)
    fewer = max(prefill_slice - generating // 2, prefill_slice // 4, 1)
    budget = fewer if generating else prefill_alone
    sizes: dict[Generation, int] = {}
    # Smallest first: long prompts get the tokens that short ones do not need.
    for index, generation in enumerate(sorted(prompts, key=lambda g: g.missing)):
        part = max(budget // (len(prompts) - index), 1)
        sizes[generation] = min(part, generation.missing)
        if end := generation.next_slice_end:
            sizes[generation] = min(sizes[generation], end - generation.in_cache)
        budget -= sizes[generation]
    return [(generation, sizes.get(generation, 1)) for generation in generations]


class Scheduler:
    """Runs generations on one engine, in the calling thread."""

    _room_ahead: int | None = None
    """A generation starts when the cache has room for this many further tokens of each; None: for all
    tokens that they may generate, so that none is ever paused."""

    def __init__(
        self,
        engine: InferenceEngine,
        *,
        max_running: int = 32,
        prefill_slice: int = _PREFILL_ALONE,
        prefixes: PrefixCache | None = None,
        speculation: Speculation | None = None,
        observer: Observer | None = None,
    ) -> None:
        """Create a scheduler.

        Args:
            max_running: maximum number of generations that run together.
            prefill_slice: prompt tokens per step while other generations decode. While none does, 512 if
                that is more. Logits for every token take at most 128 MiB.
            prefixes: sequences to start from, and to add to; default: a cache of its own.
            speculation: source of draft tokens, for this scheduler alone; default: no speculation.
        """
        self.capacity = min(engine.context_length, engine.free_tokens)
        """Most tokens of one generation, prompt included."""
        self.max_running = max_running
        self.delivered: Callable[[], None] = lambda: None
        """Called after the outputs of a forward or a step were delivered; must not block."""
        self._engine = engine
        self._slices = (prefill_slice, max(prefill_slice, _PREFILL_ALONE))
        self._most_scored = max(1, min(_PREFILL_ALONE, (1 << 25) // engine.vocab_size))
        self._observer = observer or Observer()
        self._speculation = speculation or Speculation(engine, most=0)
        self._owns_prefixes = prefixes is None
        self._prefixes = PrefixCache(64) if prefixes is None else prefixes
        self._waiting: deque[Generation] = deque()
        self._running: list[Generation] = []
        self._failed: list[Generation] = []
        self._lock = threading.Condition()
        """Guards the two lists: other threads may look at them and add to the waiting ones."""

    def run(self, requests: Iterable[GenerationRequest]) -> Iterator[Generation]:
        """Yield each request's generation when it has ended; only for a scheduler without a thread.
        Requests are taken as there is room.

        Raises the exception of a failed generation, and `UserError` for a prompt that is empty, has a
        token outside the vocabulary, or leaves too little of the context (`ContextFull`) or the cache
        (`CacheFull`). All sequences but those of `prefixes` are then closed.
        """
        source, most = iter(requests), self._engine.context_length
        try:
            while True:
                room = max(2 * self.max_running - len(self._waiting), 0)
                for request in itertools.islice(source, room):
                    self._check_tokens(request.prompt)
                    self._waiting.append(self._checked(request, most))
                if not (under_way := self._under_way()):
                    return
                self._step()
                for generation in self._failed:
                    assert generation.failure is not None
                    raise generation.failure
                yield from (g for g in under_way if g.finish_reason is not None)
        finally:
            # After an error the content of the sequences is unknown.
            for generation in self._running:
                generation.forget()
                self._speculation.forget(generation)
            if self._owns_prefixes:
                self._prefixes.clear()

    def _check_tokens(self, prompt: Sequence[int]) -> None:
        if not prompt:
            raise UserError("the prompt is empty: give at least one token")
        known = range(self._engine.vocab_size)
        if min(prompt) not in known or max(prompt) not in known:
            bad = next(token for token in prompt if token not in known)
            raise UserError(
                f"token {bad} is outside the model's vocabulary of {self._engine.vocab_size}: "
                "the tokenizer belongs to another model"
            )

    def _checked(self, request: GenerationRequest, most: int, group: int = 0) -> Generation:
        """Return a request's generation of at most `most` tokens. Raises `UserError` as `run` does."""
        prompt, new = request.prompt, request.max_tokens
        generation = Generation(request, group)
        # The last token of a prompt that is only scored is not computed.
        if (len(prompt) + new if new else generation.largest_cache(None)) > most:
            raise ContextFull(
                f"the prompt has {len(prompt):,} tokens and {new:,} new ones are requested, but "
                f"the context has room for {most:,}: request fewer, or shorten the prompt"
            )
        return generation

    def _step(self) -> None:
        try:
            self._end_unwanted()
            self._admit()
            wanted = {generation: generation.wanted for generation in self._running}
            batch = shares([g for g, which in wanted.items() if which != "all"], *self._slices)
            texts = [entry for entry in batch if wanted[entry[0]] == "last"]
            ready = any(size == g.missing and not g.is_before_scores for g, size in texts)
            drafted = self._with_drafts(texts)
            self._forward(drafted or texts, "all" if drafted else "last" if ready else "none")
            self._forward([entry for entry in batch if wanted[entry[0]] == "hidden"], "hidden")
            scored = [g for g, which in wanted.items() if which == "all"]
            most = min(self._slices[0] if batch else _PREFILL_ALONE, self._most_scored)
            self._forward(shares(scored, most, most), "all")
        except Exception as error:
            for generation in list(self._running):
                self._fail(generation, error)
        self.delivered()

    def _with_drafts(self, texts: list[tuple[Generation, int]]) -> list[tuple[Generation, int]]:
        """Return `texts` with draft tokens added to each one's next token; [] if there are no draft
        tokens, as during prefill."""
        drawing = [g for g, _ in texts if g.is_drawing]
        if len(drawing) < len(texts):
            return []
        for generation, draft in zip(drawing, self._speculation.propose(drawing), strict=True):
            generation.draft = draft
        entries = [(generation, 1 + len(generation.draft)) for generation in drawing]
        return entries if any(size > 1 for _, size in entries) else []

    def _end_unwanted(self) -> None:
        for generation in self._under_way():
            if generation.cancel_requested:
                self._end(generation, "cancelled")

    def _under_way(self) -> list[Generation]:
        with self._lock:
            return [*self._waiting, *self._running]

    def _admit(self) -> None:
        """Start waiting generations while there is room: in order, but groups take turns."""
        with self._lock:
            waiting = list(self._waiting)
        counts = Counter(generation.group for generation in self._running)
        turns: dict[Generation, int] = {}
        for generation in waiting:
            turns[generation] = counts[generation.group]
            counts[generation.group] += 1
        held: set[int] = set()
        for generation in sorted(waiting, key=turns.__getitem__):
            if len(self._running) >= self.max_running:
                return
            prompt = id(generation.request.prompt)
            if prompt in held:
                continue
            tokens = generation.shareable
            running = [(g.sequence, g.prompt_array[: g.in_cache]) for g in self._running]
            source, shared = self._prefixes.longest(tokens, running)
            if self._is_worth_waiting(tokens, shared):
                held.add(prompt)  # others with the same prompt wait too, without another comparison
                continue
            try:
                if not self._start(generation, source, shared):
                    return
            except Exception as error:
                self._fail(generation, error)

    def _is_worth_waiting(self, tokens: np.ndarray, shared: int) -> bool:
        """Whether a running prompt will share clearly more than `shared` tokens once it is computed."""
        for other in self._running:
            coming = shared_length(other.prompt_array, tokens)
            is_more = coming - shared >= _WORTH_WAITING or shared < coming == len(tokens)
            if is_more and coming > other.in_cache:
                if self._engine.most_states:
                    other.slice_end = min(other.next_slice_end or coming, coming)
                return True
        return False

    def _start(self, generation: Generation, source: EngineSequence | None, shared: int) -> bool:
        """Open the generation's sequence; return False if there is no room as long as others run."""
        while generation.sequence is None:
            try:
                generation.sequence = source.fork(shared) if source else self._engine.new_sequence()
            except CacheFull:
                # A full cache has no room for a fork: share nothing.
                source, shared = None, 0
                if not self._prefixes.evict() and self._running:
                    return False
        needed = sum(self._growth(other) for other in (generation, *self._running))
        # Kept sequences make room, so that each prompt has two states; first the source, if the new
        # sequence has all of its states but the latest.
        most = (self._engine.most_states or 1 << 40) // 2
        first = source if source and source.reusable(len(source) - 1) <= shared else None
        while self._prefixes and (
            self._engine.free_tokens < needed or len(self._running) + len(self._prefixes) >= most
        ):
            self._prefixes.evict(first)
        if self._engine.free_tokens < needed:
            generation.forget()
            if self._running:
                return False
            raise CacheFull(
                f"the cache has room for {self._engine.free_tokens:,} tokens, not for the "
                f"{generation.prompt_tokens:,} of the prompt and {generation.request.max_tokens:,} new "
                "ones: load the model with more cache, or request fewer"
            )
        with self._lock:
            self._waiting.remove(generation)
            self._running.append(generation)
        if not generation.started:
            generation.started, generation.cached_tokens = True, shared
        if generation.missing == 0:
            generation.take_prompt_logits(np.empty((0, self._engine.vocab_size), np.float32))
            self._hand_out(generation, Output("", (), "length"))
        return True

    def _growth(self, generation: Generation) -> int:
        """Return the tokens of cache, in whole pages, that a generation will need soon."""
        page = self._engine.page_tokens
        most = generation.largest_cache(self._room_ahead)
        return (-(-most // page) - -(-generation.in_cache // page)) * page

    def _forward(self, batch: list[tuple[Generation, int]], which: WhichLogits) -> None:
        """Compute the batch, making room in the cache if needed, then sample the tokens."""
        while batch := [(g, size) for g, size in batch if g.sequence is not None]:
            try:
                started = time.perf_counter()
                is_drawing = all(generation.is_drawing for generation, _ in batch)
                entries = [generation.entry(size) for generation, size in batch]
                results = self._engine.forward(entries, which)
                if is_drawing:
                    passed = time.perf_counter() - started
                    self._speculation.costs.add(sum(size for _, size in batch), passed)
                for (generation, _), logits in zip(batch, results, strict=which != "none"):
                    self._take(generation, logits, which)
                self.delivered()
                return
            except CacheFull as error:
                if self._prefixes.evict():
                    continue
                if which == "all" and any(generation.draft for generation, _ in batch):
                    for generation, _ in batch:
                        generation.draft = []
                    batch, which = [(generation, 1) for generation, _ in batch], "last"
                elif len(self._running) == 1:
                    self._fail(self._running[0], error)
                else:
                    self._pause(self._running[-1])
            except Exception as error:
                if len(batch) == 1:
                    self._fail(batch[0][0], error)
                    return
                # One of them may be the cause: compute each alone.
                for one in batch:
                    self._forward([one], which)
                return

    def _take(self, generation: Generation, results: np.ndarray, which: WhichLogits) -> None:
        """Deliver the outputs that a generation makes of its results."""
        drafted = len(generation.draft)
        try:
            outputs = generation.take(results, which)
            generation.draft_tokens += drafted
            generation.accepted_tokens += len(outputs) - 1 if drafted else 0
            for output in outputs:
                self._hand_out(generation, output)
        except Exception as error:
            self._fail(generation, error)

    def _hand_out(self, generation: Generation, output: Output) -> None:
        if generation.generated:
            now, before = time.perf_counter(), generation.last_token_at
            generation.first_token_at = generation.first_token_at or now
            generation.last_token_at = now
            self._observer.token(now - (before or generation.arrived), before is None)
        if output.finish is not None:
            self._end(generation, output.finish, output)
        else:
            generation.request.deliver(generation, output)

    def _pause(self, generation: Generation) -> None:
        generation.forget()
        with self._lock:
            self._running.remove(generation)
            self._waiting.appendleft(generation)
        self._speculation.forget(generation)
        generation.pauses += 1

    def _fail(self, generation: Generation, error: Exception) -> None:
        if generation.finish_reason is None:
            generation.failure = error
            self._failed.append(generation)
            self._end(generation, "error")

    def _end(self, generation: Generation, why: FinishReason, output: Output | None = None) -> None:
        generation.finish_reason = why
        self._speculation.forget(generation)
        with self._lock:
            for group in (self._running, self._waiting):
                if generation in group:
                    group.remove(generation)
        if why == "error":
            generation.forget()
        sequence, generation.sequence = generation.sequence, None
        if sequence is not None and generation.request.pooling is not None:
            # Texts for embeddings rarely share a prefix, and chats need the room.
            sequence.close()
        elif sequence is not None:
            held = generation.context[: len(sequence)]
            self._prefixes.keep(sequence, np.asarray(held, dtype=np.int32))
        self._observer.ended(generation)
        try:
            generation.request.deliver(generation, output or Output("", (), why))
        except Exception as error:
            generation.failure = error
            self._failed.append(generation)
