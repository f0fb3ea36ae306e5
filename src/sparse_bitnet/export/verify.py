# SPDX-License-Identifier: Apache-2.0
"""Loading an export back with its real reader and comparing it with the trained model.

Compared are the token ids of a text with everything awkward in it, the log-probability of every next
token of a held-out text, and the perplexity of that text. What a format rounds (embeddings, scales) and
how its reader quantises activations make up the difference: each activation that falls on the other
side of a rounding boundary moves all later ones a little. So single tokens are shown, and the mean over
tokens is bounded. Rounding moves logits alike on every text, but log p of a token that the model is sure
of hardly follows; the bound is therefore one of logits, times how much this text's log p follow them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sparse_bitnet.checkpoint.checkpoint import Checkpoint
from sparse_bitnet.data.held_out import read_held_out
from sparse_bitnet.errors import UserError
from sparse_bitnet.export.export_config import ExportConfig
from sparse_bitnet.export.model_card import Row, read_record
from sparse_bitnet.export.readers import TransformersReader, open_reader
from sparse_bitnet.progress import OnProgress

LARGEST_CONTEXT = 512
PERPLEXITY_BOUND = 0.01
"""Largest relative difference of perplexity, for every format."""

LOGIT_BOUND = 0.03
"""Largest error of logits, in nats, times the root of the number of blocks: each rounds anew, and
independent errors add in squares. A trained model of 4 blocks showed 0.003."""

EXACT_BOUND = 0.002
"""The same for bitnet with f32 embeddings, which rounds nothing that training did not: 0.0006 there."""

PARAGRAPH = """The quick brown fox can't jump 1,234.5 times over the lazy dog -- she'll try again at \
10:45, won't she?  "Quotes", (brackets) and [more] {braces}; semi-colons: all\tof them.

def area(radius: float = 2e-3) -> float:
    \"\"\"pi * r ** 2\"\"\"
    return 3.14159 * radius**2  # == 0 if not radius


Größe, naïve café, Ελληνικά, русский текст, 漢字かな交じり文, العربية, हिन्दी, 한국어; 🙂👩‍🚀 €99 ½ x² ≠ ∞.
    Four spaces,\r\nan old line end, and   three   gaps    \n\n\n
She said that the sea was calm in the morning, and that the boats would leave before noon. Nobody in \
the village had seen such weather in years; the old men sat outside and spoke of other summers. When \
the wind turned at last, they counted the sails one by one until the last of them was out of sight.
"""
"""Default text: several scripts, code, numbers, contractions and white space, in Unicode form NFC."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What was found."""

    reader: str
    text: str
    """Name of the text."""
    tokens: int
    """Next tokens compared."""
    same_token_ids: bool
    """Of `PARAGRAPH`, by the reader's tokenizer and by ours."""
    mean_difference: float
    """Nats: mean over tokens of |log p(next token) - ours|."""
    largest_difference: float
    """Nats, of one token."""
    same_best_token: float
    """Share of positions with the same most probable token."""
    perplexity: float
    """Of the trained model."""
    export_perplexity: float
    bound: float
    """Largest `mean_difference` that passes."""

    @property
    def perplexity_difference(self) -> float:
        """Relative to the trained model's."""
        return self.export_perplexity / self.perplexity - 1

    @property
    def failures(self) -> list[str]:
        """What is out of bounds, one phrase each."""
        found = []
        if not self.same_token_ids:
            found.append("other token ids")
        # Written so that NaN fails.
        if not self.mean_difference <= self.bound:
            found.append(
                f"log-probabilities {self.mean_difference:.2g} nats off (bound {self.bound:g})"
            )
        if not abs(self.perplexity_difference) <= PERPLEXITY_BOUND:
            found.append(
                f"perplexity {self.perplexity_difference:+.2%} off (bound {PERPLEXITY_BOUND:.0%})"
            )
        return found

    def rows(self) -> list[Row]:
        """For a table: what was compared, and what was found, with the bound in brackets."""
        return [
            ("reader", self.reader),
            ("text", f"{self.text}, {self.tokens:,} next tokens"),
            ("token ids", "the same" if self.same_token_ids else "DIFFERENT"),
            (
                "log-probability",
                f"{self.mean_difference:.1e} nats off on average (bound {self.bound:.1e})",
            ),
            ("", f"{self.largest_difference:.1e} nats off at most"),
            ("best token", f"the same in {self.same_best_token:.2%} of positions"),
            ("perplexity", f"{self.export_perplexity:.4f}, trained model {self.perplexity:.4f}"),
            ("", f"{self.perplexity_difference:+.3%} (bound {PERPLEXITY_BOUND:.0%})"),
        ]


