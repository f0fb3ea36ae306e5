# SPDX-License-Identifier: Apache-2.0
"""Tokenise a source into shards, once; an interrupted preparation resumes.

`preparation.json` holds the settings and how much of each split is written. It is replaced at every full
shard, after that has reached the disk, so a process killed at any moment loses at most the shards that
it was filling. Resuming reads the earlier documents again, without tokenising those in full shards, and
writes byte for byte what an uninterrupted preparation writes.
"""

import copy
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import TypeAdapter

from sparse_bitnet.checkpoint.load import load_tokenizer
from sparse_bitnet.data import chat as conversations
from sparse_bitnet.data.documents import SPLITS, TRAIN, VALIDATION, Document, skipped_line
from sparse_bitnet.data.manifest import (
    MANIFEST,
    PREPARATION,
    TOKENIZER,
    Manifest,
    Unfinished,
    check_shards,
    token_dtype,
)
from sparse_bitnet.data.near_duplicates import measure_overlap
from sparse_bitnet.data.shards import ShardWriter
from sparse_bitnet.data.sources import TextSource
from sparse_bitnet.data.tokenizer import (
    END_OF_TEXT,
    LARGEST_VOCABULARY,
    tokenizer_hash,
    train_tokenizer,
    vocabulary_size,
)
from sparse_bitnet.errors import UserError, library_errors_as
from sparse_bitnet.files import (
    atomic_folder,
    check_ours,
    locked_folder,
    remove_leftovers,
    write_atomic,
)
from sparse_bitnet.progress import Line, Progress, say

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TOKENIZER_SAMPLE_BYTES = 32_000_000
"""A new tokenizer is trained on the first training documents, up to this many bytes."""

_BATCH_BYTES = 2_000_000

# Two batches in the tokenizer's thread pool at once: a long document leaves no core idle.
_BATCHES_IN_FLIGHT = 2

Encoded = list[np.ndarray | str]
"""The tokens of each document of a batch, or why it is skipped."""


def prepare(
    source: TextSource,
    out: Path | str,
    *,
    tokenizer: "PreTrainedTokenizerFast | Path | str | None" = None,
    vocab_size: int | None = None,
    eos_token: str | None = None,
    shard_tokens: int = 1 << 27,
    chat: bool = False,
) -> Manifest:
    """Tokenise `source` into the folder `out`; the end token follows each document.

    A folder that already holds this very preparation is verified; an unfinished one is resumed. Text
    that spells a special token is tokenised as text, so a document cannot end early.

    Args:
        source: the text, from `sources.parse_source`.
        out: the folder, which the returned manifest describes.
        tokenizer: a fast transformers tokenizer, its folder, or its hub id; or
        vocab_size: train a byte-level BPE of this size on the first 32 MB of training text.
        eos_token, shard_tokens, chat: the options of `sparse-bitnet prepare`.

    Raises `UserError` for bad text or tokenizer, no training text, a full disk, a folder in use, and one
    that holds something else or was prepared with other settings (the message says which).
    """
    out = Path(out)
    loaded, settings = check_options(tokenizer, vocab_size, eos_token, shard_tokens, chat)
    settings = {"source": source.describe(), **settings}
    check_ours(out, [MANIFEST, PREPARATION], "prepared data")
    if os.path.exists(out / MANIFEST):
        manifest = Manifest.read(out)
        _check_settings(out, manifest.settings, settings)
        _check_files(out, manifest)
        if (out / PREPARATION).exists():  # a process died between its last two steps
            (out / PREPARATION).unlink()
        return manifest
    with locked_folder(out, f"{out}: another process is working there"):
        remove_leftovers(out)
        there = _resumed(out, settings)
        write_atomic(out / PREPARATION, json.dumps(asdict(there), indent=2) + "\n")
        with Progress() as display:
            line = display.line("starting", "MB", 1e6)
            source.regroup(lambda size: line(size, None, label="looking for near-duplicates"))
            if not there.splits:
                if loaded is None:
                    assert vocab_size is not None
                    line(0, None, label="training a tokenizer")
                    loaded = train_tokenizer(_sample(source), vocab_size)
                with atomic_folder(out / TOKENIZER) as folder:
                    loaded.save_pretrained(folder)
            return _tokenise(source, out, there, line)


