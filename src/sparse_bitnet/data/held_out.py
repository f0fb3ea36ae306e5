# SPDX-License-Identifier: Apache-2.0
"""Held-out text as people name it, in the tokens of a checkpoint."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sparse_bitnet.checkpoint.load import load_tokenizer
from sparse_bitnet.data.chat import IDS, check_conversation, check_template, encode
from sparse_bitnet.data.file_source import FileSource, skipped_line
from sparse_bitnet.data.preparation import batches
from sparse_bitnet.data.shards import TokenDataset
from sparse_bitnet.data.tokenizer import text_backend, tokenised, vocabulary_size
from sparse_bitnet.errors import UserError
from sparse_bitnet.progress import say


class TokenSequence(Protocol):
    """A one-dimensional array of token ids: a numpy array or a `TokenDataset`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any) -> np.ndarray: ...


@dataclass(frozen=True, kw_only=True)
class HeldOutText:
    """A text as the tokens of one tokenizer."""

    name: str
    tokens: TokenSequence | np.ndarray
    text_bytes: int | None
    vocab_size: int
    chat: np.ndarray | None = None
    """The tokens of conversations as they are stored (`data.chat`); None for other text."""

    def first(self, most: int) -> tuple[TokenSequence | np.ndarray, int | None]:
        """The tokens, and the bytes of their text: all for 0, or this many scored ones and the one before
        them, whose bytes are not known."""
        if 0 < most < len(self.tokens):
            return self.tokens[: most + 1], None
        return self.tokens, self.text_bytes

    def check_vocab(self, model_vocab_size: int) -> None:
        """Raise `UserError` where the tokenizer has more tokens than the model's embedding."""
        if self.vocab_size > model_vocab_size:
            raise UserError(
                f"{self.name}: its tokenizer's vocabulary has {self.vocab_size:,} tokens, the model's "
                f"{model_vocab_size:,}; evaluate with the tokenizer that the model was trained with"
            )


def read_held_out(
    data: str | Path, checkpoint: str, *, column: str | None = None, chat: bool = False
) -> HeldOutText:
    """The validation split of a prepared folder, or files tokenised for the checkpoint.

    Args:
        data: folder written by `sparse-bitnet prepare`, or a file or glob of a kind that it reads, all
            of whose documents count.
        checkpoint: a resolved one; its tokenizer must be the one the folder was prepared with, and
            turns files into tokens.
        column: of .jsonl, .json, .csv and .parquet files; default "text", of conversations "messages".
        chat: the documents of a file are conversations.

    Raises `UserError` for unreadable data and for another tokenizer.
    """
    if (Path(data) / "manifest.json").is_file():
        text = _prepared(Path(data), checkpoint)
        if chat and text.chat is None:
            raise UserError(f"{data} holds text, not conversations: leave out --chat")
        return text
    if chat:
        return _conversations(str(data), checkpoint, column or "messages")
    source = FileSource.matching([str(data)], column=column or "text", validation_fraction=0.0)
    tokenizer = load_tokenizer(checkpoint)
    backend = text_backend(tokenizer)
    pieces, skipped = list[np.ndarray](), list[str]()
    text_bytes = 0
    for batch in batches(source.documents()):
        skipped += [document.skipped for document in batch if document.skipped]
        texts = [document.text for document in batch if not document.skipped]
        pieces += tokenised(backend, texts, tokenizer.eos_token_id, np.dtype(np.uint32))
        text_bytes += sum(len(text.encode()) for text in texts)
    if skipped:
        say(skipped_line(len(skipped), skipped[0]))
    return HeldOutText(
        name=str(data),
        tokens=np.concatenate(pieces),
        text_bytes=text_bytes,
        vocab_size=vocabulary_size(tokenizer),
    )


def _conversations(data: str, checkpoint: str, column: str) -> HeldOutText:
    source = FileSource.matching(
        [data], column=column, check=check_conversation, validation_fraction=0.0
    )
    tokenizer = load_tokenizer(checkpoint)
    check_template(tokenizer)
    stored, skipped = list[np.ndarray](), list[str]()
    for document in source.documents():
        try:
            if document.skipped:
                raise UserError(document.skipped)
            stored.append(encode(tokenizer, document.text))
        except UserError as error:
            skipped.append(str(error))
    if not stored:
        raise UserError(
            f"{data}: no conversation to score; {skipped_line(len(skipped), skipped[0])}"
        )
    if skipped:
        say(skipped_line(len(skipped), skipped[0]))
    return _of_chat(data, np.concatenate(stored), vocabulary_size(tokenizer))


def _of_chat(name: str, stored: np.ndarray, vocab_size: int) -> HeldOutText:
    return HeldOutText(
        name=name, tokens=stored & IDS, text_bytes=None, vocab_size=vocab_size, chat=stored
    )


def _prepared(folder: Path, checkpoint: str) -> HeldOutText:
    dataset = TokenDataset.open(folder, "validation")
    dataset.check_tokenizer(Path(checkpoint), checkpoint)
    name = f"{folder} (validation)"
    if dataset.is_chat:
        return _of_chat(name, dataset.stored(slice(None)), dataset.vocab_size)
    return HeldOutText(
        name=name,
        tokens=dataset,
        text_bytes=dataset.manifest.splits["validation"].text_bytes,
        vocab_size=dataset.vocab_size,
    )
