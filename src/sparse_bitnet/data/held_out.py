# SPDX-License-Identifier: Apache-2.0
"""Held-out text by the name that a user gives, in the tokens of a checkpoint."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sparse_bitnet.checkpoint.load import load_tokenizer
from sparse_bitnet.data.chat import IDS, LEARNT, check_conversation, check_template
from sparse_bitnet.data.documents import skipped_line
from sparse_bitnet.data.file_source import FileSource, check_text
from sparse_bitnet.data.preparation import batches, encoder
from sparse_bitnet.data.shards import TokenDataset
from sparse_bitnet.data.tokenizer import vocabulary_size
from sparse_bitnet.errors import UserError
from sparse_bitnet.progress import say

TokenSequence = TokenDataset | np.ndarray
"""Token ids; slices are arrays."""


@dataclass(frozen=True, kw_only=True)
class HeldOutText:
    """A text in the tokens of one tokenizer."""

    name: str
    tokens: TokenSequence
    text_bytes: int | None
    vocab_size: int
    chat: np.ndarray | None = None
    """The tokens of conversations as they are stored (`data.chat`); None for other text."""

    def first(self, most: int) -> tuple[TokenSequence, int | None]:
        """Return the tokens and the bytes of their text: all of them for 0; else those up to the
        `most`th scored one, whose number of bytes is unknown."""
        if most and self.chat is not None:
            learnt = np.flatnonzero(self.chat & LEARNT)
            most = int(learnt[most - 1]) if most <= len(learnt) else 0
        if 0 < most < len(self.tokens):
            return self.tokens[: most + 1], None
        return self.tokens, self.text_bytes


def read_held_out(
    data: str | Path, checkpoint: str, *, column: str | None = None, chat: bool = False
) -> HeldOutText:
    """Return the validation split of a prepared folder, or files tokenised for the checkpoint.

    Args:
        data: folder written by `sparse-bitnet prepare`, or a file or glob of a kind that it reads, of
            which every document counts.
        checkpoint: a resolved checkpoint. Its tokenizer tokenises files, and must be the one that a
            folder was prepared with.
        column: of .jsonl, .json, .csv and .parquet files; default "text", for conversations "messages".
        chat: read the documents of a file as conversations.

    Raises `UserError` for unreadable data and for another tokenizer.
    """
    if (Path(data) / "manifest.json").is_file():
        text = _prepared(Path(data), checkpoint)
        if column is not None:
            raise UserError(f"{data} holds tokenised text, without columns: leave out --column")
        if chat and text.chat is None:
            raise UserError(f"{data} holds text, not conversations: leave out --chat")
        return text
    column = column or ("messages" if chat else "text")
    check = check_conversation if chat else check_text
    source = FileSource.matching([str(data)], column=column, check=check, validation_fraction=0.0)
    tokenizer = load_tokenizer(checkpoint)
    if chat:
        check_template(tokenizer)
    encode = encoder(tokenizer, np.dtype(np.uint32), chat)
    encoded, skipped, text_bytes = list[np.ndarray](), list[str](), 0
    for batch in batches(source.documents()):
        for document, tokens in zip(batch, encode(batch), strict=True):
            if isinstance(tokens, str):
                skipped.append(tokens)
            else:
                encoded.append(tokens)
                text_bytes += len(document.text.encode())
    reasons = skipped_line(len(skipped), skipped[0]) if skipped else ""
    if not encoded:
        raise UserError(f"{data}: no conversation to score; {reasons}")
    if reasons:
        say(reasons)
    stored = np.concatenate(encoded)
    return HeldOutText(
        name=str(data),
        tokens=stored & IDS if chat else stored,
        text_bytes=None if chat else text_bytes,
        vocab_size=vocabulary_size(tokenizer),
        chat=stored if chat else None,
    )


def _prepared(folder: Path, checkpoint: str) -> HeldOutText:
    dataset = TokenDataset.open(folder, "validation")
    dataset.check_tokenizer(Path(checkpoint), checkpoint)
    stored = dataset.stored(slice(None)) if dataset.is_chat else None
    return HeldOutText(
        name=f"{folder} (validation)",
        tokens=dataset if stored is None else stored & IDS,
        text_bytes=None if dataset.is_chat else dataset.manifest.splits["validation"].text_bytes,
        vocab_size=dataset.vocab_size,
        chat=stored,
    )