def check_options(
    tokenizer: "PreTrainedTokenizerFast | Path | str | None",
    vocab_size: int | None,
    eos_token: str | None,
    shard_tokens: int,
    chat: bool,
) -> tuple["PreTrainedTokenizerFast | None", dict[str, Any]]:
    """Return the tokenizer, None for one to train, and the settings of `prepare` apart from the source.

    Raises `UserError` for options that contradict, and for a tokenizer that cannot be used.
    """
    if (tokenizer is None) == (vocab_size is None):
        raise UserError("give either --tokenizer PATH_OR_HUB_ID or --vocab-size N")
    if vocab_size is not None and not 257 <= vocab_size <= LARGEST_VOCABULARY:
        raise UserError(
            f"--vocab-size {vocab_size}: must be 257 (256 bytes and {END_OF_TEXT}) to "
            f"{LARGEST_VOCABULARY}"
        )
    if eos_token is not None and not isinstance(tokenizer, str | Path):
        raise UserError("--eos-token has no effect without --tokenizer: leave it out")
    if shard_tokens < 1:
        raise UserError(f"--shard-tokens {shard_tokens}: must be at least 1")
    if isinstance(tokenizer, str | Path):
        tokenizer = load_tokenizer(tokenizer, eos_token=eos_token)
    settings: dict[str, Any] = {
        "tokenizer": {"vocab_size": vocab_size, "sample_bytes": TOKENIZER_SAMPLE_BYTES}
        if tokenizer is None
        else {"hash": tokenizer_hash(tokenizer)},
        "shard_tokens": shard_tokens,
    }
    if chat:
        if tokenizer is None:
            raise UserError("--chat needs a tokenizer with a chat template: give --tokenizer")
        settings["chat"] = conversations.check_template(tokenizer)
    return tokenizer, settings


def _check_settings(out: Path, there: dict[str, Any], given: dict[str, Any]) -> None:
    """Raise `UserError` that says which settings differ, if any do."""
    if differences := list(_differences("", there, given)):
        raise UserError(
            f"{out}: prepared with other settings: {'; '.join(differences)}; choose another folder or "
            "remove this one"
        )


def _differences(name: str, there: Any, given: Any) -> Iterator[str]:
    if isinstance(there, dict) and isinstance(given, dict):
        for key in dict.fromkeys([*there, *given]):
            inner = f"{name}.{key}" if name else key
            yield from _differences(inner, there.get(key), given.get(key))
    elif there != given:
        shown = (json.dumps(value) for value in (there, given))
        short = (text if len(text) <= 60 else f"{text[:40]}..." for text in shown)
        yield "{} is {} there, {} here".format(name, *short)


def _resumed(out: Path, settings: dict[str, Any]) -> Unfinished:
    """Return the preparation to resume, or a new one where none has a full shard.

    Raises `UserError` for one with other settings, and for damaged files.
    """
    path = out / PREPARATION
    if path.exists():
        with library_errors_as(f"{path} is damaged, remove {out} and prepare again"):
            there = TypeAdapter(Unfinished).validate_json(path.read_bytes())
        if there.splits:
            _check_settings(out, there.settings, settings)
            _check_files(out, there)
            return there
    return Unfinished(settings, {})


def _check_files(out: Path, there: Manifest | Unfinished) -> None:
    """Raise `UserError` for another tokenizer or another shard than `there` names."""
    tokenizer = load_tokenizer(out / TOKENIZER)
    if there.tokenizer_hash not in ("", tokenizer_hash(tokenizer)):
        raise UserError(
            f"{out / TOKENIZER}: not that of the shards; remove {out} and prepare again"
        )
    dtype = token_dtype(vocabulary_size(tokenizer), "chat" in there.settings)
    for split in there.splits.values():
        check_shards(out, split.shards, dtype)


def _sample(source: TextSource) -> Iterator[str]:
    size = 0
    for document in source.documents():
        if document.split == TRAIN:
            yield document.text
            size += len(document.text.encode())
            if size >= TOKENIZER_SAMPLE_BYTES:
                return


def batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yield documents of 2 MB together or a little more."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text.encode())
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encoder(
    tokenizer: "PreTrainedTokenizerFast", dtype: np.dtype, chat: bool
) -> Callable[[list[Document]], Encoded]:
    """Return a function from a batch of documents (with `chat`, conversations and plain text beside them)
    to tokens of type `dtype`."""
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    # Text that spells a special token stays text; chat templates write special tokens that way.
    backend.encode_special_tokens = not chat
    of_text = copy.deepcopy(backend) if chat else backend
    of_text.encode_special_tokens = True
    end = tokenizer.eos_token_id

    def encode(batch: list[Document]) -> Encoded:
        plain = [each.text for each in batch if not each.skipped and (each.beside or not chat)]
        with library_errors_as("the tokenizer.json cannot encode this text"):
            encodings = iter(of_text.encode_batch_fast(plain, add_special_tokens=False))

        def tokens(document: Document) -> np.ndarray | str:
            if chat and not document.beside:
                try:
                    return conversations.encode(tokenizer, document.text)
                except UserError as error:
                    return str(error)
            ids = next(encodings).ids
            return conversations.learnt_whole(ids) if chat else np.array([*ids, end], dtype)

        return [each.skipped or tokens(each) for each in batch]

    return encode


def _tokenise(source: TextSource, out: Path, there: Unfinished, line: Line) -> Manifest:
    """Write the missing shards and, last, the manifest."""
    tokenizer, settings = load_tokenizer(out / TOKENIZER), there.settings
    known = there.tokenizer_hash or settings["tokenizer"].get("hash")
    there = replace(there, tokenizer_hash=known or tokenizer_hash(tokenizer))
    vocab_size, is_chat = vocabulary_size(tokenizer), "chat" in settings
    dtype = token_dtype(vocab_size, is_chat)
    shard_tokens, first_skipped = settings["shard_tokens"], ""
    with ExitStack() as open_files:
        writers = {
            split: ShardWriter(out, split, dtype, shard_tokens, there.splits.get(split))
            for split in SPLITS
        }
        for writer in writers.values():
            open_files.callback(writer.close)
        rest = batches(_unwritten(source, {split: each.seen for split, each in writers.items()}))
        for batch, encoded in _in_flight(rest, encoder(tokenizer, dtype, is_chat)):
            shards = sum(len(writer.shards) for writer in writers.values())
            for document, tokens in zip(batch, encoded, strict=True):
                writer = writers[document.split]
                if isinstance(tokens, str):
                    writer.seen += 1
                    first_skipped = first_skipped or tokens
                else:
                    writer.append(tokens, len(document.text.encode()))
            if sum(len(writer.shards) for writer in writers.values()) > shards:
                there = replace(there, splits={s: writer.state for s, writer in writers.items()})
                write_atomic(out / PREPARATION, json.dumps(asdict(there), indent=2) + "\n")
            size, share = sum(each.text_bytes for each in writers.values()), batch[-1].progress
            line(size, size / share if share else None, label="tokenising")
        skipped = sum(writer.seen - writer.documents for writer in writers.values())
        reasons = skipped_line(skipped, first_skipped or "named before the interruption")
        if not writers[TRAIN].tokens:
            raise UserError(
                f"{source.train.name}: no training text; "
                + (reasons or "give more documents, or less or other text for validation")
            )
        splits = {split: writer.finish() for split, writer in writers.items()}
    manifest = Manifest(
        version=1,
        settings=settings,
        tokenizer_hash=there.tokenizer_hash,
        vocab_size=vocab_size,
        dtype=dtype.name,
        eos_token_id=tokenizer.eos_token_id,
        splits=splits,
    )
    if splits[VALIDATION].tokens and not is_chat:
        show = partial(line, label="comparing the held-out text")
        manifest = replace(manifest, overlap=measure_overlap(out, manifest, show))
    manifest.write(out)
    (out / PREPARATION).unlink()
    if reasons:
        say(reasons)
    return manifest


def _unwritten(source: TextSource, written: dict[str, int]) -> Iterator[Document]:
    """Yield the documents that follow the `written` ones of their split."""
    for document in source.documents():
        written[document.split] -= 1
        if written[document.split] < 0:
            yield document


def _in_flight(
    documents: Iterator[list[Document]], encode: Callable[[list[Document]], Encoded]
) -> Iterator[tuple[list[Document], Encoded]]:
    """Yield batches in their order with what `encode` returns for each, two of them at work at once."""
    pending: deque[tuple[list[Document], Future[Encoded]]] = deque()
    with ThreadPoolExecutor(_BATCHES_IN_FLIGHT) as pool:
        for batch in documents:
            pending.append((batch, pool.submit(encode, batch)))
            if len(pending) > _BATCHES_IN_FLIGHT:
                first, encoded = pending.popleft()
                yield first, encoded.result()
        for first, encoded in pending:
            yield first, encoded.result()
