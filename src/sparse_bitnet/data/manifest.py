# SPDX-License-Identifier: Apache-2.0
"""The folder of prepared data: its format, its manifest, and whether its shards are as they were written.

    manifest.json                        what the data is; written last: its presence means "complete"
    train-00000.bin, train-00001.bin ... token ids, little endian and nothing else: uint16 where the
    validation-00000.bin ...             vocabulary has at most 65,536 tokens, uint32 above
    held-out-00000.bin ...               instead of the latter where some are left out (`near_duplicates`)
    tokenizer/                           the tokenizer, as transformers saves it
    .verified.json                       which shards' checksums were right; without it all are checked
    preparation.json, *.partial          only while the preparation is under way (`preparation`)

All shards of a split but the last hold the same number of tokens. Documents follow one another, each
ended by the end token, and may go on in the next shard. Checksums are CRC-32 of the whole file. Tokens
of conversations are uint32 with two flags above the id (`chat`), and end as their template has it.

Of text prepared in parts (`parts`) each part is such a folder, part-00003-of-00016, inside this one,
whose own manifest names all their shards; the last shard of each part is then a shorter one.

**Damage is noticed on opening.** A shard's size is compared with the manifest at every opening. Its
checksum is too, unless `.verified.json` says that this very file (same size, same time of change in
ns) was right before; `prepare` writes that record. Data up to 256 MB is checked at every opening all
the same, in about 0.1 s. So 100 GB open at once, and are read through (1 to 3 GB/s a core) only after
they were copied or changed.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from sparse_bitnet.checkpoint.model_folder import leads_outside
from sparse_bitnet.errors import UserError
from sparse_bitnet.files import file_crc32, write_atomic
from sparse_bitnet.host import available_cores
from sparse_bitnet.progress import Progress

MANIFEST = "manifest.json"
PREPARATION = "preparation.json"
VERIFIED = ".verified.json"
TOKENIZER = "tokenizer"
VERSION: Literal[1] = 1
ALWAYS_VERIFIED_BYTES = 256_000_000

Count = Annotated[int, Field(strict=True, ge=0, lt=1 << 63)]

_NO_MORE = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class Shard:
    """One file of tokens."""

    __pydantic_config__: ClassVar = _NO_MORE

    file: str
    tokens: Annotated[Count, Field(gt=0)]
    crc32: str
    """Eight hexadecimal digits."""


@dataclass(frozen=True)
class SplitManifest:
    """The contents of one split."""

    __pydantic_config__: ClassVar = _NO_MORE

    documents: Count
    tokens: Count
    """Sum of the shards' tokens; counts the end token of each document."""
    text_bytes: Count
    """UTF-8 bytes of the documents."""
    shards: tuple[Shard, ...]

    def __post_init__(self) -> None:
        if self.tokens != sum(shard.tokens for shard in self.shards):
            raise ValueError("the shards have not the tokens of their split")
        if any(leads_outside(shard.file) for shard in self.shards):
            raise ValueError("a shard lies outside of the folder")


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """How much of the held-out text stands in the training text, verbatim."""

    __pydantic_config__: ClassVar = _NO_MORE

    window_tokens: Count
    windows: Count
    """Number of windows of `window_tokens` tokens, at every position of each held-out document."""

    windows_in_training: Count
    documents: Count
    """Held-out documents of at least one window."""

    documents_in_training: Count
    """Held-out documents of which every window occurs in the training text."""

    left_out: Count = 0
    """Held-out documents that were taken away for having too many windows in the training text."""

    def __str__(self) -> str:
        share = 100 * self.windows_in_training / max(1, self.windows)
        left_out = f"; {self.left_out:,} others are left out, near training text"
        return (
            f"{share:.2f} % of its {self.window_tokens}-token windows also occur in training, "
            f"{self.documents_in_training} of {self.documents:,} documents whole"
            f"{left_out if self.left_out else ''}"
        )


