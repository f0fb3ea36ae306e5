"""One generation as the scheduler sees it: what was asked, how far it is, what has come out."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from sparse_bitnet.engine.protocol import EngineSequence
from sparse_bitnet.generation.sampling import Sampler, check_largest
from sparse_bitnet.generation.stop import StopStrings
from sparse_bitnet.generation.text import TextStream, TextTokenizer

FinishReason = Literal["stop", "length", "cancelled", "shutdown", "error"]


class GeneratedText:
    """The text of one generation, token by token: whole characters, up to a stop string."""

    def __init__(
        self, tokenizer: TextTokenizer, stop: Sequence[str] = (), *, is_start: bool = False
    ) -> None:
        """`is_start`: see `TextStream`; for answers, which continue no text."""
        self._stream = TextStream(tokenizer, is_start=is_start)
        self._stop = StopStrings(stop)

    @property
    def stopped(self) -> bool:
        """A stop string has come; nothing further will be given out."""
        return self._stop.found is not None

    def add(self, token: int) -> str:
        """The text that has become certain with this token."""
        return self._stop.feed(self._stream.feed(token))

    def flush(self) -> str:
        """What was held back, when no token follows."""
        return self._stop.feed(self._stream.flush()) + self._stop.flush()


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token, its natural log-probability before sampling's changes, and the likeliest tokens there."""

    token: int
    logprob: float | None
    """None for the first token of a prompt, which nothing precedes."""
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Output:
    """Something new of a generation. The last one has `finish`."""

    text: str
    scores: tuple[TokenScore, ...] = ()
    finish: FinishReason | None = None

    def then(self, other: "Output") -> "Output":
        """Both as one."""
        return Output(self.text + other.text, self.scores + other.scores, other.finish)


@dataclass(kw_only=True)
class GenerationRequest:
    """What to generate."""

    prompt: Sequence[int]
    """Token ids, at least one, each in [0, vocab_size)."""

    max_tokens: int
    """Most tokens to generate; 0 only scores the prompt."""

    sampler: Sampler
    """Chooses the tokens; of this generation alone."""

    text: GeneratedText
    """Receives the tokens, without an end-of-sequence token; of this generation alone."""

    stop_tokens: frozenset[int] = frozenset()
    """End-of-sequence tokens."""

    top_scores: int | None = None
    """Log-probabilities of the tokens and so many of the likeliest ones; None: none."""

    score_prompt: bool = False
    """Also of the tokens of the prompt."""

    deliver: Callable[["Generation", Output], None]
    """Called from the scheduler's thread with each piece of output; must not block."""


@dataclass(eq=False)
class Generation:
    """A submitted request. Fields belong to the scheduler's thread; after the last output they are
    final and anyone's to read."""

    request: GenerationRequest
    tokens: list[int] = field(init=False)
    """Prompt and generated tokens."""
    generated: int = 0
    cached: int = 0
    """Tokens of the prompt that were found in the cache when it first ran."""
    prompt_scores: list[TokenScore] = field(default_factory=list)
    finish: FinishReason | None = None
    error: str | None = None
    """With finish "error": what happened."""

    sequence: EngineSequence | None = None
    cancel_asked: threading.Event = field(default_factory=threading.Event)
    arrived: float = field(default_factory=time.perf_counter)
    last_token_at: float | None = None
    started: bool = False
    prompt_array: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)
        self.prompt_array = np.asarray(self.tokens, dtype=np.int32)

    @property
    def in_cache(self) -> int:
        """Tokens whose keys and values the engine holds."""
        return 0 if self.sequence is None else len(self.sequence)

    @property
    def missing(self) -> int:
        """Tokens to forward before the next can be chosen; 1 once the prompt has been computed."""
        return len(self.tokens) - self.in_cache

    @property
    def scores_wanted(self) -> bool:
        """Whether the next tokens to forward need logits at each position."""
        request = self.request
        return request.score_prompt and len(self.prompt_scores) < len(request.prompt)

    def take_prompt_logits(self, logits: np.ndarray) -> None:
        """Score the prompt from float32 logits [tokens, vocab_size] of the tokens just forwarded."""
        prompt, top = self.request.prompt, self.request.top_scores or 0
        start = self.in_cache - len(logits)
        if start == 0:
            self.prompt_scores.append(TokenScore(prompt[0], None))
        for row, token in zip(logits, prompt[start + 1 :], strict=False):
            self.prompt_scores.append(score(row, token, top))

    def take_logits(self, logits: np.ndarray) -> Output:
        """Choose the next token from float32 logits [vocab_size], unless none is wanted."""
        request = self.request
        if request.max_tokens == 0:
            return Output("", (), "length")
        token = request.sampler.draw(logits)
        self.tokens.append(token)
        self.generated += 1
        if token in request.stop_tokens:
            return Output(request.text.flush(), (), "stop")
        scores = () if request.top_scores is None else (score(logits, token, request.top_scores),)
        text = request.text.add(token)
        if request.text.stopped:
            return Output(text, scores, "stop")
        if self.generated >= request.max_tokens:
            return Output(text + request.text.flush(), scores, "length")
        return Output(text, scores)

    def forget(self) -> None:
        """Give the sequence back; it can be computed again from the tokens."""
        if self.sequence is not None:
            self.sequence.close()
            self.sequence = None
        if self.scores_wanted:
            self.prompt_scores.clear()


def score(logits: np.ndarray, token: int, top: int) -> TokenScore:
    """The token's natural log-probability under float32 logits [vocab_size], and the `top` likeliest
    (ties: the lower token first).

    Raises `UserError` for logits that are not numbers.
    """
    values = logits.astype(np.float64)
    peak = values.max()
    check_largest(peak)
    total = peak + np.log(np.exp(values - peak).sum())
    best: list[tuple[int, float]] = []
    if top := min(top, len(values)):
        # The partition may leave some of equal values out, so everything as high as its last counts.
        least = np.partition(values, -top)[-top]
        found = np.flatnonzero(values >= least)
        order = found[np.argsort(-values[found], kind="stable")][:top]
        best = [(int(index), _finite(values[index] - total)) for index in order]
    return TokenScore(token, _finite(values[token] - total), tuple(best))


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes this for tokens that are out of the question."""
    return max(float(logprob), -9999.0)
