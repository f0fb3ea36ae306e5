# SPDX-License-Identifier: Apache-2.0
"""Held-out perplexity of models and engines: the exact token-weighted mean over a text.

A text of N tokens is cut into windows of `context_length` input tokens, each of which predicts the token
after it. Windows do not overlap: every token but the very first is scored exactly once, with 1 to
`context_length` tokens before it. Documents follow each other, an end-of-text token after each, as in
training.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sparse_bitnet.checkpoint.checkpoint import StoredModel
from sparse_bitnet.checkpoint.load import max_positions
from sparse_bitnet.checkpoint.open_checkpoint import find_checkpoint
from sparse_bitnet.data.chat import BEGINS, LEARNT
from sparse_bitnet.data.held_out import HeldOutText, TokenSequence, read_held_out
from sparse_bitnet.engine.engine_options import EngineOptions
from sparse_bitnet.engine.protocol import InferenceEngine
from sparse_bitnet.errors import UserError
from sparse_bitnet.generation.open_model import open_engine
from sparse_bitnet.generation.prefix_cache import PrefixCache
from sparse_bitnet.generation.request import GenerationRequest
from sparse_bitnet.generation.scheduler import Scheduler
from sparse_bitnet.layer_config import SparseBitConfig
from sparse_bitnet.progress import OnProgress
from sparse_bitnet.training.device import resolve_device, resolve_dtype
from sparse_bitnet.training.logits import check_logits
from sparse_bitnet.training.loss import SummedLoss, mean_of, mean_token_loss

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DEFAULT_CONTEXT_LENGTH = 2048
"""Context length for checkpoints that do not record their training sequence length."""

Piece = tuple[np.ndarray, np.ndarray]
"""Tokens of a window, with the one after it; and which of the predictions are scored, bool."""


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """A measured perplexity."""

    mean_nll: float
    """Negative log-likelihood in nats per scored token."""
    tokens: int
    """Tokens scored."""

    @property
    def perplexity(self) -> float:
        """Return exp(mean_nll); infinite beyond the largest float, e^709.8."""
        return math.inf if self.mean_nll >= 709 else math.exp(self.mean_nll)


def windows(
    tokens: int, context_length: int, chat: np.ndarray | None = None
) -> Iterator[tuple[int, int]]:
    """Yield the windows of a text of this many tokens, as (start, end): input tokens start..end, each of
    which predicts the next one. Each prediction 0..tokens-2 is in exactly one window.

    `chat`: the stored tokens, if the text is conversations. Each conversation is cut separately.
    """
    begins = [] if chat is None else (np.flatnonzero(chat[1:tokens] & BEGINS) + 1).tolist()
    for first, following in itertools.pairwise([0, *begins, tokens]):
        for start in range(first, following - 1, context_length):
            yield start, min(start + context_length, following - 1)


def perplexity(
    model: "PreTrainedModel | InferenceEngine",
    tokens: TokenSequence | np.ndarray,
    *,
    context_length: int,
    batch_size: int = 8,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    chat: np.ndarray | None = None,
    on_batch: Callable[[int], None] = lambda done: None,
) -> Perplexity:
    """Score a text with a transformers causal LM, masks and codes selected once, or with an engine.

    Args:
        model: an engine, or a model in any mode on `device`; the mode is restored.
        tokens: the text, at least two tokens.
        context_length: maximum number of input tokens per window.
        batch_size: windows per forward; changes the result by rounding only.
        device, dtype: of a model; float32, or bfloat16 for autocast to it.
        chat: the stored tokens of conversations, of which only the answers are scored.
        on_batch: called with the number of tokens scored so far.

    Returns the `Perplexity`. Raises `UserError` when there is nothing to score.
    """
    if len(tokens) < 2:
        raise UserError(f"the text has {len(tokens)} tokens; perplexity needs at least 2")
    pieces = _pieces(tokens, context_length, chat)
    if isinstance(model, InferenceEngine):
        mean, scored = _engine_loss(model, pieces, batch_size, on_batch)
    else:
        check_logits(model)
        batches = _batches(pieces, batch_size, on_batch)
        mean, scored = mean_token_loss(SummedLoss(model), batches, device=device, dtype=dtype)
    assert chat is not None or scored == len(tokens) - 1
    return Perplexity(mean_nll=mean, tokens=scored)


def _pieces(tokens: TokenSequence, context_length: int, chat: np.ndarray | None) -> Iterator[Piece]:
    """Yield the windows in which something is scored; those of conversations by length, so that equally
    long ones share a batch."""
    cut: Iterable[tuple[int, int]] = windows(len(tokens), context_length, chat)
    if chat is not None:
        cut = sorted(cut, key=lambda window: window[1] - window[0])
    for start, end in cut:
        scored = np.ones(end - start, bool)
        if chat is not None:
            scored = chat[start + 1 : end + 1] & LEARNT != 0
        if scored.any():
            yield np.asarray(tokens[start : end + 1]), scored


def _batches(
    pieces: Iterable[Piece], batch_size: int, on_batch: Callable[[int], None]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and labels, int64 [windows, length], of windows of one length: no padding, so no masks
    and no wasted work. Labels are the tokens after the inputs, or -100 where none is scored."""
    done = 0
    for _, same in itertools.groupby(pieces, lambda piece: len(piece[0])):
        while group := list(itertools.islice(same, batch_size)):
            tokens, scored = (torch.from_numpy(np.stack(part)) for part in zip(*group, strict=True))
            tokens = tokens.long()
            yield tokens[:, :-1], tokens[:, 1:].where(scored, -100)
            done += int(scored.sum())
            on_batch(done)


