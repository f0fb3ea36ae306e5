# SPDX-License-Identifier: Apache-2.0
"""The sources of text: installed Python files, local files, data sets of the Hugging Face hub."""

import os
from dataclasses import replace
from typing import Any

from sparse_bitnet.data.chat import check_conversation
from sparse_bitnet.data.documents import LimitedSource, PairedSource, TextSource
from sparse_bitnet.data.file_source import FileSource
from sparse_bitnet.data.hub_source import HubSource
from sparse_bitnet.data.near_duplicates import GroupedSource, ReadOnceSource
from sparse_bitnet.data.python_files import PythonSource
from sparse_bitnet.data.text_files import check_text
from sparse_bitnet.errors import UserError


def parse_source(
    spec: str,
    *,
    column: str | None = None,
    validation: str | None = None,
    validation_fraction: float | None = None,
    limit_documents: int | None = None,
    limit_bytes: int | None = None,
    near_duplicates: bool = True,
    chat: bool = False,
) -> TextSource:
    """The source that a command line names.

    `spec` is "python-stdlib"; "python-packages"; a path, glob or folder, or several separated by
    commas; or "hub:OWNER/NAME[/CONFIG][@SPLIT]".

    Args:
        column: of the text in .jsonl, .parquet and hub data sets; default "text".
        validation: another source, whose documents are the validation text.
        validation_fraction: of the documents, by hash; default 0.03 for Python files, 0.01 for
            local files, 0.0005 for hub data sets.
        limit_documents, limit_bytes: stop after this many; `validation` is not limited.
        near_duplicates: keep documents that are nearly the same on one side of the split
            (`near_duplicates.GroupedSource`); of hub data sets, leave those held out that are near
            training text (`near_duplicates.ReadOnceSource`).
        chat: the column, "messages" if not given, holds conversations, which become documents of JSON.

    Raises:
        UserError: for a name that matches nothing, an empty or unknown file, and contradictions.
    """
    if validation is not None and validation_fraction is not None:
        raise UserError("give --validation or --validation-fraction, not both")
    named = [each for each in (spec, validation) if each is not None]
    python = [each for each in named if each in ("python-stdlib", "python-packages")]
    if python and (chat or (column and python == named)):
        raise UserError(f"{python[0]} has no columns; leave out {'--chat' if chat else '--column'}")
    if chat and column is None:
        column = "messages"
    fraction = 0.0 if validation is not None else validation_fraction
    source = _parse(spec, column, fraction, chat)
    if limit_documents is not None or limit_bytes is not None:
        source = LimitedSource(
            source=source, documents_limit=limit_documents, bytes_limit=limit_bytes
        )
    if validation is not None:
        source = PairedSource(train=source, validation=_parse(validation, column, 0.0, chat))
    if not near_duplicates:
        return source
    return _read_once(source) if spec.startswith("hub:") else GroupedSource(source=source)


def part_of(source: TextSource, part: int, parts: int) -> TextSource:
    """One of `parts` disjoint parts of a source, which together are all of it.

    Files are dealt out in turn, those of a hub data set too; a separate validation source goes to the
    first part. Near-duplicates are looked for when the parts are joined. Raises `UserError` for a source
    that has fewer files than parts, or no files.
    """
    if not 0 <= part < parts:
        raise UserError(f"part {part} of {parts}: parts are numbered 0 to {parts - 1}")
    if isinstance(source, GroupedSource | ReadOnceSource):
        return _read_once(part_of(source.source, part, parts))
    if isinstance(source, PairedSource):
        train = part_of(source.train, part, parts)
        return replace(source, train=train) if part == 0 else train
    if isinstance(source, HubSource):
        return replace(source, part=part, parts=parts)
    if isinstance(source, LimitedSource):
        raise UserError(
            "limits of documents or bytes are those of a whole text: no parts with them"
        )
    if not isinstance(source, FileSource):
        raise UserError(f"{source.name} cannot be prepared in parts: give files or a hub data set")
    if len(source.paths) < parts:
        raise UserError(f"{source.name}: {len(source.paths)} files do not make {parts} parts")
    return replace(source, paths=source.paths[part::parts])


def _read_once(source: TextSource) -> TextSource:
    """Without near-duplicates in the end; a text that the user gave to be held out stays whole."""
    return source if isinstance(source, PairedSource) else ReadOnceSource(source=source)


def _parse(
    spec: str, column: str | None, validation_fraction: float | None, chat: bool
) -> TextSource:
    options: dict[str, Any] = {}
    if validation_fraction is not None:
        options["validation_fraction"] = validation_fraction
    if spec == "python-stdlib":
        return PythonSource.standard_library(**options)
    if spec == "python-packages":
        return PythonSource.installed_packages(**options)
    if column is not None:
        options.update(column=column, check=check_conversation if chat else check_text)
    if spec.startswith("hub:"):
        return HubSource.parse(spec.removeprefix("hub:"), **options)
    return FileSource.matching([spec] if os.path.exists(spec) else spec.split(","), **options)
