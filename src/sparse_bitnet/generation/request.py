# SPDX-License-Identifier: Apache-2.0
"""One generation: its request, its progress and its output."""

import math
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np

from sparse_bitnet.engine.protocol import EngineSequence, WhichLogits
from sparse_bitnet.errors import UserError
from sparse_bitnet.generation.pooling import Pooling
from sparse_bitnet.generation.sampling import Sampler, check_largest
from sparse_bitnet.generation.sampling_options import SamplingOptions
from sparse_bitnet.generation.text import GeneratedText, TextTokenizer

if TYPE_CHECKING:
    from sparse_bitnet.generation.grammar import GrammarMatcher

FinishReason = Literal["stop", "length", "cancelled", "shutdown", "error"]
"""Why a generation ended: end token or stop string, `max_tokens`, its client, shutdown, or an error."""

_PAIR = struct.Struct("<id")
_LEAST = -9999.0
"""Lowest log-probability: JSON has no infinity, and OpenAI writes this for impossible tokens."""


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token, its natural log-probability before sampling's changes, and the likeliest tokens."""

    token: int
    logprob: float | None
    """None for the first token of a prompt, which nothing precedes."""
    packed_top: bytes = b""
    """`top` as bytes: a million tuples would slow down garbage collection."""

    @property
    def top(self) -> tuple[tuple[int, float], ...]:
        """Tokens and log-probabilities, the likeliest first."""
        return tuple(_PAIR.iter_unpack(self.packed_top))


def score(logits: np.ndarray, token: int, top: int) -> TokenScore:
    """Return the token's natural log-probability under float32 logits [vocab_size], and the `top`
    likeliest tokens (ties: the lower token first).

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
        # The partition may omit equal values, so keep everything as high as its last.
        high = np.flatnonzero(logits >= np.partition(logits, -top)[-top])
        order = high[np.argsort(-logits[high], kind="stable")][:top]
    likeliest = [_PAIR.pack(index, max(float(logits[index]) - total, _LEAST)) for index in order]
    return TokenScore(token, max(float(logits[token]) - total, _LEAST), b"".join(likeliest))


@dataclass(frozen=True, slots=True)
class Output:
    """New output of a generation. The last one has `finish`."""

    text: str
    scores: tuple[TokenScore, ...] = ()
    finish: FinishReason | None = None
    generated: int = 0
    """Number of tokens sampled so far."""

    def then(self, other: "Output") -> "Output":
        """Return both outputs joined."""
        return replace(other, text=self.text + other.text, scores=self.scores + other.scores)


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """A request to generate: data only, cheap to create."""

    prompt: Sequence[int]
    """Token ids, at least one, each in [0, vocab_size)."""
    max_tokens: int
    """Maximum number of tokens to generate; 0 only scores the prompt."""
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    """How the tokens are chosen."""
    tokenizer: TextTokenizer | None = None
    """Turns the tokens into text; None if there are none to generate."""
    stop: tuple[str, ...] = ()
    """Stop strings: the text ends before the first of them."""
    is_start: bool = False
    """Whether the output starts its own text instead of continuing the prompt; see `TextStream`."""
    stop_tokens: frozenset[int] = frozenset()
    """End-of-sequence tokens; they are not part of the text."""
    grammar: "GrammarMatcher | None" = None
    """Grammar of the output, at its start; generation ends where the grammar is complete."""
    top_scores: int | None = None
    """Report log-probabilities of the tokens and of this many of the likeliest ones; None: none."""
    score_from: int | None = None
    """Position of the first prompt token to score as well; None: score none."""
    pooling: Pooling | None = None
    """Compute one vector of the prompt's hidden states instead of scores; needs `max_tokens` 0."""
    deliver: Callable[["Generation", Output], None] = lambda generation, output: None
    """Called by the scheduler, in its thread, with each token and at the end; must not block."""

    def __post_init__(self) -> None:
        """Raise `UserError` for a stop string that would end every text."""
        if not all(self.stop):
            raise UserError("a stop string is empty: leave it out")

    @property
    def strips_start(self) -> bool:
        """Whether to drop the space before the first word; a grammar may require that space."""
        return self.is_start and self.grammar is None


