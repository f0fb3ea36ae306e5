# SPDX-License-Identifier: Apache-2.0
"""Tokenise a source into shards, once; an interrupted preparation goes on where it was.

The state is saved at every finished shard and every 10 seconds (`preparation_state`). A process killed
at any moment loses at most that much work, and what it has written in the end, after going on, is byte
for byte what it would have written without a stop.
"""

import json
import os
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sparse_bitnet.checkpoint.load import load_tokenizer
from sparse_bitnet.data import chat as conversations
from sparse_bitnet.data.checksums import record_written
from sparse_bitnet.data.documents import SPLITS, TRAIN, VALIDATION, Document, TextSource
from sparse_bitnet.data.manifest import (
    MANIFEST,
    PREPARATION,
    TOKENIZER,
    VERSION,
    Manifest,
    SplitManifest,
    token_dtype,
)
from sparse_bitnet.data.near_duplicates import GroupedSource
from sparse_bitnet.data.overlap import compare_splits
from sparse_bitnet.data.preparation_state import PreparationState, begin, check_settings
from sparse_bitnet.data.shards import ShardWriter
from sparse_bitnet.data.text_files import skipped_line
from sparse_bitnet.data.tokenizer import (
    check_vocabulary_size,
    text_backend,
    tokenised,
    tokenizer_hash,
    train_tokenizer,
    vocabulary_size,
)
from sparse_bitnet.errors import UserError
from sparse_bitnet.files import atomic_folder, check_ours, locked_folder
from sparse_bitnet.progress import Line, Progress, say

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

DEFAULT_SHARD_TOKENS = 1 << 27

TOKENIZER_SAMPLE_BYTES = 32_000_000
"""A new tokenizer is trained on the first training documents, up to this many bytes."""

_BATCH_BYTES = 2_000_000
_CHECKPOINT_SECONDS = 10.0

# Two batches in the tokenizer's thread pool at once: one long document does not leave a core idle.
_BATCHES_IN_FLIGHT = 2


def prepare(
    source: TextSource,
    out: Path | str,
    *,
    tokenizer: "PreTrainedTokenizerFast | Path | str | None" = None,
    vocab_size: int | None = None,
    eos_token: str | None = None,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    chat: bool = False,
    is_part: bool = False,
) -> Manifest:
    """Tokenise `source` into the folder `out`; the end token follows each document.

    A folder that already holds this very preparation is left as it is; an unfinished one is continued.
    Text that spells a special token is tokenised as text, so a document cannot end early.

    Args:
        source: the text, from `sources.parse_source`.
        out: folder, made if needed; see `manifest` for what it then holds.
        tokenizer: a fast transformers tokenizer, its folder, or its hub id; or
        vocab_size: train a byte-level BPE of this size on the first 32 MB of training text.
        eos_token: end token to use instead of the choice saved in the tokenizer's folder.
        shard_tokens: tokens in each file but the last.
        chat: documents are conversations (`chat`), for the tokenizer's chat template.
        is_part: of a text, the whole of which is compared with what is held out (`parts.join`).

    Raises:
        UserError: bad text or tokenizer, no training text, a full disk, a folder in use, or one that
            holds something else or was prepared with other settings (the message says which).
    """
    out = Path(out)
    if (tokenizer is None) == (vocab_size is None):
        raise UserError("give either a tokenizer or the vocabulary size of a new one")
    if vocab_size is not None:
        check_vocabulary_size(vocab_size)
    if eos_token is not None and not isinstance(tokenizer, str | Path):
        raise UserError("an end token can be chosen for a tokenizer that is loaded only")
    if shard_tokens < 1:
        raise UserError(f"a shard of {shard_tokens} tokens is too small")
    if isinstance(tokenizer, str | Path):
        tokenizer = load_tokenizer(tokenizer, eos_token=eos_token)
    if chat and tokenizer is None:
        raise UserError("conversations need a tokenizer with a chat template")
    template = conversations.check_template(tokenizer) if chat and tokenizer is not None else None
    settings = json.loads(
        json.dumps(
            {
                "source": source.describe(),
                "tokenizer": {"hash": tokenizer_hash(tokenizer)}
                if tokenizer is not None
                else {"vocab_size": vocab_size, "sample_bytes": TOKENIZER_SAMPLE_BYTES},
                "shard_tokens": shard_tokens,
                **({"chat": template} if template is not None else {}),
            }
        )
    )
    check_ours(out, [MANIFEST, PREPARATION], "prepared data")
    if os.path.exists(out / MANIFEST):
        manifest = Manifest.read(out)
        check_settings(out, manifest.settings, settings)
        # There only if the process died between its last two steps.
        (out / PREPARATION).unlink(missing_ok=True)
        return manifest
    busy = f"{out}: another process is preparing data there"
    with locked_folder(out, busy), Progress() as display:
        line = display.line("starting", "MB", 1e6)
        start = begin(out, settings)
        if isinstance(source, GroupedSource):
            source.find(lambda size: line(size, None, label="looking for near-duplicates"))
        if not (out / TOKENIZER).exists():
            if tokenizer is None:
                assert vocab_size is not None
                line(0, None, label="training a tokenizer")
                tokenizer = train_tokenizer(_sample(source), vocab_size)
            with atomic_folder(out / TOKENIZER) as folder:
                tokenizer.save_pretrained(folder)
        return _Preparation(source, out, start, line, is_part).run()


class Batch(NamedTuple):
    """Documents that are tokenised together."""

    documents: list[Document]
    text_bytes: dict[str, int]
    """Of each split."""

    @property
    def texts(self) -> list[str]:
        """Of all documents but the skipped ones."""
        return [document.text for document in self.documents if not document.skipped]


