# SPDX-License-Identifier: Apache-2.0
"""Token shards: the writer, and the memory-mapped reader. `manifest` describes the format."""

import hashlib
import mmap
import os
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from zlib_ng import zlib_ng

from sparse_bitnet.checkpoint.load import has_tokenizer, load_tokenizer
from sparse_bitnet.checkpoint.model_folder import read_json_if_there
from sparse_bitnet.checkpoint.saved_steps import STATE
from sparse_bitnet.data.chat import IDS
from sparse_bitnet.data.manifest import (
    TOKENIZER,
    Manifest,
    Shard,
    SplitManifest,
    UnfinishedSplit,
    check_shards,
    token_dtype,
)
from sparse_bitnet.data.tokenizer import tokenizer_hash
from sparse_bitnet.errors import UserError, os_errors_as

_VERIFIED_BYTES = 10_000_000_000
"""Data up to this size is compared with its checksums on opening; larger data would take minutes."""


class ShardWriter:
    """Writes the documents of one split as shards of `shard_tokens` tokens each.

    A shard is `NAME.partial` until it is full. `state` describes the last full one: the `shards` so far,
    the number of documents of the split that were `seen` (written or skipped), and the number of tokens
    `begun` in the next shard. Another writer of the same folder continues from it.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        dtype: np.dtype,
        shard_tokens: int,
        state: UnfinishedSplit | None = None,
    ) -> None:
        self._folder, self._split, self._dtype = folder, split, dtype
        self._shard_tokens = shard_tokens
        self.state = state = state or UnfinishedSplit(())
        self.shards = list(state.shards)
        self.seen, self.documents, self.text_bytes = state.seen, state.documents, state.text_bytes
        self._begun = state.begun
        self._open_tokens = self._crc32 = 0
        self._file: BinaryIO | None = None
        names = {shard.file for shard in self.shards}
        for path in folder.glob(f"{split}-*"):
            if path.suffix in (".bin", ".partial") and path.name not in names:  # after the state
                path.unlink()

    @property
    def tokens(self) -> int:
        """Tokens written so far."""
        return sum(shard.tokens for shard in self.shards) + self._open_tokens

    def append(self, tokens: np.ndarray, text_bytes: int = 0) -> None:
        """Add a document: its token ids (one dimension, any integer type), and the bytes of its text.

        Raises `UserError` when the disk is full.
        """
        content = np.ascontiguousarray(tokens[self._begun :], self._dtype)
        self._begun = 0
        while content.size:
            part = content[: self._shard_tokens - self._open_tokens]
            content = content[part.size :]
            with self._writing():
                self._file = self._file or open(self._partial, "wb")
                self._file.write(part.data)
            self._crc32 = zlib_ng.crc32(part.data, self._crc32)
            self._open_tokens += part.size
            if self._open_tokens == self._shard_tokens:
                self._close_shard()
                counts = self.seen, self.documents, self.text_bytes, tokens.size - content.size
                self.state = UnfinishedSplit(tuple(self.shards), *counts)
        self.seen += 1
        self.documents += 1
        self.text_bytes += text_bytes

    def finish(self) -> SplitManifest:
        """Close the last shard and return what was written."""
        if self._open_tokens:
            self._close_shard()
        return SplitManifest(self.documents, self.tokens, self.text_bytes, tuple(self.shards))

    def close(self) -> None:
        """Close the file of a shard that is not full."""
        with suppress(OSError):  # `append` has already raised for these tokens
            if self._file is not None:
                self._file.close()

    @property
    def _path(self) -> Path:
        return self._folder / f"{self._split}-{len(self.shards):05}.bin"

    @property
    def _partial(self) -> Path:
        return self._path.with_suffix(".partial")

    def _writing(self) -> AbstractContextManager[None]:
        return os_errors_as(f"cannot write {self._path}", "; the same command resumes")

    def _close_shard(self) -> None:
        assert self._file is not None
        with self._writing():
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._partial, self._path)
        self.shards.append(Shard(self._path.name, self._open_tokens, f"{self._crc32:08x}"))
        self._file, self._open_tokens, self._crc32 = None, 0, 0


class TokenDataset:
    """The tokens of one split of a folder of prepared data, as one long sequence.

    `dataset[i:j]` is an array of token ids, uint16 or uint32 [j - i], read-only, and without a copy if
    it lies in one shard; `len(dataset)` counts tokens. For conversations (`is_chat`), `stored(slice(i,
    j))` includes the flags.
    """

    def __init__(self, folder: Path, split: str, manifest: Manifest) -> None:
        """Use `TokenDataset.open`, which checks the files."""
        self.folder, self.split, self.manifest = folder, split, manifest
        self.vocab_size, self.eos_token_id = manifest.vocab_size, manifest.eos_token_id
        self.is_chat = manifest.is_chat
        self.dtype = token_dtype(manifest.vocab_size, self.is_chat)
        self.shards = manifest.splits[split].shards
        self._ends = np.cumsum([shard.tokens for shard in self.shards])
        self._maps: dict[int, np.ndarray] = {}

    @classmethod
    def open(
        cls, folder: str | os.PathLike[str], split: str = "train", *, verify: bool = True
    ) -> "TokenDataset":
        """Open a split, "train" or "validation", written by `prepare`, and check its shards.

        `verify`: compare checksums too, as `manifest` says; one process of a run does. Raises
        `UserError` for data that is absent, unfinished, damaged, or without tokens in this split.
        """
        folder = Path(folder)
        manifest = Manifest.read(folder)
        if split not in manifest.splits or not manifest.splits[split].tokens:
            hint = "; prepare with --validation or a larger --validation-fraction"
            raise UserError(f"{folder}: no {split} text{hint if split == 'validation' else ''}")
        dataset = cls(folder, split, manifest)
        verify = verify and len(dataset) * dataset.dtype.itemsize <= _VERIFIED_BYTES
        check_shards(folder, dataset.shards, dataset.dtype, checksums=verify)
        return dataset

    def check_vocab(self, model_vocab_size: int) -> None:
        """Raise `UserError` if the data holds token ids that the model's embedding lacks."""
        if self.vocab_size > model_vocab_size:
            raise UserError(
                f"{self.folder}: the tokenizer's vocabulary has {self.vocab_size:,} tokens, the model's "
                f"{model_vocab_size:,}; prepare the data with the model's tokenizer"
            )

    def check_tokenizer(self, folder: Path, name: str) -> bool:
        """Return whether a model folder records the tokenizer that the model was trained with.

        `name` is the model's, for messages. Raises `UserError` if that is another tokenizer than the
        data's, apart from the end token, which `prepare` can choose.
        """
        theirs: str | None = None
        if has_tokenizer(folder):
            theirs = tokenizer_hash(load_tokenizer(folder, eos_token=self.eos_token_id))
        elif folder.is_file():
            # A GGUF file describes the same tokenizer differently.
            tokens = load_tokenizer(self.folder / TOKENIZER).get_vocab().items()
            own = load_tokenizer(folder, eos_token=self.eos_token_id).get_vocab().items()
            theirs = self.manifest.tokenizer_hash if tokens <= own else ""
        elif isinstance(known := read_json_if_there(folder / STATE).get("data"), dict):
            theirs = known.get("tokenizer_hash")  # an unfinished run's, which names its data
        if theirs not in (None, self.manifest.tokenizer_hash):
            raise UserError(
                f"{self.folder} was prepared with another tokenizer than that of {name}: prepare the "
                "text again with that one (--tokenizer)"
            )
        return theirs is not None

    def check_ids(self, ids: np.ndarray) -> None:
        """Raise `UserError` for token ids beyond the vocabulary: another program wrote the shard."""
        if ids.size and (largest := int(ids.max())) >= self.vocab_size:
            raise UserError(
                f"{self.folder}: its {self.split} text holds token {largest:,}, its vocabulary "
                f"{self.vocab_size:,} tokens; prepare the data again"
            )

    def identity(self) -> dict[str, Any]:
        """Describe these tokens as JSON, equal for equal data wherever it is stored."""
        content = hashlib.blake2b(digest_size=16)
        for shard in self.shards:
            content.update(f"{shard.tokens} {shard.crc32} ".encode())
        return {
            "split": self.split,
            "tokens": len(self),
            "vocab_size": self.vocab_size,
            "tokenizer_hash": self.manifest.tokenizer_hash,
            "content": content.hexdigest(),
        }

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, tokens: slice) -> np.ndarray:
        ids = self.stored(tokens)
        return ids & IDS if self.is_chat else ids

    def stored(self, tokens: slice) -> np.ndarray:
        """Return tokens as the shards store them: in conversations, ids with their flag bits."""
        start, stop, step = tokens.indices(len(self))
        assert step == 1, "only contiguous slices"
        if start >= stop:
            return np.empty(0, self.dtype)
        number = int(np.searchsorted(self._ends, start, "right"))
        parts = []
        while start < stop:
            before = int(self._ends[number]) - self.shards[number].tokens
            end = min(stop, int(self._ends[number]))
            parts.append(self._map(number)[start - before : end - before])
            start, number = end, number + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _map(self, number: int) -> np.ndarray:
        if number not in self._maps:
            path = self.folder / self.shards[number].file
            with os_errors_as(f"cannot read {path}"), open(path, "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            # Windows are read in random order: reading ahead, 4 MB on some systems for the 4 kB of a
            # window, made a batch of 64 windows of 100 GB take 2.5 s instead of milliseconds.
            if hasattr(mmap, "MADV_RANDOM"):
                mapped.madvise(mmap.MADV_RANDOM)
            self._maps[number] = np.frombuffer(mapped, self.dtype)
        return self._maps[number]
