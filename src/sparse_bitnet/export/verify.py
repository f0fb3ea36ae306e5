# SPDX-License-Identifier: Apache-2.0
"""Verification of an export: load it back and compare it with the trained model.

An export is loaded with its real reader: transformers with whatever package the format needs, or
llama.cpp through llama-cpp-python. The verification compares token ids of a text full of awkward
characters, the log-probability of every next token of a held-out text, and the perplexity of that text.

A format rounds embeddings and scales, and its reader quantises activations in its own way. An activation
on the other side of a rounding boundary moves all later ones a little, so single tokens are shown, but
the mean over tokens is bounded. Rounding moves logits by similar amounts on every text, but log p of a
token that the model is certain of hardly changes. So the bound is on logits, times the sensitivity of
this text's log p to them.

A packed folder rounds nothing but its embeddings: its logits are compared bit for bit.
"""

import contextlib
import importlib.metadata
import importlib.util
import io
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sparse_bitnet.checkpoint.checkpoint import Checkpoint
from sparse_bitnet.checkpoint.load import from_pretrained, load_tokenizer, load_with
from sparse_bitnet.checkpoint.open_checkpoint import find_checkpoint
from sparse_bitnet.data.held_out import read_held_out
from sparse_bitnet.errors import UserError, library_errors_as
from sparse_bitnet.export.export_config import ExportConfig
from sparse_bitnet.export.model_card import Row, gguf_file_name, read_record
from sparse_bitnet.nn.convert import selected
from sparse_bitnet.nn.ternary_tables import set_tables_
from sparse_bitnet.progress import OnProgress

LARGEST_CONTEXT = 512
PERPLEXITY_BOUND = 0.01
"""Largest relative difference of perplexity, for every format."""

LOGIT_BOUND = 0.03
"""Largest logit error in nats, before it is multiplied by the root of the number of blocks: each block
rounds, and independent errors add in squares. A trained model of 4 blocks showed 0.003."""

EXACT_BOUND = 0.002
"""`LOGIT_BOUND` for bitnet with f32 embeddings, which adds no rounding; 4 blocks showed 0.0006."""

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

_NEEDED = {
    "bitnet": ("accelerate", "accelerate"),
    "compressed-tensors": ("compressed_tensors", "compressed-tensors"),
    "gguf": ("llama_cpp", "llama-cpp-python"),
}


def absent_reader(format: str) -> str | None:
    """Return a message that names the package missing for reading `format`, or None."""
    for prefix, (module, package) in _NEEDED.items():
        if format.startswith(prefix) and importlib.util.find_spec(module) is None:
            return f"{package}, which reads {format}, is not installed (pip install {package})"
    return None


class Reader(NamedTuple):
    """A model loaded by the reader of a format."""

    name: str
    """Tool that loaded it, with its version."""
    tokenise: Callable[[str], list[int]]
    """Returns token ids; no special tokens are added and none recognised in the text."""
    log_probabilities: Callable[[np.ndarray], Tensor]
    """Returns log-probabilities of the token after each one, float32 [len(tokens), vocabulary]."""


def open_reader(format: str, folder: Path, context_length: int) -> AbstractContextManager[Reader]:
    """Load an export with its real reader; the end of the block frees the memory.

    Raises `UserError` when the reader refuses it.
    """
    if format.startswith("gguf"):
        return llama_cpp_reader(folder / gguf_file_name(format), context_length)
    from transformers import AutoTokenizer

    packages = ["transformers"] + ["compressed-tensors"] * format.startswith("compressed-tensors")
    name = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    tokenizer = load_with(AutoTokenizer.from_pretrained, folder)
    return contextlib.nullcontext(transformers_reader(folder, tokenizer, name))


def transformers_reader(folder: Path, tokenizer: Any, name: str = "sparse-bitnet") -> Reader:
    """Load a folder with transformers, in float32 so that nothing else is rounded: an export, or the
    trained model, whose masks and codes are selected once."""

    def tokenise(text: str) -> list[int]:
        with library_errors_as("its tokenizer cannot encode the text"):
            return tokenizer(text, add_special_tokens=False).input_ids

    def log_probabilities(tokens: np.ndarray) -> Tensor:
        # transformers compiles parts of its bitnet layer, which needs a C++ compiler on a CPU.
        with torch.compiler.set_stance("force_eager"):
            logits = _logits(model, torch.from_numpy(tokens.astype(np.int64))[None])
        return torch.log_softmax(logits[0], -1)

    # Hide progress bars of transformers and compressed-tensors; errors still raise.
    with contextlib.redirect_stderr(io.StringIO()):
        model = from_pretrained(folder, dtype=torch.float32).eval()
    return Reader(name, tokenise, log_probabilities)


