# SPDX-License-Identifier: Apache-2.0
"""One generation: what was asked, how far it is, and what comes out of it."""

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
from sparse_bitnet.generation.pooling import PooledStates, Pooling
from sparse_bitnet.generation.sampling import Sampler, check_largest
from sparse_bitnet.generation.sampling_options import SamplingOptions
from sparse_bitnet.generation.text import GeneratedText, TextTokenizer

if TYPE_CHECKING:
    from sparse_bitnet.generation.grammar import GrammarMatcher

FinishReason = Literal["stop", "length", "cancelled", "shutdown", "error"]
"""An end token or a stop string, `max_tokens`, the one who asked, the server's end, a failure."""

_PAIR = struct.Struct("<id")
_LEAST = -9999.0
"""Lowest log-probability: JSON has no infinity, and OpenAI writes this for impossible tokens."""


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token, its natural log-probability before sampling's changes, and the likeliest tokens there."""

    token: int
    logprob: float | None
    """None for the first token of a prompt, which nothing precedes."""
    packed_top: bytes = b""
    """`top` in few bytes: a million tuples would hold up everything when garbage is collected."""

    @property
    def top(self) -> tuple[tuple[int, float], ...]:
        """Tokens and log-probabilities, the likeliest first."""
        return tuple(_PAIR.iter_unpack(self.packed_top))


