# SPDX-License-Identifier: Apache-2.0
"""What an unfinished preparation leaves in its folder, and who may go on with it.

`preparation.json` holds the settings, the source's state, and how far each split is written. It is
replaced after what it describes has reached the disk, so it is true whenever the process dies.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparse_bitnet.data.documents import SPLITS, State
from sparse_bitnet.data.manifest import PREPARATION, TOKENIZER, VERSION
from sparse_bitnet.errors import UserError
from sparse_bitnet.files import TEMPORARY_PREFIX, remove_leftovers, write_atomic


@dataclass
class PreparationState:
    """How far a preparation has come."""

    version: int
    settings: dict[str, Any]
    source: State
    """Where the source goes on; None: nothing is written yet."""
    writers: dict[str, dict[str, Any]]
    """`ShardWriter.checkpoint` of each split."""
    counts: dict[str, dict[str, int]]
    """Documents and bytes of text written, of each split."""
    skipped: int = 0
    """Rows and files that hold no document."""
    first_skipped: str = ""
    """Why the first of them does not."""

    def write(self, out: Path) -> None:
        """Replace `preparation.json`."""
        write_atomic(out / PREPARATION, json.dumps(asdict(self), indent=2) + "\n")


def begin(out: Path, settings: dict[str, Any]) -> PreparationState:
    """The preparation to go on with, or a new one.

    Raises `UserError` where `out` holds one with other settings.
    """
    remove_leftovers(out)
    path = out / PREPARATION
    if path.exists():
        try:
            found = PreparationState(**json.loads(path.read_bytes()))
        except (ValueError, TypeError, RecursionError) as error:
            raise UserError(f"{path}: damaged; remove {out} and prepare again") from error
        if found.version != VERSION:
            raise UserError(f"{path}: of another version; remove {out} and prepare again")
        if found.settings == settings:
            return found
        if found.source is not None:
            check_settings(out, found.settings, settings)
        # Nothing is written yet, as after a mistyped option: there is nothing to protect.
        if (out / TOKENIZER).exists():
            os.replace(out / TOKENIZER, out / f"{TEMPORARY_PREFIX}{TOKENIZER}")
            remove_leftovers(out)
    counts = {split: {"documents": 0, "text_bytes": 0} for split in SPLITS}
    state = PreparationState(VERSION, settings, None, {}, counts)
    state.write(out)
    return state


def check_settings(out: Path, there: dict[str, Any], asked: dict[str, Any]) -> None:
    """Raise `UserError` that says which settings differ, if any do."""
    differences = list(_differences("", there, asked))
    if differences:
        raise UserError(
            f"{out}: prepared with other settings: {'; '.join(differences)}; choose another folder or "
            "remove this one"
        )


def _differences(name: str, there: Any, asked: Any) -> Iterator[str]:
    if isinstance(there, dict) and isinstance(asked, dict):
        for key in dict.fromkeys([*there, *asked]):
            yield from _differences(
                f"{name}.{key}" if name else key, there.get(key), asked.get(key)
            )
    elif there != asked:
        yield f"{name} is {_short(there)} there, {_short(asked)} here"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:40]}..."
