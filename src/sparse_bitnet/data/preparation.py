# SPDX-License-Identifier: Apache-2.0
"""Tokenise a source into shards, once; an interrupted preparation continues where it was.

`preparation.json` holds the settings, the source's state, and how far each split is written. It is
replaced at every finished shard and every 10 seconds, after what it describes has reached the disk. A
process killed at any moment loses at most that much work, and what it has written in the end, after
continuing, is byte for byte what it would have written without a stop.
"""

import json
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparse_bitnet.checkpoint.load import load_tokenizer
from sparse_bitnet.data import chat as conversations
from sparse_bitnet.data.documents import SPLITS, TRAIN, VALIDATION, Document, State, TextSource
from sparse_bitnet.data.file_source import skipped_line
from sparse_bitnet.data.manifest import (
    MANIFEST,
    PREPARATION,
    TOKENIZER,
    VERSION,
    Manifest,
    SplitManifest,
    token_dtype,
)
from sparse_bitnet.data.near_duplicates import SeparatedSource, compare_splits
from sparse_bitnet.data.shards import ShardWriter
from sparse_bitnet.data.tokenizer import (
    check_vocabulary_size,
    text_backend,
    tokenised,
    tokenizer_hash,
    train_tokenizer,
    vocabulary_size,
)
from sparse_bitnet.errors import UserError
from sparse_bitnet.files import (
    TEMPORARY_PREFIX,
    atomic_folder,
    check_ours,
    locked_folder,
    remove_leftovers,
    write_atomic,
)
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
        is_part: of a text, the whole of which is compared with what is held out (`parts`).

    Raises:
        UserError: bad text or tokenizer, no training text, a full disk, a folder in use, or one that
            holds something else or was prepared with other settings (the message says which).
    """
    out = Path(out)
    if (tokenizer is None) == (vocab_size is None):
        raise UserError("give either --tokenizer PATH_OR_HUB_ID or --vocab-size N")
    if vocab_size is not None:
        check_vocabulary_size(vocab_size)
    if eos_token is not None and not isinstance(tokenizer, str | Path):
        raise UserError("an end token can be chosen for a tokenizer that is loaded only")
    if shard_tokens < 1:
        raise UserError(f"a shard of {shard_tokens} tokens is too small")
    if isinstance(tokenizer, str | Path):
        tokenizer = load_tokenizer(tokenizer, eos_token=eos_token)
    settings = settings_of(source, tokenizer, vocab_size, shard_tokens, chat)
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
        state = _begin(out, settings)
        if isinstance(source, SeparatedSource):
            source.find(lambda size: line(size, None, label="looking for near-duplicates"))
        if not (out / TOKENIZER).exists():
            if tokenizer is None:
                assert vocab_size is not None
                line(0, None, label="training a tokenizer")
                tokenizer = train_tokenizer(_sample(source), vocab_size)
            with atomic_folder(out / TOKENIZER) as folder:
                tokenizer.save_pretrained(folder)
        return _Preparation(source, out, state, line, is_part).run()


def settings_of(
    source: TextSource,
    tokenizer: "PreTrainedTokenizerFast | None",
    vocab_size: int | None,
    shard_tokens: int,
    chat: bool,
) -> dict[str, Any]:
    """Return the settings of the data, as JSON. Raises `UserError` for a chat without a template."""
    if chat and tokenizer is None:
        raise UserError("conversations need a tokenizer with a chat template")
    settings: dict[str, Any] = {
        "source": source.describe(),
        "tokenizer": {"vocab_size": vocab_size, "sample_bytes": TOKENIZER_SAMPLE_BYTES}
        if tokenizer is None
        else {"hash": tokenizer_hash(tokenizer)},
        "shard_tokens": shard_tokens,
    }
    if chat and tokenizer is not None:
        settings["chat"] = conversations.check_template(tokenizer)
    return json.loads(json.dumps(settings))


def check_settings(out: Path, there: dict[str, Any], asked: dict[str, Any]) -> None:
    """Raise `UserError` that says which settings differ, if any do."""
    if differences := list(_differences("", there, asked)):
        raise UserError(
            f"{out}: prepared with other settings: {'; '.join(differences)}; choose another folder or "
            "remove this one"
        )


def _differences(name: str, there: Any, asked: Any) -> Iterator[str]:
    if isinstance(there, dict) and isinstance(asked, dict):
        for key in dict.fromkeys([*there, *asked]):
            inner = f"{name}.{key}" if name else key
            yield from _differences(inner, there.get(key), asked.get(key))
    elif there != asked:
        shown = (json.dumps(value) for value in (there, asked))
        short = (text if len(text) <= 60 else f"{text[:40]}..." for text in shown)
        yield "{} is {} there, {} here".format(name, *short)


@dataclass
class _State:
    """How far a preparation has come: the content of `preparation.json`."""

    settings: dict[str, Any]
    source: State = None
    """State of the source from which to resume; None: nothing is written yet."""
    writers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """`ShardWriter.checkpoint` of each split."""
    counts: dict[str, dict[str, int]] = field(
        default_factory=lambda: {split: {"documents": 0, "text_bytes": 0} for split in SPLITS}
    )
    """Documents and bytes of text written, of each split."""
    skipped: int = 0
    """Rows and files that hold no document."""
    first_skipped: str = ""
    """Why the first of them does not."""

    def write(self, out: Path) -> None:
        write_atomic(out / PREPARATION, json.dumps(asdict(self), indent=2) + "\n")


def _begin(out: Path, settings: dict[str, Any]) -> _State:
    """The preparation to continue, or a new one. Raises `UserError` for one with other settings."""
    remove_leftovers(out)
    path = out / PREPARATION
    if path.exists():
        try:
            state = _State(**json.loads(path.read_bytes()))
        except (ValueError, TypeError, RecursionError) as error:
            raise UserError(f"{path}: damaged; remove {out} and prepare again") from error
        if state.settings == settings:
            return state
        if state.source is not None:
            check_settings(out, state.settings, settings)
        # Nothing is written yet, as after a mistyped option: there is nothing to protect.
        if (out / TOKENIZER).exists():
            os.replace(out / TOKENIZER, out / f"{TEMPORARY_PREFIX}{TOKENIZER}")
            remove_leftovers(out)
    state = _State(settings)
    state.write(out)
    return state


def _sample(source: TextSource) -> Iterator[str]:
    size = 0
    for document in source.documents():
        if document.split == TRAIN:
            yield document.text
            size += len(document.text.encode())
            if size >= TOKENIZER_SAMPLE_BYTES:
                return


def batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Documents of 2 MB together or a little more; each batch but the last ends where a source can
    continue."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text.encode())
        if size >= _BATCH_BYTES and document.state is not None:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _Preparation:
    """One run: the writers, and what has been written so far."""

    def __init__(
        self, source: TextSource, out: Path, state: _State, line: Line, is_part: bool
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
        pending: deque[tuple[list[Document], Future[list[np.ndarray | str]]]] = deque()
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

    def _encode(self, batch: list[Document]) -> list[np.ndarray | str]:
        """The tokens of each document, or why it is skipped."""
        texts = [document.text for document in batch if not document.skipped]
        encoded: Iterator[np.ndarray | str]
        if self.chat:
            encoded = map(self._conversation, texts)
        else:
            encoded = tokenised(self.backend, texts, self.tokenizer.eos_token_id, self.dtype)
        return [document.skipped or next(encoded) for document in batch]

    def _conversation(self, text: str) -> np.ndarray | str:
        try:
            return conversations.encode(self.tokenizer, text)
        except UserError as error:
            return str(error)

    def _write(self, batch: list[Document], encoded: "Future[list[np.ndarray | str]]") -> None:
        state, shards = self.state, self._shards()
        tokens: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
        for document, one in zip(batch, encoded.result(), strict=True):
            if isinstance(one, str):
                state.skipped += 1
                state.first_skipped = state.first_skipped or one
                continue
            tokens[document.split].append(one)
            state.counts[document.split]["documents"] += 1
            state.counts[document.split]["text_bytes"] += len(document.text.encode())
        for split, parts in tokens.items():
            if parts:
                self.writers[split].append(np.concatenate(parts))
        state.source = batch[-1].state
        is_due = time.monotonic() - self.checkpointed > _CHECKPOINT_SECONDS
        # Without a state the source cannot continue from here: after the next batch.
        if state.source is not None and (is_due or self._shards() > shards):
            state.writers = {split: writer.checkpoint() for split, writer in self.writers.items()}
            state.write(self.out)
            self.checkpointed = time.monotonic()
        self._show(batch[-1].progress)

    def _shards(self) -> int:
        return sum(len(writer.shards) for writer in self.writers.values())

    def _show(self, share: float | None) -> None:
        size = sum(count["text_bytes"] for count in self.state.counts.values())
        self.line(size, size / share if share else None, label="tokenising")

    def _finish(self) -> Manifest:
        state, skipped = self.state, skipped_line(self.state.skipped, self.state.first_skipped)
        if not self.writers[TRAIN].tokens:
            raise UserError(
                f"{self.source.name}: no training text; "
                + (skipped or "give more documents or a smaller --validation-fraction")
            )
        splits = {
            split: SplitManifest(
                tokens=writer.tokens, shards=writer.finish(), **state.counts[split]
            )
            for split, writer in self.writers.items()
        }
        manifest = Manifest(
            version=VERSION,
            settings=state.settings,
            # Half a second for a large vocabulary, and not changed by saving.
            tokenizer_hash=state.settings["tokenizer"].get("hash")
            or tokenizer_hash(self.tokenizer),
            vocab_size=self.vocab_size,
            dtype=self.dtype.name,
            eos_token_id=self.tokenizer.eos_token_id,
            splits=splits,
        )
        if not self.is_part:
            comparing = partial(self.line, label="comparing the held-out text")
            manifest = compare_splits(self.out, manifest, self.tokenizer, comparing)
        manifest.write(self.out)
        (self.out / PREPARATION).unlink()
        for shard in splits[VALIDATION].shards:
            if shard not in manifest.splits[VALIDATION].shards:
                (self.out / shard.file).unlink()
        if skipped:
            say(skipped)
        return manifest