def score(logits: np.ndarray, token: int, top: int) -> TokenScore:
    """Return the token's natural log-probability under float32 logits [vocab_size], and the `top`
    likeliest (ties: the lower token first).

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
        high = np.flatnonzero(logits >= least)
        order = high[np.argsort(-logits[high], kind="stable")][:top]
    likeliest = [_PAIR.pack(index, max(float(logits[index]) - total, _LEAST)) for index in order]
    return TokenScore(token, max(float(logits[token]) - total, _LEAST), b"".join(likeliest))


@dataclass(frozen=True, slots=True)
class Output:
    """Something new of a generation. The last one has `finish`."""

    text: str
    scores: tuple[TokenScore, ...] = ()
    finish: FinishReason | None = None
    token: int | None = None
    """The one drawn, if one was."""

    generated: int = 0
    """Tokens drawn by then."""

    def then(self, other: "Output") -> "Output":
        """Both as one."""
        return replace(other, text=self.text + other.text, scores=self.scores + other.scores)


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """A request to generate: data alone, cheap to make in any number."""

    prompt: Sequence[int]
    """Token ids, at least one, each in [0, vocab_size)."""
    max_tokens: int
    """Most tokens to generate; 0 only scores the prompt."""
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    """How the tokens are chosen."""
    tokenizer: TextTokenizer | None = None
    """Turns the tokens into text; None where there is none to generate."""
    stop: tuple[str, ...] = ()
    """Strings that end the text and are no part of it."""
    is_start: bool = False
    """The text starts anew instead of continuing the prompt's; see `TextStream`."""
    stop_tokens: frozenset[int] = frozenset()
    """End-of-sequence tokens, no part of the text."""
    grammar: "GrammarMatcher | None" = None
    """Grammar of the text, at its beginning; the text ends where that is complete."""
    top_scores: int | None = None
    """Log-probabilities of the tokens and this many of the likeliest ones; None: none."""
    score_from: int | None = None
    """Place of the first token of the prompt that is scored, too; None: none is."""
    pooling: Pooling | None = None
    """Instead of scores, one vector of the prompt's hidden states; with `max_tokens` 0."""
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
    are final and anyone's to read."""

    request: GenerationRequest
    group: int = 0
    """The same number for all that were asked for together."""
    prompt_tokens: int = field(init=False)
    cached_tokens: int = 0
    """Tokens of the prompt that did not have to be computed when it first ran."""
    prompt_scores: list[TokenScore] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    failure: Exception | None = None
    """With the finish reason "error": what happened."""
    embedding: np.ndarray | None = None
    """float32 [hidden_size], of a request with `pooling`."""
    sequence: EngineSequence | None = None
    draft: list[int] = field(default_factory=list)
    """Draft tokens, computed together with the last token of the context."""
    cancel_asked: bool = False
    arrived: float = field(default_factory=time.perf_counter)
    first_token_at: float | None = None
    last_token_at: float | None = None
    draft_tokens: int = 0
    """Number of draft tokens computed."""
    accepted_tokens: int = 0
    """Number of draft tokens accepted."""
    started: bool = False
    pauses: int = 0
    """How often its sequence was given back for want of cache."""

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.request.prompt)
        self._pieces: list[str] = []
        self._held: list[TokenScore] = []

    @cached_property
    def context(self) -> list[int]:
        """Prompt and drawn tokens; while it waits, there is no copy of a long prompt."""
        return list(self.request.prompt)

    @property
    def tokens(self) -> list[int]:
        """The drawn ones, with the one that ended the text."""
        return self.context[self.prompt_tokens :]

    @property
    def text(self) -> str:
        """Without stop string and special tokens."""
        return "".join(self._pieces)

    @property
    def generated(self) -> int:
        """Tokens drawn."""
        return len(self.context) - self.prompt_tokens

    @property
    def prefill_rate(self) -> float | None:
        """Return prompt tokens a second, up to the first token drawn; None before that."""
        if self.first_token_at is None:
            return None
        return (self.prompt_tokens - self.cached_tokens) / (self.first_token_at - self.arrived)

    @property
    def decode_rate(self) -> float | None:
        """Return tokens drawn a second, after the first; None before there are two."""
        if self.first_token_at is None or self.last_token_at is None or self.generated < 2:
            return None
        return (self.generated - 1) / max(self.last_token_at - self.first_token_at, 1e-9)

    @cached_property
    def prompt_array(self) -> np.ndarray:
        """int32 [prompt tokens]."""
        return np.asarray(self.request.prompt, dtype=np.int32)

    @cached_property
    def _sampler(self) -> Sampler:
        return Sampler(self.request.sampling, self.request.prompt)

    @cached_property
    def _states(self) -> PooledStates:
        assert self.request.pooling is not None
        return PooledStates(self.request.pooling)

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
        """Tokens whose keys and values the engine holds."""
        return 0 if self.sequence is None else len(self.sequence)

    @property
    def _unscored(self) -> int:
        """Tokens at the start whose logits, or states, nobody asks for."""
        wanted = self.request.score_from
        if self.request.pooling not in (None, "lasttoken"):
            return 0
        return len(self.context) - 1 if wanted is None else max(wanted - 1, 0)

    @property
    def shareable(self) -> np.ndarray:
        """The beginning of the prompt that may come out of the cache, without logits; int32."""
        return self.prompt_array[: min(self._unscored, self.largest_cache(0))]

    @property
    def is_before_scores(self) -> bool:
        """The next tokens to forward come before the first that is scored."""
        return self.request.score_from is not None and self.in_cache < self._unscored

    @property
    def scores_wanted(self) -> bool:
        """Whether the next tokens to forward need logits at each position."""
        wanted = self.request.score_from
        if wanted is None or len(self.prompt_scores) == self.prompt_tokens - wanted:
            return False
        return not self.is_before_scores

    @property
    def wanted(self) -> WhichLogits:
        """Return the results needed from the next forward: hidden states, all logits or the last."""
        if self.request.pooling is not None:
            return "hidden"
        return "all" if self.scores_wanted else "last"

    @property
    def missing(self) -> int:
        """Tokens to forward before logits of another kind are needed: those up to the first score, or
        all; 1 once the prompt has been computed."""
        end = self._unscored if self.is_before_scores else self.largest_cache(0)
        return end - self.in_cache

    @property
    def is_drawing(self) -> bool:
        """All but the token drawn last is in the cache."""
        return self.generated > 0 and self.missing == 1

    def entry(self, size: int) -> tuple[EngineSequence, list[int]]:
        """Return its part of a forward: the sequence and the next tokens, draft tokens last."""
        assert self.sequence is not None
        tokens = self.context[self.in_cache : self.in_cache + size]
        return self.sequence, tokens + self.draft[: size - len(tokens)]

    def largest_cache(self, ahead: int | None) -> int:
        """Tokens in the cache when this many more have been drawn, or all (None)."""
        request = self.request
        if request.pooling is not None:
            return self.prompt_tokens
        if request.max_tokens == 0:
            return 0 if request.score_from is None else self.prompt_tokens - 1
        most = self.prompt_tokens + request.max_tokens - 1
        return most if ahead is None else min(most, len(self.context) + ahead)

    def take_prompt_logits(self, logits: np.ndarray) -> None:
        """Score the prompt from float32 logits [tokens, vocab_size] of the tokens just forwarded."""
        prompt, top = self.request.prompt, self.request.top_scores or 0
        start = self.in_cache - len(logits)
        if start == 0 and self.request.score_from == 0:
            self.prompt_scores.append(TokenScore(prompt[0], None))
        for row, token in zip(logits, prompt[start + 1 :], strict=False):
            self.prompt_scores.append(score(row, token, top))

    def take(self, results: np.ndarray, which: WhichLogits) -> list[Output]:
        """Return what follows from the results of the tokens just forwarded; nothing while some miss."""
        if which == "all" and self.generated:
            return self._take_draft(results)
        if which == "all":
            self.take_prompt_logits(results)
        elif which == "hidden":
            self._states.add(results)
        if self.missing:
            return []
        if which == "hidden":
            self.embedding = self._states.vector()
            return [Output("", (), "stop")]
        return [self.take_logits(results[-1] if which == "all" else results)]

    def _take_draft(self, logits: np.ndarray) -> list[Output]:
        """Draw from float32 logits [1 + draft tokens, vocab_size] until a draft token is rejected."""
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
        """Choose the next token from float32 logits [vocab_size], unless none is wanted."""
        request = self.request
        if request.max_tokens == 0:
            return Output("", (), "length")
        matcher = self._matcher
        token = self._sampler.draw(logits if matcher is None else matcher.masked(logits))
        self.context.append(token)
        if token in request.stop_tokens:
            return self._output(self._stream.flush(), "stop", token)
        if request.top_scores is not None:
            self._held.append(score(logits, token, request.top_scores))
        text = self._stream.add(token)
        if self._stream.stopped:
            return self._output(text, "stop", token)
        if matcher is not None and matcher.take(token):
            return self._output(text + self._stream.flush(), "stop", token)
        if self.generated >= request.max_tokens:
            return self._output(text + self._stream.flush(), "length", token)
        return self._output(text, None, token)

    def _output(self, text: str, finish: FinishReason | None, token: int) -> Output:
        self._pieces.append(text)
        stream, sure = self._stream, len(self._held)
        if finish is None or stream.stopped:
            # With a stop string go the scores of its tokens.
            sure -= len(stream.held)
        scores, self._held = tuple(self._held[:sure]), self._held[sure:]
        return Output(text, scores, finish, token, self.generated)

    def forget(self) -> None:
        """Give the sequence back; it can be computed again from the tokens."""
        if self.scores_wanted:
            self.prompt_scores.clear()
        self.__dict__.pop("_states", None)
        self.draft = []
        if self.sequence is not None:
            self.sequence.close()
            self.sequence = None
