# SPDX-License-Identifier: Apache-2.0
"""Text generation over an engine: batches of prompts, shared beginnings computed once, streaming."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sparse_bitnet.engine.protocol import ContextFull, InferenceEngine
from sparse_bitnet.errors import UserError
from sparse_bitnet.generation.prefix_cache import PrefixCache
from sparse_bitnet.generation.request import Generation, GenerationRequest, Output
from sparse_bitnet.generation.sampling_options import SamplingOptions
from sparse_bitnet.generation.scheduler import Scheduler
from sparse_bitnet.generation.speculation import Speculation
from sparse_bitnet.generation.text import StopStrings, TextTokenizer

if TYPE_CHECKING:
    from sparse_bitnet.generation.grammar import Form

_PREFILL_TOKENS = 512
"""Prompt tokens of one forward; between two forwards a generation can be cancelled."""

OnToken = Callable[[int, int, str], None]
"""Called with the number of the prompt, the token, and the text that can now be shown (often "")."""


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Options for each prompt."""

    max_new_tokens: int = 64
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    """Each prompt draws with this seed: its text does not depend on the prompts beside it."""

    stop: tuple[str, ...] = ()
    """Strings that end the text and are no part of it."""

    def __post_init__(self) -> None:
        """Raise `UserError` that names the option."""
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens={self.max_new_tokens}: must be at least 1")
        StopStrings(self.stop)


def generate(
    engine: InferenceEngine,
    prompts: Sequence[Sequence[int]],
    options: GenerateOptions,
    *,
    tokenizer: TextTokenizer,
    end_tokens: frozenset[int] = frozenset(),
    form: "Form | None" = None,
    prefixes: PrefixCache | None = None,
    speculation: Speculation | None = None,
    max_batch: int = 32,
    is_start: bool = False,
    on_token: OnToken | None = None,
    is_cancelled: Callable[[], bool] | None = None,
) -> list[Generation]:
    """Continue each prompt; returns the texts in the order of the prompts.

    Args:
        prompts: tokens, at least one each.
        tokenizer: turns tokens into text.
        end_tokens: tokens that end a text.
        form: grammar that the texts have to match.
        prefixes: sequences of this engine from earlier calls; prompts start from the longest beginning
            they share with one, and their sequences are added.
        speculation: source of draft tokens; the texts are the same, sooner.
        max_batch: texts that grow at the same time; the others wait.
        is_start: the text starts anew instead of continuing the prompt's, as an answer does; see
            `TextStream`.
        on_token: called for every token as soon as it is drawn.
        is_cancelled: asked between forwards; once it says yes, texts end as they are.

    Raises `UserError` before any work for a prompt that is empty, holds a token that the model lacks, or
    leaves too little of the context (`ContextFull`) or the cache (`CacheFull`).
    """
    for prompt in prompts:
        _check(engine, prompt, options.max_new_tokens)
    numbers: dict[int, int] = {}

    def deliver(generation: Generation, output: Output) -> None:
        if on_token is not None and output.token is not None:
            on_token(numbers[id(generation.request)], output.token, output.text)

    requests = [
        GenerationRequest(
            prompt=prompt,
            max_tokens=options.max_new_tokens,
            sampling=options.sampling,
            tokenizer=tokenizer,
            stop=options.stop,
            is_start=is_start,
            stop_tokens=end_tokens,
            form=form,
            deliver=deliver,
        )
        for prompt in prompts
    ]
    numbers.update((id(request), number) for number, request in enumerate(requests))
    scheduler = Scheduler(
        engine,
        max_running=max_batch,
        prefill_slice=_PREFILL_TOKENS,
        room_ahead=None,
        prefixes=PrefixCache(0) if prefixes is None else prefixes,
        speculation=speculation,
    )
    done = {id(one.request): one for one in scheduler.run(requests, is_cancelled)}
    return [done[id(request)] for request in requests]


def _check(engine: InferenceEngine, prompt: Sequence[int], new: int) -> None:
    if not prompt:
        raise UserError("the prompt is empty: give at least one token")
    if not 0 <= min(prompt) <= max(prompt) < engine.vocab_size:
        raise UserError(
            f"token {max(prompt)} is outside the model's vocabulary of {engine.vocab_size}: the "
            "tokenizer belongs to another model"
        )
    room = engine.context_length - len(prompt)
    if new > room:
        less = f"ask for at most {room:,} new tokens, or shorten" if room > 0 else "shorten"
        raise ContextFull(
            f"the prompt has {len(prompt):,} tokens and {new:,} new ones requested; the context "
            f"holds {engine.context_length:,}: {less} the prompt"
        )
