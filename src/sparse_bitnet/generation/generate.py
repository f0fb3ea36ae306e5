"""Text generation over an engine: batches of prompts, shared beginnings computed once, streaming."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from sparse_bitnet.engine.protocol import (
    CacheFull,
    ContextFull,
    EngineSequence,
    InferenceEngine,
)
from sparse_bitnet.errors import UserError
from sparse_bitnet.generation.generation import (
    FinishReason,
    GenerateOptions,
    GenerateResult,
    Generation,
    OnToken,
)
from sparse_bitnet.generation.prefix_cache import PrefixCache, shared_length
from sparse_bitnet.generation.request import GeneratedText
from sparse_bitnet.generation.sampling import Sampler
from sparse_bitnet.generation.text import TextTokenizer

_PAGE = 64
"""Tokens by which the cache of a sequence grows."""

_PREFILL_TOKENS = 512
"""Prompt tokens of one forward; between two forwards a generation can be cancelled."""


def generate(
    engine: InferenceEngine,
    prompts: Sequence[Sequence[int]],
    options: GenerateOptions,
    *,
    tokenizer: TextTokenizer,
    end_tokens: frozenset[int] = frozenset(),
    prefixes: PrefixCache | None = None,
    max_batch: int = 32,
    is_start: bool = False,
    on_token: OnToken | None = None,
    is_cancelled: Callable[[], bool] | None = None,
) -> GenerateResult:
    """Continue each prompt.

    Args:
        prompts: tokens, at least one each.
        tokenizer: turns tokens into text.
        end_tokens: tokens that end a text.
        prefixes: sequences of this engine from earlier calls; prompts start from the longest beginning
            they share with one, and their sequences are added.
        max_batch: texts that grow at the same time; the others wait.
        is_start: the text starts anew instead of continuing the prompt's, as an answer does; see
            `TextStream`.
        on_token: called for every token as soon as it is drawn.
        is_cancelled: asked between forwards; once it says yes, texts end as they are.

    Raises `UserError` before any work for a prompt that is empty, holds a token that the model lacks, or
    leaves too little of the context (`ContextFull`) or the cache (`CacheFull`).
    """
    _check(engine, prompts, options)
    result = GenerateResult(texts=[])
    run = _Run(
        engine=engine,
        options=options,
        end_tokens=end_tokens,
        prefixes=PrefixCache(0) if prefixes is None else prefixes,
        max_batch=max_batch,
        on_token=on_token or (lambda prompt, token, text: None),
        is_cancelled=is_cancelled or (lambda: False),
        result=result,
        waiting=deque(
            _Text(
                number, prompt, options, GeneratedText(tokenizer, options.stop, is_start=is_start)
            )
            for number, prompt in enumerate(prompts)
        ),
    )
    result.texts = run.finish_all()
    return result


def _check(
    engine: InferenceEngine, prompts: Sequence[Sequence[int]], options: GenerateOptions
) -> None:
    for prompt in prompts:
        if not prompt:
            raise UserError("the prompt is empty: give at least one token")
        if not 0 <= min(prompt) <= max(prompt) < engine.vocab_size:
            raise UserError(
                f"token {max(prompt)} is outside the model's vocabulary of {engine.vocab_size}: the "
                "tokenizer belongs to another model"
            )
        check_context(engine, len(prompt), options.max_new_tokens)


def check_context(engine: InferenceEngine, prompt_tokens: int, max_new_tokens: int) -> None:
    """Raise `ContextFull`, with what would fit, if prompt and text together pass the context length."""
    room = engine.context_length - prompt_tokens
    if room < 1:
        raise ContextFull(
            f"the prompt has {prompt_tokens:,} tokens and fills the context of "
            f"{engine.context_length:,}: shorten it, or choose a larger context length"
        )
    if max_new_tokens > room:
        raise ContextFull(
            f"the prompt has {prompt_tokens:,} tokens and {max_new_tokens:,} new ones were asked for; "
            f"the context holds {engine.context_length:,}: ask for at most {room:,} new tokens, or "
            "shorten the prompt"
        )


def _pages(tokens: int) -> int:
    return -(-tokens // _PAGE)


class _Text:
    """A prompt on its way."""

    def __init__(
        self, number: int, prompt: Sequence[int], options: GenerateOptions, text: GeneratedText
    ) -> None:
        self.number = number
        self.prompt = np.asarray(prompt, dtype=np.int32)
        self.most_tokens = len(prompt) + options.max_new_tokens - 1
        """In its sequence, at the end; the last token drawn is not computed."""
        self.sequence: EngineSequence | None = None
        self.computed = 0
        """Tokens of the prompt that the sequence holds."""
        self.cached = 0
        self.tokens: list[int] = []
        self.text = text
        self.pieces: list[str] = []
        self.finish_reason: FinishReason | None = None
        self.sampler = Sampler(options.sampling, prompt)

    def growth(self) -> int:
        """Tokens of cache, in whole pages, that it may still take."""
        held = 0 if self.sequence is None else len(self.sequence)
        return (_pages(self.most_tokens) - _pages(held)) * _PAGE

    def done(self) -> Generation:
        assert self.finish_reason is not None
        return Generation(
            tokens=self.tokens,
            text="".join(self.pieces),
            finish_reason=self.finish_reason,
            prompt_tokens=len(self.prompt),
            cached_tokens=self.cached,
        )


@dataclass(kw_only=True)
class _Run:
    """One call of `generate`."""

    engine: InferenceEngine
    options: GenerateOptions
    end_tokens: frozenset[int]
    prefixes: PrefixCache
    max_batch: int
    on_token: OnToken
    is_cancelled: Callable[[], bool]
    result: GenerateResult
    waiting: deque[_Text]
    running: list[_Text] = field(default_factory=list)
    done: dict[int, Generation] = field(default_factory=dict)

    def finish_all(self) -> list[Generation]:
        try:
            while (self.waiting or self.running) and not self.is_cancelled():
                if admitted := self._admit():
                    self._prefill(admitted)
                elif self.running:
                    self._decode()
            for text in [*self.running, *self.waiting]:
                self._finish(text, "cancelled")
        finally:
            # After an error it is unknown what the sequences hold.
            for text in self.running:
                if text.sequence is not None:
                    text.sequence.close()
        return [self.done[number] for number in sorted(self.done)]

    def _admit(self) -> list[_Text]:
        """Texts for which there is room, their sequences opened with what is known of their prompts."""
        admitted: list[_Text] = []
        while self.waiting and len(self.running) < self.max_batch:
            text = self.waiting[0]
            # The last token is always computed, for its logits.
            wanted = text.prompt[:-1]
            held = [(t.sequence, t.prompt[: t.computed]) for t in self.running if t.sequence]
            source, length = self.prefixes.longest(wanted, held)
            if any(shared_length(wanted, new.prompt) >= length + _PAGE for new in admitted):
                break  # it starts from that one's prompt as soon as this is computed
            if not self._open(text, source, length):
                if self.running:
                    break
                raise CacheFull(
                    f"the cache has room for {self.engine.free_tokens:,} tokens, not for the "
                    f"{len(text.prompt):,} of the prompt and {self.options.max_new_tokens:,} new ones: "
                    "load the model with more cache, or ask for less"
                )
            self.waiting.popleft()
            self.running.append(text)
            admitted.append(text)
        return admitted

    def _open(self, text: _Text, source: EngineSequence | None, length: int) -> bool:
        """Start its sequence, giving up those kept from before until all texts can be finished; False,
        and nothing changed, where that is not enough."""
        try:
            sequence = self.engine.new_sequence() if source is None else source.fork(length)
        except CacheFull:
            sequence, length = self.engine.new_sequence(), 0
        text.sequence, text.computed, text.cached = sequence, length, length
        needed = sum(other.growth() for other in (text, *self.running))
        while self.engine.free_tokens < needed:
            if not self.prefixes.evict():
                sequence.close()
                text.sequence = None
                return False
        return True

    def _prefill(self, texts: list[_Text]) -> None:
        pending = deque(texts)
        while pending and not self.is_cancelled():
            batch: list[tuple[EngineSequence, Sequence[int]]] = []
            ready: list[tuple[int, _Text]] = []
            room = _PREFILL_TOKENS
            while pending and room:
                text = pending[0]
                assert text.sequence is not None
                piece = text.prompt[text.computed : text.computed + room].tolist()
                batch.append((text.sequence, piece))
                text.computed += len(piece)
                room -= len(piece)
                if text.computed == len(text.prompt):
                    ready.append((len(batch) - 1, pending.popleft()))
            started = time.perf_counter()
            logits = self.engine.forward(batch, "last" if ready else "none")
            self.result.prefill_seconds += time.perf_counter() - started
            self.result.prefill_tokens += _PREFILL_TOKENS - room
            for place, text in ready:
                self._draw(text, logits[place])

    def _decode(self) -> None:
        started = time.perf_counter()
        texts = list(self.running)
        batch = [(text.sequence, [text.tokens[-1]]) for text in texts if text.sequence]
        for text, logits in zip(texts, self.engine.forward(batch, "last"), strict=True):
            self._draw(text, logits)
        self.result.decode_tokens += len(texts)
        self.result.decode_seconds += time.perf_counter() - started

    def _draw(self, text: _Text, logits: np.ndarray) -> None:
        token = text.sampler.draw(logits)
        text.tokens.append(token)
        reason: FinishReason | None = None
        if token in self.end_tokens:
            reason, piece = "stop", text.text.flush()
        else:
            piece = text.text.add(token)
            if text.text.stopped:
                reason = "stop"
            elif len(text.tokens) == self.options.max_new_tokens:
                reason, piece = "length", piece + text.text.flush()
        text.pieces.append(piece)
        self.on_token(text.number, token, piece)
        if reason is not None:
            self._finish(text, reason)

    def _finish(self, text: _Text, reason: FinishReason) -> None:
        text.finish_reason = reason
        self.done[text.number] = text.done()
        if text.sequence is not None:
            held = np.asarray(text.sequence.tokens, dtype=np.int32)
            self.prefixes.keep(text.sequence, held)
            text.sequence = None
            self.running = [other for other in self.running if other is not text]
