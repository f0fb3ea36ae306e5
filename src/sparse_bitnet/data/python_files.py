# SPDX-License-Identifier: Apache-2.0
"""Text that every machine has: the source files of the running Python interpreter."""

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from sparse_bitnet.data.documents import Document, State, check_fraction, split_of
from sparse_bitnet.errors import UserError

_SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}
# Tables of characters, one much like the other, and the language reference as one string.
_SKIPPED_FOLDERS |= {"encodings", "pydoc_data"}
_GENERATED = ("/stringprep.py", "/html/entities.py")


@dataclass(frozen=True, kw_only=True)
class PythonSource:
    """The `.py` files below some folders, one document each, ordered by a hash of their paths.

    The standard library of Python 3.11.7 gives 577 files with 9.46 MB for training and 25 files with
    0.36 MB (3.7 %) for validation; a Python without tkinter or distutils somewhat less.

    Left out: tests, because distributions of Python ship them or not (they are 60 % of the bytes of
    a full installation); generated tables; build settings, which differ between machines; files that
    are empty, binary or not UTF-8; and further copies of the same content. A file's split follows from
    its path below its root.
    """

    name: str
    roots: tuple[Path, ...]
    validation_fraction: float = 0.03

    def __post_init__(self) -> None:
        check_fraction(self.validation_fraction)

    @classmethod
    def standard_library(cls, **options: Any) -> "PythonSource":
        """`python-stdlib`: the running interpreter's standard library."""
        return cls(name="python-stdlib", roots=(Path(sysconfig.get_paths()["stdlib"]),), **options)

    @classmethod
    def installed_packages(cls, **options: Any) -> "PythonSource":
        """`python-packages`: every distribution installed in the running environment."""
        paths = sysconfig.get_paths()
        roots = dict.fromkeys(Path(paths[key]).resolve() for key in ("purelib", "platlib"))
        return cls(name="python-packages", roots=tuple(roots), **options)

    def describe(self) -> dict[str, Any]:
        """Version, number, size and content of the files: what identifies the text."""
        content = hashlib.blake2b(digest_size=16)
        for file in self._files:
            content.update(file.content_hash)
        return {
            "kind": self.name,
            "python": ".".join(map(str, sys.version_info[:3])),
            "files": len(self._files),
            "bytes": sum(file.size for file in self._files),
            "content": content.hexdigest(),
            "validation_fraction": self.validation_fraction,
        }

    def documents(self, state: State = None) -> Iterator[Document]:
        """A document a file, from the file after `state`."""
        start = state or 0
        total = sum(file.size for file in self._files)
        read = sum(file.size for file in self._files[:start])
        for number, file in enumerate(self._files[start:], start + 1):
            text = _read(file.path)
            if text is None:
                raise UserError(f"{file.path} changed while it was read; run again")
            read += file.size
            split = split_of(file.relative.encode(), self.validation_fraction)
            yield Document(text, split, number, read / total)

    @cached_property
    def _files(self) -> list["_File"]:
        found = []
        for root in self.roots:
            for path in _python_paths(root):
                if text := _read(path):
                    found.append(_File.of(path, path.relative_to(root).as_posix(), text))
        if not found:
            folders = ", ".join(map(str, self.roots))
            raise UserError(f"{self.name}: no Python source files under {folders}")
        unique: dict[bytes, _File] = {}
        for file in sorted(found, key=lambda file: (file.order, file.content_hash)):
            unique.setdefault(file.content_hash, file)
        return list(unique.values())


class _File(NamedTuple):
    path: Path
    relative: str
    order: bytes
    size: int
    content_hash: bytes

    @classmethod
    def of(cls, path: Path, relative: str, text: str) -> "_File":
        content = text.encode()
        # Salted, so that the order says nothing about the split: unsalted, the smallest hashes would
        # be both the first files and the validation files.
        order = hashlib.blake2b(relative.encode(), digest_size=16, salt=b"order").digest()
        digest = hashlib.blake2b(content, digest_size=16).digest()
        return cls(path, relative, order, len(content), digest)


def _python_paths(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(
            name for name in folders if name not in _SKIPPED_FOLDERS and name[:7] != "config-"
        )
        for name in sorted(names):
            path = Path(folder, name)
            generated = path.as_posix().endswith(_GENERATED) or name.startswith("_sysconfigdata")
            if name.endswith(".py") and not generated:
                yield path


def _read(path: Path) -> str | None:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (UnicodeDecodeError, OSError):
        return None
    return None if "\0" in text else text.replace("\r\n", "\n")
