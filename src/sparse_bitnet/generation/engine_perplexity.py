"""Held-out perplexity of an engine: the windows, the text and the result of `evaluation.perplexity`."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from sparse_bitnet.checkpoint.locate import trained_context_length
from sparse_bitnet.engine.protocol import InferenceEngine
from sparse_bitnet.errors import UserError
from sparse_bitnet.evaluation.held_out import DEFAULT_CONTEXT_LENGTH, HeldOutText
from sparse_bitnet.evaluation.perplexity import Evaluation, Perplexity, format_name
from sparse_bitnet.evaluation.windows import TokenSequence, Window, windows
from sparse_bitnet.generation.open_model import position_count
from sparse_bitnet.generation.prefix_cache import PrefixCache
from sparse_bitnet.generation.request import GenerationRequest
from sparse_bitnet.generation.scheduler import Scheduler, scored_slice
from sparse_bitnet.layer_config import SparseBitConfig
from sparse_bitnet.model_folder import quantization_entry, read_config


def engine_perplexity(
    engine: InferenceEngine,
    tokens: TokenSequence | np.ndarray,
    *,
    context_length: int,
    stride: int | None = None,
    batch_size: int = 8,
    text_bytes: int | None = None,
    on_batch: Callable[[int], None] | None = None,
) -> Perplexity:
    """As `evaluation.perplexity.perplexity`, with an engine in place of the model.

    Raises `UserError` when there is nothing to score, for a stride outside 1..context_length, for a
    context beyond the engine's, and for a token that the model's vocabulary lacks.
    """
    stride = context_length if stride is None else stride
    if len(tokens) < 2:
        raise UserError(f"the text has {len(tokens)} tokens; perplexity needs at least 2")
    if context_length < 1 or not 1 <= stride <= context_length:
        raise UserError(
            f"context_length={context_length}, stride={stride}: needs 1 <= stride <= context_length"
        )
    if context_length > engine.context_length:
        raise UserError(
            f"context_length={context_length}: the engine has {engine.context_length} positions"
        )
    scheduler = Scheduler(
        engine,
        max_running=batch_size,
        scored_slice=scored_slice(engine.vocab_size),
        room_ahead=None,
        prefixes=PrefixCache(0),
    )
    requests = (
        _request(engine, tokens, window) for window in windows(len(tokens), context_length, stride)
    )
    total, scored = 0.0, 0
    for generation in scheduler.run(requests):
        losses = [-entry.logprob for entry in generation.prompt_scores if entry.logprob is not None]
        total += sum(losses)
        scored += len(losses)
        if on_batch:
            on_batch(scored)
    assert scored == len(tokens) - 1
    return Perplexity(
        mean_nll=total / scored,
        tokens=scored,
        context_length=context_length,
        stride=stride,
        text_bytes=text_bytes,
    )


def _request(
    engine: InferenceEngine, tokens: TokenSequence | np.ndarray, window: Window
) -> GenerationRequest:
    piece = np.asarray(tokens[window.start : window.end + 1]).astype(np.int64)
    if piece.max() >= engine.vocab_size:
        raise UserError(
            f"token {piece.max()} is outside the model's vocabulary of {engine.vocab_size}: the data "
            "was tokenised for another model"
        )
    return GenerationRequest(
        prompt=piece.tolist(), max_tokens=0, score_from=window.scored_from - window.start + 1
    )


def default_context_length(folder: str | Path) -> int:
    """Of a packed model: as in training, or 2048, and at most its positions."""
    trained = trained_context_length(str(folder)) or DEFAULT_CONTEXT_LENGTH
    return min(trained, position_count(folder))


def evaluate_engine(
    engine: InferenceEngine,
    folder: str,
    text: HeldOutText,
    *,
    context_length: int,
    stride: int | None = None,
    batch_size: int = 8,
    max_tokens: int = 0,
    precision: str = "float32",
    on_batch: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Held-out perplexity of a packed model on the CPU engine.

    Args:
        folder: of the model, for the record.
        precision: likewise.
        on_batch: called with the tokens scored so far and the number of all.

    Other arguments as `evaluation.perplexity.evaluate`.
    """
    text.check_vocab(engine.vocab_size)
    tokens, text_bytes = text.first(max_tokens)
    result = engine_perplexity(
        engine,
        tokens,
        context_length=context_length,
        stride=stride,
        batch_size=batch_size,
        text_bytes=text_bytes,
        on_batch=on_batch and (lambda done: on_batch(done, len(tokens) - 1)),
    )
    entry = quantization_entry(read_config(folder))
    return Evaluation(
        checkpoint=folder,
        format=format_name(SparseBitConfig.from_dict(entry["format"]), entry["packed_format"]),
        data=text.name,
        precision=precision,
        device="cpu engine",
        result=result,
    )
