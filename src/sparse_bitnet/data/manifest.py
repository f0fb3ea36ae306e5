# SPDX-License-Identifier: Apache-2.0
"""The folder of prepared data: its format, its manifest, and whether its shards are as they were written.

    manifest.json                        describes the data; written last: its presence means "complete"
    train-00000.bin, train-00001.bin ... token ids, little endian and nothing else: uint16 where the
    validation-00000.bin ...             vocabulary has at most 65,536 tokens, uint32 above
    tokenizer/                           the tokenizer, as transformers saves it
    preparation.json, *.partial          only while the preparation is under way (`preparation`)

All shards of a split but the last hold the same number of tokens. Documents follow one another, each
ended by the end token, and may continue in the next shard. Checksums are CRC-32 of the whole file. Tokens
of conversations are uint32 with two flags above the id (`chat`), and end as their template has it.

**Damage is noticed on opening.** Sizes of shards are always compared with the manifest, checksums only
for data of up to 10 GB (seconds). Running `prepare` again on a finished folder compares all of them.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from sparse_bitnet.checkpoint.model_folder import leads_outside
from sparse_bitnet.errors import UserError, os_errors_as
from sparse_bitnet.files import file_crc32, write_atomic
from sparse_bitnet.progress import Progress

MANIFEST = "manifest.json"
PREPARATION = "preparation.json"
TOKENIZER = "tokenizer"

Count = Annotated[int, Field(strict=True, ge=0, lt=1 << 63)]

_NO_MORE = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_NO_MORE)
class Shard:
    """One file of tokens."""

    file: str
    tokens: Annotated[Count, Field(gt=0)]
    crc32: str
    """Eight hexadecimal digits."""

    def __post_init__(self) -> None:
        if leads_outside(self.file):
            raise ValueError("a shard lies outside of the folder")


@dataclass(frozen=True, config=_NO_MORE)
class SplitManifest:
    """The contents of one split."""

    documents: Count
    tokens: Count
    """Sum of the shards' tokens, including the end token of each document."""
    text_bytes: Count
    """UTF-8 bytes of the documents."""
    shards: tuple[Shard, ...]

    def __post_init__(self) -> None:
        if self.tokens != sum(shard.tokens for shard in self.shards):
            raise ValueError("the shards' token counts do not add up to that of their split")


@dataclass(frozen=True, config=_NO_MORE)
class UnfinishedSplit:
    """A split up to its last full shard: `shards.ShardWriter.state`."""

    shards: tuple[Shard, ...]
    seen: Count = 0
    documents: Count = 0
    text_bytes: Count = 0
    begun: Count = 0


@dataclass(frozen=True, config=_NO_MORE)
class Unfinished:
    """Content of `preparation.json`."""

    settings: dict[str, Any]
    splits: dict[str, UnfinishedSplit]
    tokenizer_hash: str = ""
    """Empty before the first shard, and where an earlier version wrote the file."""


@dataclass(frozen=True, kw_only=True, config=_NO_MORE)
class Overlap:
    """Share of the held-out text that also occurs in the training text, verbatim."""

    window_tokens: Count
    windows: Count
    """Number of windows of `window_tokens` tokens, at every position of each held-out document."""
    windows_in_training: Count
    documents: Count
    """Held-out documents of at least one window."""
    documents_in_training: Count
    """Held-out documents of which every window occurs in the training text."""

    def __str__(self) -> str:
        share = 100 * self.windows_in_training / max(1, self.windows)
        return (
            f"{share:.2f} % of its {self.window_tokens}-token windows also occur in training, "
            f"{self.documents_in_training} of {self.documents:,} documents whole"
        )


@dataclass(frozen=True, config=_NO_MORE)
class Manifest:
    """Content of a folder of prepared data, and how it was made."""

    version: Literal[1]
    settings: dict[str, Any]
    """Settings of the preparation: source, tokenizer, tokens per shard."""
    tokenizer_hash: str
    """`tokenizer.tokenizer_hash` of the tokenizer in the folder `tokenizer/`."""
    vocab_size: Count
    dtype: Annotated[str, Field(pattern="^uint(16|32)$")]
    eos_token_id: Count
    splits: dict[str, SplitManifest]
    overlap: Overlap | None = None
    """Overlap of the held-out text with the training text; None if it is unknown."""

    @property
    def is_chat(self) -> bool:
        """Whether the documents are conversations."""
        return "chat" in self.settings

    def write(self, folder: Path) -> None:
        """Write `manifest.json`, the last step of a preparation."""
        write_atomic(folder / MANIFEST, json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read `manifest.json`.

        Raises `UserError` where there is none, it cannot be read, is damaged or of another version.
        """
        path = folder / MANIFEST
        try:
            return TypeAdapter(cls).validate_json(path.read_bytes())
        except (FileNotFoundError, NotADirectoryError) as error:
            if (folder / PREPARATION).exists():
                raise UserError(
                    f"{folder}: the preparation was not finished; run the same prepare command again"
                ) from error
            is_text = folder.is_file() or any(folder.glob("*"))
            raise UserError(
                f"{folder}: no prepared data here (no {MANIFEST}); run first: sparse-bitnet prepare "
                f"{f'{folder} DATA, with --chat for conversations' if is_text else f'TEXT {folder}'}"
            ) from error
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror or error}") from error
        except ValidationError as error:
            first = error.errors()[0]
            reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            raise UserError(f"{path}: damaged ({reason}); prepare the data again") from error


def token_dtype(vocab_size: int, is_chat: bool = False) -> np.dtype:
    """Return little-endian uint16 if it holds every token id, else uint32, as for the flags of a chat."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 and not is_chat else "<u4")


def check_shards(
    folder: Path, shards: Sequence[Shard], dtype: np.dtype, *, checksums: bool = True
) -> None:
    """Compare shards with the manifest: their sizes and, with `checksums`, their checksums.

    Raises `UserError` that names the first one that is missing, truncated or corrupt.
    """
    for shard in shards:
        path, expected = folder / shard.file, shard.tokens * dtype.itemsize
        remedy = "copy this file again or prepare the data again"
        if not path.is_file():
            raise UserError(f"{path}: this shard is missing; {remedy}")
        if (size := path.stat().st_size) != expected:
            what = "truncated" if size < expected else "too long"
            raise UserError(f"{path}: {what} ({size:,} bytes, expected {expected:,}); {remedy}")
    total, done = sum(shard.tokens for shard in shards) * dtype.itemsize, 0
    with os_errors_as(f"cannot read {folder}"), Progress() as progress:
        line = progress.line(f"checking {folder}", "MB", 1e6)
        for shard in shards if checksums else ():
            if shard.crc32 != (checksum := f"{file_crc32(folder / shard.file):08x}"):
                raise UserError(
                    f"{folder / shard.file}: corrupt (checksum {checksum}, expected {shard.crc32}); "
                    f"{remedy}"
                )
            done += shard.tokens * dtype.itemsize
            line(done, total)
