# SPDX-License-Identifier: Apache-2.0
"""Sampling of the next token from logits, by transformers' definitions, in NumPy.

The processors and their order are those of transformers' `generate`: bias, repetition penalty,
temperature, top-k, top-p, min-p; OpenAI's two penalties come after the repetition penalty. Only tokens
that can still be sampled are processed further, so that a vocabulary of 150,000 is never sorted.
"""

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from sparse_bitnet.errors import UserError
from sparse_bitnet.generation.sampling_options import SamplingOptions

_FEW = 256
"""Maximum number of tokens to sort; more are first divided into bins of scores."""

_BINS = 1024
"""Number of bins."""

_BLOCK = 512
"""Tokens per block of the running sum; single tokens are added only in the block that is hit."""


class Candidates(NamedTuple):
    """The tokens that may be sampled."""

    tokens: np.ndarray
    """int64, ascending."""
    scores: np.ndarray
    """float32, processed logits of the same length."""


def candidates(
    logits: np.ndarray,
    seen: np.ndarray | Sequence[int],
    options: SamplingOptions,
    counts: Mapping[int, int] | None = None,
) -> Candidates:
    """Return the tokens that may be sampled and their logits after all processors; temperature 0 leaves
    one token. Tokens at minus infinity are never sampled.

    Args:
        logits: float32 [vocab_size], not written to.
        seen: tokens of prompt and output so far, for the repetition penalty; duplicates count once.
        counts: count of each token of the output so far, for the other two penalties.

    Raises `UserError` for logits that are not numbers (a damaged model).
    """
    scores = _biased(logits, options.logit_bias)
    scores = _penalised(scores, seen, options.repetition_penalty)
    if counts:
        each, once = options.frequency_penalty, options.presence_penalty
        taken = [(token, -each * count - once) for token, count in counts.items()]
        scores = _biased(scores, taken)
    best = int(scores.argmax())
    check_largest(scores[best])
    if options.is_greedy:
        return Candidates(np.array([best]), scores[best : best + 1])
    scores = _divided(scores, options.temperature)
    kept = Candidates(_all_tokens(len(scores)), scores)
    if 0 < options.top_k < len(scores):
        # Tokens as likely as the last of the k stay, as in transformers.
        least = np.partition(scores, -options.top_k)[-options.top_k]
        kept = _take(kept, np.flatnonzero(scores >= least))
    if options.top_p < 1:
        kept = _take(kept, _top_p(kept.scores, options.top_p))
    if options.min_p > 0:
        # Relative to the most likely token, whose power is 1.
        kept = _take(kept, np.flatnonzero(_powers(kept.scores) >= np.float32(options.min_p)))
    return kept


def check_largest(logit: float) -> None:
    """Raise `UserError` if the largest of all logits (NaN counts as largest) is not a number."""
    if not math.isfinite(logit):
        raise UserError(f"the model's largest logit is {logit}: its weights are damaged")


def _divided(scores: np.ndarray, temperature: float) -> np.ndarray:
    """Divide by the temperature, float32. If the largest overflows, all are lowered first; that does not
    change the probabilities."""
    with np.errstate(over="ignore"):
        divided = scores / np.float32(temperature)
        if not math.isfinite(divided.max()):
            divided = (scores - scores.max()) / np.float32(temperature)
    return divided


@functools.lru_cache(maxsize=2)
def _all_tokens(count: int) -> np.ndarray:
    return np.arange(count)


def _take(kept: Candidates, places: np.ndarray) -> Candidates:
    return Candidates(kept.tokens[places], kept.scores[places])


def _biased(logits: np.ndarray, bias: Sequence[tuple[int, float]]) -> np.ndarray:
    """Add a bias; tokens beyond the vocabulary are ignored."""
    known = [entry for entry in bias if entry[0] < len(logits)]
    if not known:
        return logits
    scores = logits.copy()
    scores[[token for token, _ in known]] += np.array([added for _, added in known], np.float32)
    return scores


def _penalised(logits: np.ndarray, seen: np.ndarray | Sequence[int], penalty: float) -> np.ndarray:
    if penalty == 1 or not len(seen):
        return logits
    tokens = np.asarray(seen, dtype=np.int64)
    tokens = tokens[tokens < len(logits)]
    scores = logits.copy()
    own = logits[tokens]
    with np.errstate(over="ignore"):
        scores[tokens] = np.where(own < 0, own * np.float32(penalty), own / np.float32(penalty))
    return scores