@contextmanager
def llama_cpp_reader(path: Path, context_length: int) -> Iterator[Reader]:
    """Load a GGUF file with llama.cpp. Raises `UserError` when it refuses the file."""
    from llama_cpp import Llama

    with library_errors_as(f"llama.cpp refuses {path}"):
        model: Any = Llama(
            str(path),
            n_ctx=context_length,
            n_batch=context_length,
            n_threads=torch.get_num_threads(),
            logits_all=True,
            verbose=False,
        )

    def tokenise(text: str) -> list[int]:
        return model.tokenize(text.encode(), add_bos=False, special=False)

    def log_probabilities(tokens: np.ndarray) -> Tensor:
        model.reset()
        model.eval([int(token) for token in tokens])
        return torch.log_softmax(torch.from_numpy(model.scores[: len(tokens)]).clone(), -1)

    # llama-cpp-python raises if it is closed at interpreter exit.
    with contextlib.closing(model):
        version = importlib.metadata.version("llama-cpp-python")
        yield Reader(f"llama-cpp-python {version}", tokenise, log_probabilities)


@torch.no_grad()
def _logits(model: Any, ids: Tensor) -> Tensor:
    with selected(model), library_errors_as(f"transformers cannot run {model.name_or_path}"):
        return model(input_ids=ids, use_cache=False).logits.float()


@dataclass(frozen=True, kw_only=True)
class Verification:
    """Comparison of an export with the trained model."""

    reader: str
    text: str
    """Name of the text."""
    tokens: int
    """Number of next tokens compared."""
    same_token_ids: bool
    """Whether the reader's tokenizer and ours give the same ids for `PARAGRAPH`."""
    mean_difference: float
    """Mean over tokens of |log p(next token) - ours|, in nats."""
    largest_difference: float
    """Largest |log p(next token) - ours| of a token, in nats."""
    same_best_token: float
    """Share of positions with the same most probable token."""
    perplexity: float
    """Perplexity of the trained model."""
    export_perplexity: float
    bound: float
    """Largest `mean_difference` that passes."""

    @property
    def perplexity_difference(self) -> float:
        """Difference of the export's perplexity from the trained model's, relative to the latter."""
        return self.export_perplexity / self.perplexity - 1

    @property
    def failures(self) -> list[str]:
        """List everything that is out of bounds, one phrase each."""
        failures = [] if self.same_token_ids else ["token ids differ"]
        # Written so that NaN fails.
        if not (mean := self.mean_difference) <= self.bound:
            failures.append(f"log-probabilities differ by {mean:.2g} nats (bound {self.bound:g})")
        if not abs(relative := self.perplexity_difference) <= PERPLEXITY_BOUND:
            failures.append(f"perplexity differs by {relative:+.2%} (bound {PERPLEXITY_BOUND:.0%})")
        return failures

    def rows(self) -> list[Row]:
        """Return table rows: each compared quantity, and its difference, with the bound in brackets."""
        mean = f"differs by {self.mean_difference:.1e} nats on average (bound {self.bound:.1e})"
        return [
            ("reader", self.reader),
            ("text", f"{self.text}, {self.tokens:,} next tokens"),
            ("token ids", "the same" if self.same_token_ids else "DIFFERENT"),
            ("log-probability", mean),
            ("", f"differs by {self.largest_difference:.1e} nats at most"),
            ("best token", f"the same in {self.same_best_token:.2%} of positions"),
            ("perplexity", f"{self.export_perplexity:.4f}, trained model {self.perplexity:.4f}"),
            ("", f"differs by {self.perplexity_difference:+.3%} (bound {PERPLEXITY_BOUND:.0%})"),
        ]


