# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: draft tokens are computed together with the next token, and accepted where
sampling gives the same tokens.

The logits of a draft token are those of decoding one token at a time, so sampling is unchanged. The
first draft token that differs from the sampled one ends the draft. The text equals that without
speculation, token for token, sampled or greedy, under any penalty or grammar. So does its distribution
(Leviathan et al. 2023, with a deterministic draft: accepted with the model's probability, else drawn
from the rest).

Draft tokens come from the text itself (prompt lookup: the tokens that followed its last tokens before)
or from a draft model. Their number is estimated from measured times of forwards on this machine, and
from the acceptance rate of similar drafts. Prompt lookup updates that rate without computing anything,
so a text without repetitions costs nothing.
"""

from bisect import bisect
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from sparse_bitnet.engine.protocol import CacheFull, EngineSequence, InferenceEngine
from sparse_bitnet.generation.prefix_cache import shared_length
from sparse_bitnet.generation.request import Generation

MOST_STREAMS = 8
"""Largest number of concurrent texts with draft tokens; more texts fill a forward by themselves."""

_NGRAMS = (1, 2, 3)
_MATCHES = (2, 3, 4, 6, 9)
"""Numbers of repeated tokens that divide drafts into classes, each with an acceptance rate of its own."""

_FIRST_RATES = (0.1, 0.2, 0.3, 0.5, 0.65, 0.8)
"""Initial acceptance rate of each class; typical of source code (Python's standard library)."""

_MEMORY = 0.05
"""Share of the latest count in a rate and, times five, of the latest forward in its cost."""

_WORTH = 1.05
"""Minimum expected speedup before a draft is used; absorbs timing noise."""

_UNKNOWN_COST = 0.15
"""Cost of a further token in a forward, as a share of one token's, before any is measured."""


class PromptLookup:
    """Drafts the tokens that followed the last tokens of a text when they last occurred in it."""

    def __init__(self) -> None:
        self._after: tuple[dict[int, int], ...] = tuple({} for _ in _NGRAMS)
        self._read = self._source = self._matched = 0
        self._rates = list(_FIRST_RATES)

    def read(self, context: Sequence[int]) -> None:
        """Add the tokens that `context` has gained since the last call."""
        for place in range(self._read, len(context)):
            if self._source:
                is_right = context[self._source] == context[place]
                kind = bisect(_MATCHES, self._matched)
                self._rates[kind] += (is_right - self._rates[kind]) * _MEMORY
                self._source, self._matched = (
                    (self._source + 1, self._matched + 1) if is_right else (0, 0)
                )
            key = 0
            for count, after in zip(_NGRAMS, self._after, strict=True):
                if count > place + 1:
                    break
                key = key << 32 | context[place + 1 - count]
                if self._matched < count and key in after:
                    self._source, self._matched = after[key], count
                after[key] = place + 1
        self._read = len(context)

    def propose(self, context: Sequence[int], most: int) -> tuple[list[int], list[float]]:
        """Return draft tokens, and for each the probability that it and those before it are accepted."""
        if not self._source:
            return [], []
        tokens = list(context[self._source : self._source + most])
        chances, chance = [], 1.0
        for place in range(len(tokens)):
            chance *= self._rates[bisect(_MATCHES, self._matched + place)]
            chances.append(chance)
        return tokens, chances


class ForwardCosts:
    """Measured seconds of a forward, by its number of tokens."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def add(self, tokens: int, seconds: float) -> None:
        """Record a forward of `tokens` that took `seconds`."""
        before = self._seconds.get(tokens, seconds)
        self._seconds[tokens] = before + (seconds - before) * 5 * _MEMORY

    def seconds(self, tokens: int) -> float:
        """Return the measured time, or an estimate from the nearest; without any, 1.0 per forward."""
        known = sorted(self._seconds)
        if not known:
            return 1.0 + _UNKNOWN_COST * tokens
        beyond = max(tokens - known[-1], 0) / known[-1]
        seconds = np.interp(tokens, known, [self._seconds[count] for count in known])
        return float(seconds) * (1 + _UNKNOWN_COST * beyond)


@dataclass(eq=False)
class _Text:
    lookup: PromptLookup = field(default_factory=PromptLookup)
    sequence: EngineSequence | None = None
    """The draft model's sequence."""
    draft_rate: float = 0.6
    draft: list[int] = field(default_factory=list)
    drafted: bool = False
    before: int = 0
    """Length of the text, in tokens, when the draft was made."""


class Speculation:
    """Draft tokens for the generations of one scheduler."""

    def __init__(
        self, engine: InferenceEngine, *, most: int = 7, draft: InferenceEngine | None = None
    ) -> None:
        """Create a source of draft tokens.

        Args:
            engine: target engine; the logits of a token must not depend on the rest of the batch. One
                that cannot rewind gets no draft tokens.
            most: largest number of draft tokens for one text at a time.
            draft: an engine with a smaller model of the same tokenizer; its owner closes it.
        """
        self.costs = ForwardCosts()
        self._engine, self._most = engine, 0 if engine.most_states else most
        self._draft = draft
        self._draft_seconds = 0.0
        """Seconds that the draft model takes for a token."""
        self._texts: dict[Generation, _Text] = {}

    def propose(self, generations: Sequence[Generation]) -> list[list[int]]:
        """Return draft tokens for each generation, to be computed together with its next token."""
        if self._most == 0 or not generations or len(generations) > MOST_STREAMS:
            return [[] for _ in generations]
        texts = [self._texts.setdefault(generation, _Text()) for generation in generations]
        chances = []
        for generation, text in zip(generations, texts, strict=True):
            # Count the accepted tokens of the draft model's last draft.
            for drafted, token in zip(
                text.draft if text.drafted else (), generation.context[text.before :], strict=False
            ):
                text.draft_rate += ((drafted == token) - text.draft_rate) * 3 * _MEMORY
                if drafted != token:
                    break
            text.before = len(generation.context)
            text.lookup.read(generation.context)
            room = min(self._most, generation.request.max_tokens - generation.generated - 1)
            text.draft, own = text.lookup.propose(generation.context, room)
            text.drafted = self._draft is not None and (not own or own[0] < text.draft_rate)
            if text.drafted:
                # Rates return slowly to one half, so that a draft model that failed is tried again.
                text.draft_rate += (0.5 - text.draft_rate) * _MEMORY / 5
                own = [text.draft_rate ** (place + 1) for place in range(room)]
            chances.append(own)
        sizes = self._sizes(chances, texts)
        for generation, text, size in zip(generations, texts, sizes, strict=True):
            if text.drafted:
                tokens = self._drafted(text, generation.context, size) if size else []
                text.draft = [token for token in tokens if token < self._engine.vocab_size]
            del text.draft[size:]
        return [text.draft for text in texts]

    def _drafted(self, text: _Text, context: Sequence[int], most: int) -> list[int]:
        """Return at most `most` tokens of the draft model; fewer if its context or cache is full, none
        after a token that it lacks."""
        engine = self._draft
        assert engine is not None
        drafted: list[int] = []
        with suppress(CacheFull):
            sequence = text.sequence = text.sequence or engine.new_sequence()
            shared = shared_length(np.asarray(sequence.tokens), np.asarray(context[:-1]))
            sequence.truncate(shared)
            most = min(most, engine.context_length - len(context) + 1)
            new = list(context[shared:])
            # Models with one tokenizer can differ in their number of unused tokens.
            if most < 1 or max(new) >= engine.vocab_size:
                return []
            while len(drafted) < most:
                started = perf_counter()
                (logits,) = engine.forward([(sequence, new)])
                new = [int(logits.argmax())]
                drafted += new
                if len(drafted) > 1:
                    passed = perf_counter() - started
                    self._draft_seconds += (passed - self._draft_seconds) * 5 * _MEMORY
        return drafted

    def forget(self, generation: Generation) -> None:
        """Free the state of a generation that no longer runs."""
        text = self._texts.pop(generation, None)
        if text is not None and text.sequence is not None:
            text.sequence.close()

    def _sizes(self, chances: Sequence[Sequence[float]], texts: Sequence[_Text]) -> list[int]:
        """Return how many draft tokens of each text give the most tokens a second."""
        # A token is never likelier than those before it, so the best ones are a prefix of each draft.
        tokens = sorted(
            ((chance, which) for which, own in enumerate(chances) for chance in own),
            key=lambda entry: -entry[0],
        )
        expected, extra, best = float(len(texts)), 0.0, 0
        rate = _WORTH * expected / self.costs.seconds(len(texts))
        for count, (chance, which) in enumerate(tokens, 1):
            expected += chance
            extra += self._draft_seconds * texts[which].drafted
            faster = expected / (self.costs.seconds(len(texts) + count) + extra)
            if faster > rate:
                rate, best = faster, count
        sizes = [0] * len(texts)
        for _, which in tokens[:best]:
            sizes[which] += 1
        return sizes
