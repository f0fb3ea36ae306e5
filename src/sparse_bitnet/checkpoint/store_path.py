# SPDX-License-Identifier: Apache-2.0
"""A place in a store that fsspec knows (s3://, gs://, ...), as far as checkpoints need a `Path`.

A store renames nothing, so nothing has another name while it is made: a checkpoint there counts from
`state.json` on, which is written last and removed first.
"""

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sparse_bitnet.errors import UserError, os_errors_as, reason_of


def open_store(url: str) -> "StorePath":
    """Raises `UserError` for what is no URL and for a store that cannot be reached (no such protocol,
    package or access)."""
    protocol, _, place = url.partition("://")
    if not (protocol and place.strip("/")):
        raise UserError(f"checkpoint_url={url}: not a URL with a place in it, as s3://BUCKET/RUN")
    path = StorePath(url.rstrip("/"))
    try:
        path.is_file()
    except OSError as error:
        remedy = "; pip install its package" if isinstance(error.__cause__, ImportError) else ""
        raise UserError(f"checkpoint_url={url}: {error}{remedy}") from error
    return path


def check_store(url: str) -> None:
    """Write a small file, read it and remove it. Raises `UserError` where one of these fails."""
    path = StorePath(url.rstrip("/"))
    probe = path / f".probe-{uuid.uuid4().hex}"
    with os_errors_as(f"checkpoint_url={url}: cannot write there"):
        path.mkdir()
        probe.write_text("")
        probe.read_bytes()
        probe.remove()


@dataclass(frozen=True)
class StorePath:
    """Methods as those of `Path`. All raise OSError, whatever the store does."""

    url: str

    def _do(self, method: str, *arguments: Any, **named: Any) -> Any:
        from fsspec.core import url_to_fs

        try:
            return getattr(url_to_fs(self.url)[0], method)(self.url, *arguments, **named)
        except OSError:
            raise
        except Exception as error:
            raise OSError(reason_of(error)) from error

    @property
    def name(self) -> str:
        """The last part."""
        return self.url.rpartition("/")[2]

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> "StorePath":
        return StorePath(f"{self.url}/{name}")

    def glob(self, pattern: str) -> "Iterator[StorePath]":
        """Of one level, as it is now."""
        self._do("invalidate_cache")
        return (self / str(p).rpartition("/")[2] for p in (self / pattern)._do("glob"))

    def is_file(self) -> bool:
        """Whether it is there and no folder."""
        return self._do("isfile")

    def mkdir(self, parents: bool = True) -> None:
        """With its parents, where the store has folders."""
        self._do("makedirs", exist_ok=True)

    def read_bytes(self) -> bytes:
        """Of a whole file."""
        return self._do("cat_file")

    def write_text(self, text: str, encoding: str = "utf-8") -> None:
        """A whole file."""
        self._do("pipe_file", text.encode(encoding))

    def remove(self) -> None:
        """With all below; a checkpoint is none any more before its files go."""
        for place in (self / "state.json", self):
            if place._do("exists"):
                place._do("rm", recursive=True)