def verify(
    source: Checkpoint,
    out: Path,
    config: ExportConfig,
    text: tuple[np.ndarray, str],
    on_progress: OnProgress | None = None,
) -> Verification:
    """Compare the export in `out` with the trained model; the reader must be installed.

    The two models are in memory one after the other. `text` comes from `text_to_verify`; `on_progress`
    is called with the tokens scored so far, by both, and in all. Raises `UserError` when the reader
    refuses the export.
    """
    tokens, text_name = text
    lengths = (source.config.get("max_position_embeddings"), source.trained_context_length)
    context_length = min([LARGEST_CONTEXT, *filter(None, lengths)])
    report, count = on_progress or (lambda done, total: None), len(tokens) - 1
    trained = transformers_reader(source.folder, load_tokenizer(source.folder))
    ours, our_best, sensitivity = _score(
        trained, tokens, context_length, lambda done: report(done, 2 * count)
    )
    ids = trained.tokenise(PARAGRAPH)
    del trained
    with open_reader(config.format, out, context_length) as reader:
        theirs, their_best, _ = _score(
            reader, tokens, context_length, lambda done: report(count + done, 2 * count)
        )
        same_ids = reader.tokenise(PARAGRAPH) == ids
    blocks = source.config.get("num_hidden_layers") or len(source.layers)
    exact = config.format == "bitnet" and config.embeddings == "f32"
    bound = (EXACT_BOUND if exact else LOGIT_BOUND) * math.sqrt(blocks)
    difference = (theirs - ours).abs()
    return Verification(
        reader=reader.name,
        text=text_name,
        tokens=len(difference),
        same_token_ids=same_ids,
        mean_difference=difference.mean().item(),
        largest_difference=difference.max().item(),
        same_best_token=(their_best == our_best).double().mean().item(),
        perplexity=math.exp(-ours.mean().item()),
        export_perplexity=math.exp(-theirs.mean().item()),
        bound=bound * sensitivity.mean().item(),
    )


def text_to_verify(source: Checkpoint, config: ExportConfig) -> tuple[np.ndarray, str]:
    """Return tokens to score and the name of their text. Raises `UserError` for an unusable one."""
    record = read_record(source.folder)
    data = config.text or record.data_folder
    if data is None:
        trained_on = record.config.get("data")
        why = f": {trained_on}, on which it was trained, is not here" if trained_on else ""
        tokens = load_tokenizer(source.folder)(PARAGRAPH, add_special_tokens=False).input_ids
        return np.asarray(tokens[: config.verify_tokens + 1], np.int64), f"a built-in one{why}"
    text = read_held_out(data, str(source.folder))
    tokens = np.asarray(text.tokens[: config.verify_tokens + 1])
    if len(tokens) < 2:
        raise UserError(f"{data} has {len(tokens)} tokens; verification needs at least 2")
    return tokens, Path(text.name).name


def _score(
    reader: Reader, tokens: np.ndarray, context_length: int, on_tokens: Callable[[int], None]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each token but the first: its log-probability, float64; the most probable token in its
    place; and the norm of the gradient of its log-probability with respect to the logits, from 0 for a
    certain token to 1 for an improbable one."""
    of_next, best, sensitivity = [], [], []
    for start in range(0, len(tokens) - 1, context_length):
        piece = tokens[start : start + context_length + 1].astype(np.int64)
        labels = torch.from_numpy(piece[1:])
        values = reader.log_probabilities(piece[:-1])
        of_next.append(values.gather(1, labels[:, None])[:, 0].double())
        own, squares = of_next[-1].exp(), values.double().mul(2).exp().sum(1)
        sensitivity.append((1 - 2 * own + squares).clamp(min=0).sqrt())
        best.append(values.argmax(1))
        on_tokens(start + len(labels))
    return torch.cat(of_next), torch.cat(best), torch.cat(sensitivity)


def check_packed(source: str | Path, packed: str | Path) -> float:
    """Compare a packed model's logits on 128 random tokens with the trained model's, in the dtype of the
    latter, one model in memory at a time.

    Returns the largest |logit difference|, which is due to the rounded embeddings. Raises `UserError`
    when either model cannot be loaded, the trained one's logits are not finite, or the packed one's
    logits differ in any bit from those of the trained model with the packed embeddings.
    """
    model: Any = find_checkpoint(packed).load().eval()
    vocabulary = model.get_input_embeddings().num_embeddings
    ids = torch.randint(vocabulary, (2, 64), generator=torch.Generator().manual_seed(0))
    packed_logits = _logits(model, ids)
    embeddings = [module.weight.detach() for module in _ends(model)]
    del model
    trained: Any = find_checkpoint(source).load().eval()
    trained_logits = _logits(trained, ids)
    if not trained_logits.isfinite().all():
        raise UserError(f"{source} gives logits that are not finite; train it again")
    set_tables_(trained, ternary=False)
    for module, weight in zip(_ends(trained), embeddings, strict=True):
        module.weight = nn.Parameter(weight.to(module.weight.dtype))
    difference = float((packed_logits - trained_logits).abs().max())
    if not torch.equal(packed_logits, _logits(trained, ids)):
        raise UserError(
            f"{packed} would not compute what the trained model computes (logits differ by up to "
            f"{difference:.3g}): report this as a bug"
        )
    return difference


def _ends(model: Any) -> list[Any]:
    head = model.get_output_embeddings()
    return [model.get_input_embeddings(), *([] if head is None else [head])]
