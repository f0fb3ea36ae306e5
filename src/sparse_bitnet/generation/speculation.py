# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: draft tokens are computed together with the next token, and accepted where
sampling gives the same tokens.

The logits of a draft token are those of decoding one token at a time, so sampling is unchanged. The first
draft token that differs from the sampled one ends the draft. The text equals that without speculation,
token for token, sampled or greedy, under any penalty or grammar. So does its distribution (Leviathan et
al. 2023, with a deterministic draft: accepted with the model's probability, else drawn from the rest).

Draft tokens come from the text itself (prompt lookup: the tokens that followed its last tokens before).
Their number is estimated from measured times of forwards on this machine, and from the acceptance rate of
similar drafts, which is updated without computing anything, so a text without repetitions costs nothing.
"""

from bisect import bisect
from collections.abc import Sequence

import numpy as np

from sparse_bitnet.engine.protocol import InferenceEngine
from sparse_bitnet.generation.request import Generation

MOST_STREAMS = 8
"""Largest number of concurrent texts with draft tokens; more texts fill a forward by themselves."""

_NGRAMS = (1, 2, 3)
_MATCHES = (2, 3, 4, 6, 9)
"""Numbers of repeated tokens that divide drafts into classes, each with an acceptance rate of its own."""

_FIRST_RATES = (0.1, 0.2, 0.3, 0.5, 0.65, 0.8)
"""Initial acceptance rate of each class; typical of source code (Python's standard library)."""

_MEMORY = 0.05
"""Moving-average weight of a new acceptance; times five, that of a newly measured forward time."""

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


class Speculation:
    """Draft tokens for the generations of one scheduler."""

    def __init__(self, engine: InferenceEngine, *, most: int = 7) -> None:
        """Create a source of draft tokens.

        Args:
            engine: target engine; the logits of a token must not depend on the rest of the batch. One
                that cannot rewind gets no draft tokens.
            most: largest number of draft tokens for one text at a time.
        """
        self.costs = ForwardCosts()
        self._most = 0 if engine.most_states else most
        self._lookups: dict[Generation, PromptLookup] = {}

    def propose(self, generations: Sequence[Generation]) -> list[list[int]]:
        """Return draft tokens for each generation, to be computed together with its next token."""
        if self._most == 0 or not generations or len(generations) > MOST_STREAMS:
            return [[] for _ in generations]
        drafts, chances = [], []
        for generation in generations:
            lookup = self._lookups.setdefault(generation, PromptLookup())
            lookup.read(generation.context)
            room = min(self._most, generation.request.max_tokens - generation.generated - 1)
            draft, own = lookup.propose(generation.context, room)
            drafts.append(draft)
            chances.append(own)
        sizes = self._sizes(chances)
        return [draft[:size] for draft, size in zip(drafts, sizes, strict=True)]

    def forget(self, generation: Generation) -> None:
        """Free the state of a generation that no longer runs."""
        self._lookups.pop(generation, None)

    def _sizes(self, chances: Sequence[Sequence[float]]) -> list[int]:
        """Return how many draft tokens of each text give the most tokens a second."""
        # A token is never likelier than those before it, so the best ones are a prefix of each draft.
        tokens = sorted(
            ((chance, which) for which, own in enumerate(chances) for chance in own),
            key=lambda entry: -entry[0],
        )
        texts, best = len(chances), 0
        expected = float(texts)
        rate = _WORTH * expected / self.costs.seconds(texts)
        for count, (chance, _) in enumerate(tokens, 1):
            expected += chance
            faster = expected / self.costs.seconds(texts + count)
            if faster > rate:
                rate, best = faster, count
        sizes = [0] * texts
        for _, which in tokens[:best]:
            sizes[which] += 1
        return sizes
