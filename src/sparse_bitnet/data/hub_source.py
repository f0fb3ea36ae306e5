# SPDX-License-Identifier: Apache-2.0
"""Text of a data set of the Hugging Face hub."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sparse_bitnet.data.documents import TRAIN, Document, State, check_fraction, split_of
from sparse_bitnet.data.text_files import (
    Check,
    SkippedRow,
    check_text,
    filled,
    missing_column,
)
from sparse_bitnet.errors import UserError, reason_of


@dataclass(frozen=True, kw_only=True)
class HubSource:
    """A data set of the Hugging Face hub (or a local folder of one), streamed.

    RefinedWeb is `HubSource(name="tiiuae/falcon-refinedweb", column="content")`.
    """

    name: str
    config: str | None = None
    split: str = "train"
    column: str = "text"
    check: Check = check_text
    validation_fraction: float = 0.0005
    part: int = 0
    parts: int = 1

    def __post_init__(self) -> None:
        check_fraction(self.validation_fraction)

    @classmethod
    def parse(cls, spec: str, **options: Any) -> "HubSource":
        """`OWNER/NAME[/CONFIG][@SPLIT]`, or the path of a local folder."""
        if os.path.isdir(spec):
            return cls(name=spec, **options)
        path, _, split = spec.partition("@")
        parts = path.split("/")
        if len(parts) > 3 or not all(parts):
            raise UserError(f"not a hub data set: {spec!r}; expected OWNER/NAME[/CONFIG][@SPLIT]")
        config = parts[2] if len(parts) == 3 else None
        return cls(name="/".join(parts[:2]), config=config, split=split or "train", **options)

    def describe(self) -> dict[str, Any]:
        """The data set, its revision and the options that identify the text."""
        return {
            "kind": "hub",
            "name": self.name,
            "config": self.config,
            "split": self.split,
            "column": self.column,
            "validation_fraction": self.validation_fraction,
            **({"part": self.part, "parts": self.parts} if self.parts > 1 else {}),
        }

    def documents(self, state: State = None) -> Iterator[Document]:
        """Documents as the hub streams them, from `state`."""
        stream = self._open()
        if state:
            stream.load_state_dict(state)
        found = state is not None
        characters = 0
        rows = iter(stream)
        while (row := self._next(rows)) is not None:
            try:
                text = self.check(filled(row), self.column, self.name)
            except SkippedRow as reason:
                yield Document("", TRAIN, None, None, str(reason))
                continue
            if not text:
                continue
            found = True
            characters += len(text)
            position = None
            # A state is a few nested dictionaries: cheap for each MB of text, not for each document.
            if characters >= 1 << 20:
                position, characters = stream.state_dict(), 0
            split = split_of(text.encode(), self.validation_fraction)
            yield Document(text, split, position, None)
        if not found:
            raise UserError(f"{self.name}: no documents")

    def _open(self) -> Any:
        import datasets
        import huggingface_hub

        # Whatever the network, the hub client or a broken file raises, the user's question is which
        # data set and why.
        try:
            if not os.path.isdir(self.name):
                # One request that answers at once where there is no network: load_dataset tries for long.
                huggingface_hub.dataset_info(self.name, timeout=10)
            stream = datasets.load_dataset(self.name, self.config, split=self.split, streaming=True)
        except Exception as error:
            raise UserError(
                f"cannot open the hub data set {self.name!r}: {reason_of(error)}"
            ) from error
        if self.parts > 1:
            if stream.num_shards < self.parts:
                raise UserError(
                    f"{self.name}: {stream.num_shards} files do not make {self.parts} parts"
                )
            stream = stream.shard(num_shards=self.parts, index=self.part)
        names = stream.column_names
        if names is None or self.check is not check_text:
            return stream
        if self.column not in names:
            raise UserError(f"{self.name}: {missing_column(self.column, names)}")
        return stream.select_columns([self.column])

    def _next(self, rows: Iterator[dict[str, Any]]) -> dict[str, Any] | None:
        try:
            return next(rows, None)
        except Exception as error:
            raise UserError(
                f"reading {self.name!r} stopped: {reason_of(error)}; the same command goes on from here"
            ) from error
