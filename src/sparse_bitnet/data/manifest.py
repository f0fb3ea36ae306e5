# SPDX-License-Identifier: Apache-2.0
"""The manifest of a folder of prepared data, and the format of that folder.

    manifest.json                        what the data is; written last: its presence means "complete"
    train-00000.bin, train-00001.bin ... token ids, little endian and nothing else: uint16 where the
    validation-00000.bin ...             vocabulary has at most 65,536 tokens, uint32 above
    held-out-00000.bin ...               instead of the latter where some are left out (`overlap`)
    tokenizer/                           the tokenizer, as transformers saves it
    .verified.json                       which shards' checksums were found right (`checksums`)
    preparation.json, *.partial          only while the preparation is under way (`prepare`)

All shards of a split but the last hold the same number of tokens. Documents follow one another, each
ended by the end token, and may go on in the next shard. Checksums are CRC-32 of the whole file. Tokens
of conversations are uint32 with two flags above the id (`chat`), and end as their template has it.

Of text prepared in parts (`parts`) each part is such a folder, part-00003-of-00016, inside this one,
whose own manifest names all their shards; the last shard of each part is then a shorter one.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from sparse_bitnet.checkpoint.model_folder import leads_outside
from sparse_bitnet.errors import UserError
from sparse_bitnet.files import write_atomic

MANIFEST = "manifest.json"
PREPARATION = "preparation.json"
VERIFIED = ".verified.json"
TOKENIZER = "tokenizer"
VERSION = 1

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


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """How much of the held-out text stands in the training text, verbatim."""

    __pydantic_config__: ClassVar = _NO_MORE

    window_tokens: Count
    windows: Count
    """Of this many tokens, at every position of each held-out document."""

    windows_in_training: Count
    documents: Count
    """Held-out documents of at least one window."""

    documents_in_training: Count
    """Of which every window is."""

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
    """What a folder of prepared data holds and how it was made."""

    __pydantic_config__: ClassVar = _NO_MORE

    version: int
    settings: dict[str, Any]
    """What was asked for: source, tokenizer, tokens in a shard."""
    tokenizer_hash: str
    """`tokenizer.tokenizer_hash` of the tokenizer in the folder `tokenizer/`."""
    vocab_size: Count
    dtype: Annotated[str, Field(pattern="^uint(16|32)$")]
    eos_token_id: Count
    splits: dict[str, SplitManifest]
    overlap: Overlap | None = None
    """Of the held-out text with the training text; None where it is unknown."""

    @property
    def is_chat(self) -> bool:
        """Whether the documents are conversations."""
        return "chat" in self.settings.get("parts", [self.settings])[0]

    def _check(self) -> None:
        """Raise `ValueError` for what no preparation writes, as a file outside of the folder."""
        for split in self.splits.values():
            if split.tokens != sum(shard.tokens for shard in split.shards):
                raise ValueError("the shards have not the tokens of their split")
            if any(leads_outside(shard.file) for shard in split.shards):
                raise ValueError("a shard lies outside of the folder")
        parts = self.settings.get("parts", [self.settings])
        if not (isinstance(parts, list) and parts and all(isinstance(p, dict) for p in parts)):
            raise ValueError("it has no parts")

    def write(self, folder: Path) -> None:
        """Write `manifest.json`; the last step of a preparation."""
        write_atomic(folder / MANIFEST, json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read `manifest.json`.

        Raises `UserError` where there is none, it cannot be read, is damaged or of another version.
        """
        path = folder / MANIFEST
        try:
            content = json.loads(path.read_bytes())
        except FileNotFoundError as error:
            if (folder / PREPARATION).exists():
                raise UserError(
                    f"{folder}: the preparation was not finished; run the same prepare command again"
                ) from error
            is_text = folder.is_dir() and any(folder.iterdir())
            raise UserError(
                f"{folder}: no prepared data here (no {MANIFEST}); make it first: sparse-bitnet prepare "
                f"{f'{folder} DATA' if is_text else f'TEXT {folder}'}"
            ) from error
        except NotADirectoryError as error:
            raise UserError(
                f"{folder} is a file, not prepared data; make that first: sparse-bitnet prepare {folder} "
                "DATA, with --chat for conversations"
            ) from error
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror or error}") from error
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}: damaged ({error}); prepare the data again") from error
        version = content.get("version") if isinstance(content, dict) else None
        if version != VERSION:
            raise UserError(
                f"{path}: version {version} of the format; this program reads {VERSION}; "
                "prepare the data again"
            )
        try:
            manifest = TypeAdapter(cls).validate_python(content)
            manifest._check()
            return manifest
        except ValidationError as error:
            first = error.errors()[0]
            reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            raise UserError(f"{path}: damaged ({reason}); prepare the data again") from error
        except ValueError as error:
            raise UserError(f"{path}: damaged ({error}); prepare the data again") from error


def token_dtype(vocab_size: int, is_chat: bool = False) -> np.dtype:
    """The smallest of little-endian uint16 and uint32 that holds every token id, and a chat's flags."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 and not is_chat else "<u4")