@dataclass(frozen=True)
class Manifest:
    """Content of a folder of prepared data, and how it was made."""

    __pydantic_config__: ClassVar = _NO_MORE

    version: Literal[1]
    settings: dict[str, Any]
    """Settings of the preparation: source, tokenizer, tokens per shard; or "parts", a list of such."""
    tokenizer_hash: str
    """`tokenizer.tokenizer_hash` of the tokenizer in the folder `tokenizer/`."""
    vocab_size: Count
    dtype: Annotated[str, Field(pattern="^uint(16|32)$")]
    eos_token_id: Count
    splits: dict[str, SplitManifest]
    overlap: Overlap | None = None
    """Overlap of the held-out text with the training text; None if it is unknown."""

    def __post_init__(self) -> None:
        parts = self.parts
        if not (isinstance(parts, list) and parts and all(isinstance(p, dict) for p in parts)):
            raise ValueError("it has no parts")

    @property
    def parts(self) -> list[dict[str, Any]]:
        """The settings of each part; of text that was prepared at once, those alone."""
        return self.settings.get("parts", [self.settings])

    @property
    def is_chat(self) -> bool:
        """Whether the documents are conversations."""
        return "chat" in self.parts[0]

    @property
    def shards(self) -> list[Shard]:
        """Those of all splits."""
        return [shard for split in self.splits.values() for shard in split.shards]

    def write(self, folder: Path) -> None:
        """Write `manifest.json`, the last step of a preparation, of shards that are as they should be."""
        _record(folder, {shard.file: _stamp(folder, shard) for shard in self.shards})
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
                f"{folder}: no prepared data here (no {MANIFEST}); make it first: sparse-bitnet prepare "
                f"{f'{folder} DATA, with --chat for conversations' if is_text else f'TEXT {folder}'}"
            ) from error
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror or error}") from error
        except ValidationError as error:
            first = error.errors()[0]
            reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            raise UserError(f"{path}: damaged ({reason}); prepare the data again") from error


def token_dtype(vocab_size: int, is_chat: bool = False) -> np.dtype:
    """The smallest of little-endian uint16 and uint32 that holds every token id, and a chat's flags."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 and not is_chat else "<u4")


def check_size(folder: Path, shard: Shard, dtype: np.dtype) -> None:
    """Raise `UserError` where a shard is missing or has another size than its tokens need."""
    path, expected = folder / shard.file, shard.tokens * dtype.itemsize
    if not path.is_file():
        raise UserError(f"{path}: this shard is missing; prepare the data again")
    if (size := path.stat().st_size) != expected:
        what = "truncated" if size < expected else "too long"
        raise UserError(
            f"{path}: {what} ({size:,} bytes, expected {expected:,}); copy this file again or prepare "
            "the data again"
        )


def check_shards(
    folder: Path,
    shards: Sequence[Shard],
    dtype: np.dtype,
    *,
    checksums: bool = True,
    again: bool = False,
) -> None:
    """Check the sizes of shards and, if asked, the checksums: of all `again`, or of those not known to be
    right.

    Raises `UserError` that names the first one that is missing, truncated or corrupt.
    """
    for shard in shards:
        check_size(folder, shard, dtype)
    # Taken first: a file that changes while it is read does not look like the one that was right.
    stamps = {shard.file: _stamp(folder, shard) for shard in shards}
    total, done = sum(shard.tokens for shard in shards) * dtype.itemsize, 0
    known = {} if again or total <= ALWAYS_VERIFIED_BYTES else _recorded(folder)
    unknown = [shard for shard in shards if known.get(shard.file) != stamps[shard.file]]
    if not (unknown and checksums):
        return
    with Progress() as progress, ThreadPool(min(4, available_cores())) as pool:
        line = progress.line(f"checking {folder}", "MB", 1e6)
        computed = pool.imap(file_crc32, [folder / shard.file for shard in unknown])
        for shard, checksum in zip(unknown, computed, strict=True):
            if shard.crc32 != f"{checksum:08x}":
                raise UserError(
                    f"{folder / shard.file}: corrupt (checksum {checksum:08x}, expected {shard.crc32}); "
                    "copy this file again or prepare the data again"
                )
            done += shard.tokens * dtype.itemsize
            line(done, total)
    _record(folder, stamps)


def _stamp(folder: Path, shard: Shard) -> list[int | str]:
    status = (folder / shard.file).stat()
    return [status.st_size, status.st_mtime_ns, shard.crc32]


def _recorded(folder: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError, RecursionError):
        return dict(json.loads((folder / VERIFIED).read_bytes()))
    return {}


def _record(folder: Path, stamps: dict[str, list[int | str]]) -> None:
    # In a folder that cannot be written the next opening verifies again, nothing more.
    with suppress(UserError):
        write_atomic(folder / VERIFIED, json.dumps(_recorded(folder) | stamps, indent=2) + "\n")