def _powers(scores: np.ndarray) -> np.ndarray:
    """Return probabilities up to a factor, float32; 1 for the most likely token."""
    with np.errstate(over="ignore"):
        return np.exp(scores - scores.max())


def _top_p(scores: np.ndarray, top_p: float) -> np.ndarray:
    """Return the ascending places of the tokens that remain when the least likely ones are removed whose
    probabilities, added from below, reach at most 1 - top_p; of equally likely tokens the first go first.

    The cut is searched in bins of the scores, and in the bins of that bin, so that only a few tokens
    around it are sorted.
    """
    probabilities = _powers(scores)
    probabilities /= probabilities.sum()
    # All tokens below this limit together have less than 1 - top_p.
    places = np.flatnonzero(probabilities > 0.99 * (1 - top_p) / len(scores))
    above = 0.0
    while len(places) > _FEW:
        below = scores[places]
        most = below.max()
        np.subtract(most, below, out=below)
        if not (widest := below.max()):
            break
        below /= widest
        below *= _BINS
        bins = np.minimum(below.astype(np.intp), _BINS - 1)
        masses = np.bincount(bins, probabilities[places])
        reached = above + np.cumsum(masses)
        cut = min(int(np.searchsorted(reached, top_p)), len(masses) - 1)
        above += float(masses[:cut].sum())
        # Indexing by number is several times as fast as by an irregular mask.
        places = places[np.flatnonzero(bins == cut)]
    order = places[np.argsort(scores[places], kind="stable")]
    some = probabilities[order]
    from_below = 1 - above - float(some.sum(dtype=np.float64)) + np.cumsum(some, dtype=np.float64)
    stays = from_below.astype(np.float32) > np.float32(1 - top_p)
    if above == 0:
        stays[-1:] = True
    kept = probabilities > some[-1]
    kept[order[stays]] = True
    return np.flatnonzero(kept)


def uniform(seed: int, place: int) -> float:
    """Return a number in [0, 1) that depends on both arguments only."""
    bits = np.random.Philox(key=seed, counter=[place, 0, 0, 0]).random_raw()
    return (int(bits) >> 11) * 2.0**-53


def _place_of(powers: np.ndarray, chance: float) -> int:
    """Return where the running sum of `powers` passes the share `chance` of the whole."""
    blocks = np.cumsum(np.add.reduceat(powers, np.arange(0, len(powers), _BLOCK)), dtype=np.float64)
    wanted = chance * blocks[-1]
    # Stay inside, in case rounding makes the product the whole sum.
    block = min(int(np.searchsorted(blocks, wanted, side="right")), len(blocks) - 1)
    before = blocks[block - 1] if block else 0.0
    inside = before + np.cumsum(powers[block * _BLOCK : (block + 1) * _BLOCK], dtype=np.float64)
    place = block * _BLOCK + int(np.searchsorted(inside, wanted, side="right"))
    if place == block * _BLOCK + len(inside):
        # The block's float32 sum was larger: take its last token that can be sampled.
        place = int(np.flatnonzero(powers[:place])[-1])
    return place


class Sampler:
    """Samples the tokens of one output, one after another.

    The n-th sample depends on the logits, the options and n alone: not on the rest of a batch, nor on
    how the work was split up.
    """

    def __init__(self, options: SamplingOptions, prompt: Sequence[int]) -> None:
        self._options = options
        self._place = 0
        self._seen = dict.fromkeys(prompt) if options.repetition_penalty != 1 else {}
        self._counts: Counter[int] = Counter()

    def draw(self, logits: np.ndarray) -> int:
        """Return the id of the next token, sampled from float32 logits [vocab_size], which are not
        written to. Raises `UserError` for logits that are not numbers."""
        seen = np.fromiter(self._seen, np.int64, len(self._seen))
        kept = candidates(logits, seen, self._options, self._counts)
        token = int(kept.tokens[0])
        if len(kept.tokens) > 1:
            chance = uniform(self._options.seed, self._place)
            token = int(kept.tokens[_place_of(_powers(kept.scores), chance)])
        self._place += 1
        if self._options.repetition_penalty != 1:
            self._seen[token] = None
        if self._options.frequency_penalty or self._options.presence_penalty:
            self._counts[token] += 1
        return token
