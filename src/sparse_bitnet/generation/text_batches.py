# SPDX-License-Identifier: Apache-2.0
"""Text generation over an engine: batches of prompts, shared beginnings computed once, streaming."""

from collections.abc import Callable, Sequence
from typing import Any

from sparse_bitnet.engine.protocol import ContextFull, InferenceEngine
from sparse_bitnet.errors import UserError
from sparse_bitnet.generation.prefix_cache import PrefixCache
from sparse_bitnet.generation.request import Generation, GenerationRequest, Output
from sparse_bitnet.generation.scheduler import Scheduler
from sparse_bitnet.generation.speculation import Speculation


def generate(
    engine: InferenceEngine,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    prefixes: PrefixCache | None = None,
    speculation: Speculation | None = None,
    max_batch: int = 32,
    on_text: Callable[[str], None] | None = None,
    **fields: Any,
) -> list[Generation]:
    """Continue each prompt; returns the texts in the order of the prompts.

    Args:
        prompts: tokens, at least one each.
        max_tokens: most tokens of each text, at least one.
        prefixes: sequences of this engine from earlier calls; prompts start from the longest beginning
            they share with one, and their sequences are added.
        speculation: source of draft tokens; the texts are the same, sooner.
        max_batch: texts that grow at the same time; the others wait.
        on_text: called with what each token adds to a text that can be shown, often "".
        fields: further fields of each `GenerationRequest`. Each draws with the seed of `sampling`: no
            text depends on the prompts beside it.

    Raises `UserError` before any work for options out of their range and a prompt that is empty, holds a
    token that the model lacks, or leaves too little of the context (`ContextFull`) or the cache
    (`CacheFull`).
    """
    if max_tokens < 1:
        raise UserError(f"max_tokens={max_tokens}: must be at least 1")
    for prompt in prompts:
        if not prompt:
            raise UserError("the prompt is empty: give at least one token")
        if not 0 <= min(prompt) <= max(prompt) < engine.vocab_size:
            raise UserError(
                f"token {max(prompt)} is outside the model's vocabulary of {engine.vocab_size}: the "
                "tokenizer belongs to another model"
            )
        if len(prompt) + max_tokens > engine.context_length:
            raise ContextFull(
                f"the prompt has {len(prompt):,} tokens and {max_tokens:,} new ones requested; the "
                f"context holds {engine.context_length:,}: ask for fewer, or shorten the prompt"
            )

    def deliver(generation: Generation, output: Output) -> None:
        if on_text is not None and output.token is not None:
            on_text(output.text)

    requests = [
        GenerationRequest(prompt=prompt, max_tokens=max_tokens, deliver=deliver, **fields)
        for prompt in prompts
    ]
    scheduler = Scheduler(
        engine,
        max_running=max_batch,
        prefixes=PrefixCache(0) if prefixes is None else prefixes,
        speculation=speculation,
    )
    ended = {id(one.request): one for one in scheduler.run(requests)}
    return [ended[id(request)] for request in requests]