@dataclass(eq=False)
class Generation:
    """A request on its way through a scheduler, whose thread owns the fields; after the last output they
    are final and any thread may read them."""

    request: GenerationRequest
    group: int = 0
    """Number shared by all generations of one HTTP request."""
    prompt_tokens: int = field(init=False)
    cached_tokens: int = 0
    """Number of prompt tokens that came from the prefix cache when it first ran."""
    prompt_scores: list[TokenScore] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    failure: Exception | None = None
    """The exception, if the finish reason is "error"."""
    embedding: np.ndarray | None = None
    """float32 [hidden_size], for a request with `pooling`; of means, the sum until all are there."""
    sequence: EngineSequence | None = None
    draft: list[int] = field(default_factory=list)
    """Draft tokens, computed together with the last token of the context."""
    cancel_requested: bool = False
    arrived: float = field(default_factory=time.perf_counter)
    first_token_at: float | None = None
    last_token_at: float | None = None
    draft_tokens: int = 0
    """Number of draft tokens computed."""
    accepted_tokens: int = 0
    """Number of draft tokens accepted."""
    slice_end: int = 0
    """Length at which a slice of the prompt ends, for a prompt that branches off there; 0: nowhere."""
    started: bool = False
    pauses: int = 0
    """How often its sequence was dropped because the cache was full."""

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.request.prompt)
        self._pieces: list[str] = []
        self._held: list[TokenScore] = []

    @cached_property
    def context(self) -> list[int]:
        """Prompt and generated tokens; created on first use, so that waiting requests hold no copy."""
        return list(self.request.prompt)

    @property
    def tokens(self) -> list[int]:
        """The generated tokens, including the one that ended the text."""
        return self.context[self.prompt_tokens :]

    @property
    def text(self) -> str:
        """The text so far, without stop string and special tokens."""
        return "".join(self._pieces)

    @property
    def generated(self) -> int:
        """Number of generated tokens."""
        return len(self.context) - self.prompt_tokens

    @property
    def prefill_rate(self) -> float | None:
        """Prompt tokens per second, up to the first generated token; None before that."""
        if self.first_token_at is None:
            return None
        return (self.prompt_tokens - self.cached_tokens) / (self.first_token_at - self.arrived)

    @property
    def decode_rate(self) -> float | None:
        """Generated tokens per second, after the first; None before there are two."""
        if self.first_token_at is None or self.last_token_at is None or self.generated < 2:
            return None
        return (self.generated - 1) / max(self.last_token_at - self.first_token_at, 1e-9)

    @cached_property
    def prompt_array(self) -> np.ndarray:
        """The prompt, int32 [prompt tokens]."""
        return np.asarray(self.request.prompt, dtype=np.int32)

    @cached_property
    def _sampler(self) -> Sampler:
        return Sampler(self.request.sampling, self.request.prompt)

    @cached_property
    def _stream(self) -> GeneratedText:
        request = self.request
        assert request.tokenizer is not None
        return GeneratedText(request.tokenizer, request.stop, is_start=request.strips_start)

    @cached_property
    def _matcher(self) -> "GrammarMatcher | None":
        return None if self.request.grammar is None else self.request.grammar.copy()

    @property
    def in_cache(self) -> int:
        """Number of tokens whose keys and values the engine holds."""
        return 0 if self.sequence is None else len(self.sequence)

    @property
    def next_slice_end(self) -> int:
        """`slice_end` if it is still ahead, else 0."""
        return self.slice_end if self.slice_end > self.in_cache else 0

    @property
    def _unscored(self) -> int:
        """Number of tokens at the start whose logits or states are not needed."""
        wanted = 0 if self.request.pooling == "mean" else self.request.score_from
        return len(self.context) - 1 if wanted is None else max(wanted - 1, 0)

    @property
    def shareable(self) -> np.ndarray:
        """Beginning of the prompt that may come from the prefix cache (needs no logits); int32."""
        return self.prompt_array[: min(self._unscored, self.largest_cache(0))]

    @property
    def is_before_scores(self) -> bool:
        """Whether the next tokens to compute come before the first scored one."""
        return self.request.score_from is not None and self.in_cache < self._unscored

    @property
    def scores_wanted(self) -> bool:
        """Whether the next tokens to compute need logits at each position."""
        wanted = self.request.score_from
        if wanted is None or len(self.prompt_scores) == self.prompt_tokens - wanted:
            return False
        return not self.is_before_scores

    @property
    def wanted(self) -> WhichLogits:
        """Results needed from the next forward: hidden states, all logits or the last."""
        if self.request.pooling is not None:
            return "hidden"
        return "all" if self.scores_wanted else "last"

    @property
    def missing(self) -> int:
        """Number of tokens to compute before logits of another kind are needed: those up to the first
        score, or all; 1 once the prompt has been computed."""
        end = self._unscored if self.is_before_scores else self.largest_cache(0)
        return end - self.in_cache

    @property
    def is_drawing(self) -> bool:
        """Whether everything but the token sampled last is in the cache."""
        return self.generated > 0 and self.missing == 1

    def entry(self, size: int) -> tuple[EngineSequence, list[int]]:
        """Return its part of a forward: the sequence and the next tokens, draft tokens last."""
        assert self.sequence is not None
        tokens = self.context[self.in_cache : self.in_cache + size]
        return self.sequence, tokens + self.draft[: size - len(tokens)]

    def largest_cache(self, ahead: int | None) -> int:
        """Return the number of tokens in the cache when `ahead` more have been generated (None: all)."""
        request = self.request
        if request.pooling is not None:
            return self.prompt_tokens
        if request.max_tokens == 0:
            return 0 if request.score_from is None else self.prompt_tokens - 1
        most = self.prompt_tokens + request.max_tokens - 1
        return most if ahead is None else min(most, len(self.context) + ahead)

    def take_prompt_logits(self, logits: np.ndarray) -> None:
        """Score the prompt from float32 logits [tokens, vocab_size] of the tokens just computed."""
        prompt, top = self.request.prompt, self.request.top_scores or 0
        start = self.in_cache - len(logits)
        if start == 0 and self.request.score_from == 0:
            self.prompt_scores.append(TokenScore(prompt[0], None))
        for row, token in zip(logits, prompt[start + 1 :], strict=False):
            self.prompt_scores.append(score(row, token, top))

    def take(self, results: np.ndarray, which: WhichLogits) -> list[Output]:
        """Return the outputs that the computed tokens' results give; [] while tokens are missing."""
        if which == "all" and self.generated:
            return self._take_draft(results)
        if which == "all":
            self.take_prompt_logits(results)
        elif which == "hidden" and self.request.pooling == "mean":
            means = results.sum(0, np.float64) / self.prompt_tokens
            self.embedding = means if self.embedding is None else self.embedding + means
        if self.missing:
            return []
        if which == "hidden":
            state = results[-1] if self.embedding is None else self.embedding
            self.embedding = state.astype(np.float32)
            return [Output("", (), "stop")]
        return [self.take_logits(results[-1] if which == "all" else results)]

    def _take_draft(self, logits: np.ndarray) -> list[Output]:
        """Sample from float32 logits [1 + draft tokens, vocab_size] until a draft token is rejected."""
        assert self.sequence is not None
        start, outputs = self.in_cache - len(logits), []
        for place, row in enumerate(logits):
            outputs.append(self.take_logits(row))
            is_accepted = self.draft[place : place + 1] == self.context[-1:]
            if outputs[-1].finish is not None or not is_accepted:
                break
        self.sequence.truncate(start + len(outputs))
        self.draft = []
        return outputs

    def take_logits(self, logits: np.ndarray) -> Output:
        """Sample the next token from float32 logits [vocab_size], unless none is wanted."""
        request = self.request
        if request.max_tokens == 0:
            return Output("", (), "length")
        matcher = self._matcher
        token = self._sampler.draw(logits if matcher is None else matcher.masked(logits))
        self.context.append(token)
        if token in request.stop_tokens:
            return self._output(self._stream.flush(), "stop")
        if request.top_scores is not None:
            self._held.append(score(logits, token, request.top_scores))
        text = self._stream.add(token)
        if self._stream.stopped:
            return self._output(text, "stop")
        if matcher is not None and matcher.take(token):
            return self._output(text + self._stream.flush(), "stop")
        if self.generated >= request.max_tokens:
            return self._output(text + self._stream.flush(), "length")
        return self._output(text, None)

    def _output(self, text: str, finish: FinishReason | None) -> Output:
        self._pieces.append(text)
        stream, sure = self._stream, len(self._held)
        if finish is None or stream.stopped:
            # The scores of a stop string's tokens are dropped with it.
            sure -= len(stream.held)
        scores, self._held = tuple(self._held[:sure]), self._held[sure:]
        return Output(text, scores, finish, self.generated)

    def forget(self) -> None:
        """Close the sequence; it can be computed again from the tokens."""
        if self.scores_wanted:
            self.prompt_scores.clear()
        self.embedding = None
        self.draft = []
        if self.sequence is not None:
            self.sequence.close()
            self.sequence = None