def bound_of(config: ExportConfig, blocks: int) -> float:
    """Largest error of logits for a format and a number of blocks."""
    exact = config.format == "bitnet" and config.embeddings == "f32"
    return (EXACT_BOUND if exact else LOGIT_BOUND) * math.sqrt(blocks)


def verify(
    source: Checkpoint,
    out: Path,
    config: ExportConfig,
    text: tuple[np.ndarray, str],
    on_progress: OnProgress | None = None,
) -> Verification:
    """Compare the export in `out` with the trained model; the reader must be installed.

    The two models are in memory one after the other. `text` is of `text_to_verify`; `on_progress` is
    called with the tokens scored so far, by both, and in all. Raises `UserError` when the reader refuses
    the export.
    """
    tokens, text_name = text
    positions = source.config.get("max_position_embeddings") or LARGEST_CONTEXT
    trained = source.trained_context_length or LARGEST_CONTEXT
    context_length = min(positions, trained, LARGEST_CONTEXT)
    trained_model = TransformersReader(source.folder, source.tokenizer())
    done, total = 0, 2 * (len(tokens) - 1)

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if on_progress is not None:
            on_progress(done, total)

    ours = _score(trained_model.log_probabilities, tokens, context_length, advance)
    ids = trained_model.tokenise(PARAGRAPH)
    del trained_model
    with open_reader(config.format, out, context_length) as reader:
        theirs = _score(reader.log_probabilities, tokens, context_length, advance)
        same_ids = reader.tokenise(PARAGRAPH) == ids
        name = reader.name
    blocks = source.config.get("num_hidden_layers") or len(source.layers)
    difference = (theirs.log_probability - ours.log_probability).abs()
    return Verification(
        reader=name,
        text=text_name,
        tokens=len(difference),
        same_token_ids=same_ids,
        mean_difference=difference.mean().item(),
        largest_difference=difference.max().item(),
        same_best_token=(theirs.best == ours.best).double().mean().item(),
        perplexity=math.exp(-ours.log_probability.mean().item()),
        export_perplexity=math.exp(-theirs.log_probability.mean().item()),
        bound=bound_of(config, blocks) * ours.sensitivity.mean().item(),
    )


def text_to_verify(source: Checkpoint, config: ExportConfig) -> tuple[np.ndarray, str]:
    """Tokens to score and the name of their text. Raises `UserError` for an unusable one."""
    record = read_record(source.folder)
    data = config.text or record.data_folder
    if data is None:
        trained_on = record.config.get("data")
        why = f": {trained_on}, on which it was trained, is not here" if trained_on else ""
        tokens = source.tokenizer()(PARAGRAPH, add_special_tokens=False).input_ids
        return np.asarray(
            tokens[: config.verify_tokens + 1], dtype=np.int64
        ), f"a built-in one{why}"
    text = read_held_out(data, str(source.folder))
    tokens = np.asarray(text.tokens[: config.verify_tokens + 1])
    if len(tokens) < 2:
        raise UserError(f"{data} has {len(tokens)} tokens; verification needs at least 2")
    return tokens, Path(text.name).name


@dataclass(frozen=True)
class _Scores:
    """Per scored token."""

    log_probability: Tensor
    """float64, of the token that follows."""
    best: Tensor
    """int64, the most probable one."""
    sensitivity: Tensor
    """Length of the gradient of its log-probability in the logits: from 0 where it is certain to 1 where
    nothing is probable."""


def _score(
    log_probabilities: Callable[[np.ndarray], Tensor],
    tokens: np.ndarray,
    context_length: int,
    on_tokens: Callable[[int], None],
) -> _Scores:
    of_next, best, sensitivity = [], [], []
    for start in range(0, len(tokens) - 1, context_length):
        piece = tokens[start : start + context_length + 1].astype(np.int64)
        labels = torch.from_numpy(piece[1:])
        values = log_probabilities(piece[:-1])
        of_next.append(values.gather(1, labels[:, None])[:, 0].double())
        own, squares = of_next[-1].exp(), values.double().mul(2).exp().sum(1)
        sensitivity.append((1 - 2 * own + squares).clamp(min=0).sqrt())
        best.append(values.argmax(1))
        on_tokens(len(labels))
    return _Scores(torch.cat(of_next), torch.cat(best), torch.cat(sensitivity))
