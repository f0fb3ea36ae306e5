# SPDX-License-Identifier: Apache-2.0
"""Held-out perplexity of an engine: the windows, the text and the result of `evaluation.perplexity`."""

import itertools
from collections.abc import Callable, Iterator

import numpy as np

from sparse_bitnet.engine.protocol import InferenceEngine
from sparse_bitnet.evaluation.perplexity import Perplexity
from sparse_bitnet.evaluation.text_windows import (
    TokenSequence,
    Window,
    answers,
    check_windows,
    windows,
)
from sparse_bitnet.generation.prefix_cache import PrefixCache
from sparse_bitnet.generation.request import GenerationRequest
from sparse_bitnet.generation.scheduler import Scheduler, scored_slice
from sparse_bitnet.training.loss import mean_of


def engine_perplexity(
    engine: InferenceEngine,
    tokens: TokenSequence | np.ndarray,
    *,
    context_length: int,
    stride: int | None = None,
    batch_size: int = 8,
    text_bytes: int | None = None,
    chat: np.ndarray | None = None,
    on_batch: Callable[[int], None] | None = None,
) -> Perplexity:
    """As `evaluation.perplexity.perplexity`, with an engine in place of the model.

    Raises `UserError` when there is nothing to score, for a stride outside 1..context_length, for a
    context beyond the engine's, and for a token that the model's vocabulary lacks.
    """
    stride = context_length if stride is None else stride
    check_windows(
        tokens,
        context_length,
        stride,
        positions=engine.context_length,
        vocab_size=engine.vocab_size,
    )
    scheduler = Scheduler(
        engine,
        max_running=batch_size,
        scored_slice=scored_slice(engine.vocab_size),
        room_ahead=None,
        prefixes=PrefixCache(0),
    )
    under_way: dict[int, Window] = {}

    def requests() -> Iterator[GenerationRequest]:
        for window in windows(len(tokens), context_length, stride, chat):
            request = _request(tokens, window)
            under_way[id(request)] = window
            yield request

    total, scored = 0.0, 0
    for generation in scheduler.run(requests()):
        losses = [-entry.logprob for entry in generation.prompt_scores if entry.logprob is not None]
        window = under_way.pop(id(generation.request))
        if chat is not None:
            losses = list(itertools.compress(losses, answers(chat, window)))
        total += sum(losses)
        scored += len(losses)
        if on_batch:
            on_batch(scored)
    assert chat is not None or scored == len(tokens) - 1
    return Perplexity(
        mean_nll=mean_of(total, scored)[0],
        tokens=scored,
        context_length=context_length,
        stride=stride,
        text_bytes=text_bytes,
    )


def _request(tokens: TokenSequence | np.ndarray, window: Window) -> GenerationRequest:
    return GenerationRequest(
        prompt=tokens[window.start : window.end + 1].tolist(),
        max_tokens=0,
        score_from=window.scored_from - window.start + 1,
    )