def batches(documents: Iterator[Document]) -> Iterator[Batch]:
    """Documents of 2 MB together or a little more; each batch but the last ends where a source can
    go on."""
    batch = Batch([], dict.fromkeys(SPLITS, 0))
    for document in documents:
        batch.documents.append(document)
        batch.text_bytes[document.split] += len(document.text.encode())
        if sum(batch.text_bytes.values()) >= _BATCH_BYTES and document.state is not None:
            yield batch
            batch = Batch([], dict.fromkeys(SPLITS, 0))
    if batch.documents:
        yield batch


class _Preparation:
    """One run: the writers, and what has been written so far."""

    def __init__(
        self, source: TextSource, out: Path, state: PreparationState, line: Line, is_part: bool
    ) -> None:
        self.source, self.out, self.state, self.line = source, out, state, line
        self.is_part = is_part
        self.tokenizer = load_tokenizer(out / TOKENIZER)
        self.chat = "chat" in state.settings
        self.backend = text_backend(self.tokenizer)
        # A chat template spells them to have them.
        self.backend.encode_special_tokens = not self.chat
        self.vocab_size = vocabulary_size(self.tokenizer)
        self.dtype = token_dtype(self.vocab_size, self.chat)
        shard_tokens = state.settings["shard_tokens"]
        self.writers = {
            split: ShardWriter(out, split, self.dtype, shard_tokens, state.writers.get(split))
            for split in SPLITS
        }
        self.checkpointed = time.monotonic()

    def run(self) -> Manifest:
        self._show(None)
        pending: deque[tuple[Batch, Future[list[np.ndarray | str]]]] = deque()
        try:
            with ThreadPoolExecutor(_BATCHES_IN_FLIGHT) as pool:
                for batch in batches(self.source.documents(self.state.source)):
                    pending.append((batch, pool.submit(self._encode, batch)))
                    if len(pending) > _BATCHES_IN_FLIGHT:
                        self._write(*pending.popleft())
                while pending:
                    self._write(*pending.popleft())
            return self._finish()
        finally:
            for writer in self.writers.values():
                writer.close()

    def _encode(self, batch: Batch) -> list[np.ndarray | str]:
        """Of each document the tokens, or why it is skipped."""
        found: Iterator[np.ndarray | str]
        if self.chat:
            found = map(self._conversation, batch.texts)
        else:
            found = tokenised(self.backend, batch.texts, self.tokenizer.eos_token_id, self.dtype)
        return [document.skipped or next(found) for document in batch.documents]

    def _conversation(self, text: str) -> np.ndarray | str:
        try:
            return conversations.encode(self.tokenizer, text)
        except UserError as error:
            return str(error)

    def _write(self, batch: Batch, encoded: "Future[list[np.ndarray | str]]") -> None:
        shards = sum(len(writer.shards) for writer in self.writers.values())
        tokens: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
        for document, found in zip(batch.documents, encoded.result(), strict=True):
            if isinstance(found, str):
                self.state.skipped += 1
                self.state.first_skipped = self.state.first_skipped or found
                continue
            tokens[document.split].append(found)
            self.state.counts[document.split]["documents"] += 1
            self.state.counts[document.split]["text_bytes"] += len(document.text.encode())
        for split, parts in tokens.items():
            if parts:
                self.writers[split].append(np.concatenate(parts))
        self.state.source = batch.documents[-1].state
        finished_shard = sum(len(writer.shards) for writer in self.writers.values()) > shards
        if finished_shard or time.monotonic() - self.checkpointed > _CHECKPOINT_SECONDS:
            self._checkpoint()
        self._show(batch.documents[-1].progress)

    def _show(self, share: float | None) -> None:
        size = sum(count["text_bytes"] for count in self.state.counts.values())
        self.line(size, size / share if share else None, label="tokenising")

    def _checkpoint(self) -> None:
        if self.state.source is None:  # the source cannot go on from here: after the next batch
            return
        self.state.writers = {split: writer.checkpoint() for split, writer in self.writers.items()}
        self.state.write(self.out)
        self.checkpointed = time.monotonic()

    def _finish(self) -> Manifest:
        skipped = skipped_line(self.state.skipped, self.state.first_skipped)
        if not self.writers[TRAIN].tokens:
            raise UserError(
                f"{self.source.name}: no training text; "
                + (skipped or "give more documents or a smaller --validation-fraction")
            )
        splits = {}
        for split, writer in self.writers.items():
            tokens, shards = writer.tokens, writer.finish()
            splits[split] = SplitManifest(tokens=tokens, shards=shards, **self.state.counts[split])
        manifest = Manifest(
            version=VERSION,
            settings=self.state.settings,
            # Half a second for a large vocabulary, and not changed by saving.
            tokenizer_hash=self.state.settings["tokenizer"].get("hash")
            or tokenizer_hash(self.tokenizer),
            vocab_size=self.vocab_size,
            dtype=self.dtype.name,
            eos_token_id=self.tokenizer.eos_token_id,
            splits=splits,
        )
        if not self.is_part:
            comparing = partial(self.line, label="comparing the held-out text")
            manifest = compare_splits(self.out, manifest, self.tokenizer, comparing)
        record_written(self.out, [each for s in manifest.splits.values() for each in s.shards])
        manifest.write(self.out)
        (self.out / PREPARATION).unlink()
        for shard in splits[VALIDATION].shards:
            if shard not in manifest.splits[VALIDATION].shards:
                (self.out / shard.file).unlink()
        if skipped:
            say(skipped)
        return manifest


def _sample(source: TextSource) -> Iterator[str]:
    size = 0
    for document in source.documents():
        if document.split == TRAIN:
            yield document.text
            size += len(document.text.encode())
            if size >= TOKENIZER_SAMPLE_BYTES:
                return
