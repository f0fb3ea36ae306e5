"""Log-probabilities of given tokens, in pieces small enough for the logits of a large vocabulary."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sparse_bitnet.engine.protocol import EngineSequence, InferenceEngine
from sparse_bitnet.errors import UserError

_MOST_LOGITS = 1 << 25
"""Floats of one forward: 128 MiB."""

_MOST_TOKENS = 512
"""Of one forward without logits."""


@dataclass(eq=False)
class ScoreJob:
    """Tokens to append to a sequence, and the tokens that really followed."""

    sequence: EngineSequence
    tokens: Sequence[int]
    targets: Sequence[int]
    """What follows each of the last `len(targets)` of `tokens`; at most as many."""

    log_probabilities: list[float] = field(default_factory=list)
    """Natural logarithms, one for each target."""

    is_greedy: bool = True
    """Every target was the most likely token."""

    done: int = 0
    """Of `tokens`."""

    @property
    def unscored(self) -> int:
        """Tokens left before the first whose target counts."""
        return max(len(self.tokens) - len(self.targets) - self.done, 0)

    def take(self, logits: np.ndarray) -> None:
        """Score the next targets by float32 logits [tokens, vocab_size]."""
        start = len(self.log_probabilities)
        targets = np.asarray(self.targets[start : start + len(logits)], dtype=np.int64)
        peak = logits.max(axis=-1)
        if not np.isfinite(peak).all():
            raise UserError("the model's logits are not numbers: its weights are damaged")
        sums = np.exp(logits - peak[:, None]).sum(axis=-1, dtype=np.float64)
        chosen = logits[np.arange(len(targets)), targets]
        self.log_probabilities += (chosen - peak - np.log(sums)).tolist()
        self.is_greedy &= bool((logits.argmax(axis=-1) == targets).all())


def score(engine: InferenceEngine, jobs: Sequence[ScoreJob]) -> None:
    """Run all jobs together; each then holds its results.

    Raises `ContextFull` or `CacheFull` where the sequences do not fit, `UserError` for a target outside
    the vocabulary and for logits that are not numbers.
    """
    largest = max((max(job.targets) for job in jobs if job.targets), default=0)
    if largest >= engine.vocab_size:
        raise UserError(
            f"token {largest} is outside the model's vocabulary of {engine.vocab_size}: the text was "
            "tokenised for another model"
        )
    _run(engine, jobs, scored=False, most=_MOST_TOKENS)
    most = max(1, min(_MOST_TOKENS, _MOST_LOGITS // engine.vocab_size))
    _run(engine, jobs, scored=True, most=most)


def _run(engine: InferenceEngine, jobs: Sequence[ScoreJob], *, scored: bool, most: int) -> None:
    """Forward the tokens before the scored ones of all jobs, or the scored ones."""

    def left(job: ScoreJob) -> int:
        return len(job.tokens) - job.done if scored else job.unscored

    pending = deque(job for job in jobs if left(job))
    while pending:
        batch: list[tuple[EngineSequence, Sequence[int]]] = []
        pieces: list[tuple[ScoreJob, int]] = []
        room = most
        while pending and room:
            job = pending[0]
            size = min(room, left(job))
            batch.append((job.sequence, job.tokens[job.done : job.done + size]))
            pieces.append((job, size))
            job.done += size
            room -= size
            if not left(job):
                pending.popleft()
        found: list[Any] = engine.forward(batch, "all" if scored else "none")
        for (job, _), logits in zip(pieces, found, strict=False):
            job.take(logits)