def _engine_loss(
    engine: InferenceEngine,
    pieces: Iterable[Piece],
    batch_size: int,
    on_batch: Callable[[int], None],
) -> tuple[float, int]:
    """Return the mean negative log-likelihood of the scored tokens, and their number."""
    scheduler = Scheduler(engine, max_running=batch_size, prefixes=PrefixCache(0))
    under_way: dict[int, np.ndarray] = {}

    def requests() -> Iterator[GenerationRequest]:
        for tokens, scored in pieces:
            request = GenerationRequest(prompt=tokens.tolist(), max_tokens=0, score_from=1)
            under_way[id(request)] = scored
            yield request

    total, done = 0.0, 0
    for generation in scheduler.run(requests()):
        scored = under_way.pop(id(generation.request))
        total -= sum(s.logprob or 0.0 for s in itertools.compress(generation.prompt_scores, scored))
        done += int(scored.sum())
        on_batch(done)
    return mean_of(total, done)


@dataclass(frozen=True, kw_only=True)
class Evaluation(Perplexity):
    """A perplexity with the model, the data and the settings of its measurement."""

    context_length: int
    text_bytes: int | None
    """UTF-8 bytes of the text, if all of it was scored, else None."""
    checkpoint: str
    """The folder or hub id that was loaded."""
    format: str
    """Text form of the SparseBitConfig; for a packed model also its packed format: "ternary-6:8, packed
    as i2"; "unconverted" for a model without our layers."""
    data: str
    precision: str
    device: str

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of text, comparable between tokenizers; None if the text's size is unknown."""
        if not self.text_bytes:
            return None
        return self.mean_nll * self.tokens / math.log(2) / self.text_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return every field and both derived values, ready for JSON, which has no infinity."""
        perplexity = self.perplexity if math.isfinite(self.perplexity) else None
        return {"perplexity": perplexity, "bits_per_byte": self.bits_per_byte} | asdict(self)


def read_text(
    checkpoint: str | Path,
    data: str | Path,
    *,
    context_length: int | None = None,
    column: str | None = None,
    chat: bool = False,
) -> tuple[StoredModel, HeldOutText, int]:
    """Return the arguments of `evaluate`: model, text in its tokens, context length. No weight is read.

    Args:
        checkpoint: run folder, checkpoint folder, transformers folder or hub id.
        data, column, chat: as in `read_held_out`. In conversations, only answers are scored.
        context_length: default: the sequence length of training, or 2048, or the model's positions.

    Raises `UserError` for a checkpoint, data or combination of both that cannot be used.
    """
    stored = find_checkpoint(checkpoint)
    text = read_held_out(data, str(stored.folder), column=column, chat=chat)
    model: Any = stored.model
    positions = max_positions(model)
    known = model.get_input_embeddings().weight.shape[0]
    trained = stored.trained_context_length or DEFAULT_CONTEXT_LENGTH
    length = context_length or min(trained, positions or DEFAULT_CONTEXT_LENGTH)
    if text.vocab_size > known:
        raise UserError(
            f"{text.name}: its tokenizer's vocabulary has {text.vocab_size:,} tokens, that of "
            f"{stored.name} {known:,}; evaluate with the tokenizer that the model was trained with"
        )
    if positions is not None and length > positions:
        raise UserError(
            f"context_length={length}: {stored.name} has {positions} positions; give at most as many"
        )
    return stored, text, length


def evaluate(
    stored: StoredModel,
    text: HeldOutText,
    context_length: int,
    *,
    batch_size: int = 8,
    max_tokens: int = 0,
    precision: str = "auto",
    device: str = "auto",
    engine: EngineOptions | None = None,
    on_batch: OnProgress = lambda done, total: None,
) -> Evaluation:
    """Measure the held-out perplexity of a run, a checkpoint, or any transformers causal LM.

    Args:
        stored, text, context_length: from `read_text`.
        max_tokens: score only this many tokens, from the first; 0: all.
        precision, device: as in `TrainConfig`; not for an engine.
        engine: options of the CPU engine, to score a packed folder with it; context and cache are set
            here.
        on_batch: called with the tokens scored so far and the number of all.

    Other arguments as `perplexity`. Raises `UserError` for a checkpoint that cannot be loaded.
    """
    model: Any
    options: dict[str, Any] = {}
    if engine is None:
        options["device"] = resolve_device(device)
        options["dtype"] = resolve_dtype(precision, options["device"])
        model = stored.load(dtype=torch.float32).to(options["device"])
        precision, where = str(options["dtype"]).removeprefix("torch."), options["device"].type
    else:
        room = batch_size * (context_length + 64)  # each sequence ends within a page
        settings = replace(engine, context_length=context_length, cache_tokens=room)
        model = open_engine(str(stored.folder), settings)
        precision, where = f"float32, head {engine.head}, cache {engine.kv_cache}", "cpu engine"
    try:
        tokens, text_bytes = text.first(max_tokens)
        count = len(tokens) - 1
        if text.chat is not None:
            count = int(np.count_nonzero(text.chat[1 : len(tokens)] & LEARNT))
        result = perplexity(
            model,
            tokens,
            context_length=context_length,
            batch_size=batch_size,
            chat=text.chat,
            on_batch=lambda done: on_batch(done, count),
            **options,
        )
    finally:
        if engine is not None:
            model.close()
    return Evaluation(
        context_length=context_length,
        text_bytes=text_bytes,
        checkpoint=stored.name,
        format=_format(model, stored.entry),
        data=text.name,
        precision=precision,
        device=where,
        **vars(result),
    )


def _format(model: Any, entry: dict[str, Any]) -> str:
    """Return the format of an engine's folder, or of the first of our layers in a model."""
    if isinstance(model, InferenceEngine):
        basis = ", rotated" * ("rotation" in entry)
        return f"{SparseBitConfig.from_dict(entry['format'])}{basis}, packed as {entry['packed_format']}"
    for module in model.modules():
        if isinstance(config := getattr(module, "config", None), SparseBitConfig):
            packed = getattr(module, "packed_format", None)
            return f"{config}, packed as {packed}" if packed else str(config)
    return "unconverted"
