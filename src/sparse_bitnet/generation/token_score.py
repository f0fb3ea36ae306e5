# SPDX-License-Identifier: Apache-2.0
"""A token's log-probability, and those of the likeliest tokens at its place."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from sparse_bitnet.generation.sampling import check_largest


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token, its natural log-probability before sampling's changes, and the likeliest tokens there."""

    token: int
    logprob: float | None
    """None for the first token of a prompt, which nothing precedes."""
    top: tuple[tuple[int, float], ...] = ()


def score(logits: np.ndarray, token: int, top: int) -> TokenScore:
    """The token's natural log-probability under float32 logits [vocab_size], and the `top` likeliest
    (ties: the lower token first).

    Raises `UserError` for logits that are not numbers.
    """
    best = int(logits.argmax())
    peak = float(logits[best])
    check_largest(peak)
    powers = np.subtract(logits, peak, dtype=np.float64)
    total = peak + math.log(np.exp(powers, out=powers).sum())
    order: Iterable[int] = ()
    if (top := min(top, len(logits))) == 1:
        order = (best,)
    elif top:
        # The partition may leave some of equal values out, so everything as high as its last counts.
        least = np.partition(logits, -top)[-top]
        found = np.flatnonzero(logits >= least)
        order = found[np.argsort(-logits[found], kind="stable")][:top]
    likeliest = tuple((int(index), _finite(float(logits[index]) - total)) for index in order)
    return TokenScore(token, _finite(float(logits[token]) - total), likeliest)


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes this for tokens that are out of the question."""
    return max(float(logprob), -9999.0)
