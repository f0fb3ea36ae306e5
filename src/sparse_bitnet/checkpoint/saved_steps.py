# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of a run folder: which are complete, which are intact, which are dropped.

A checkpoint is a folder `checkpoints/step-00000100`; it gets that name only when all of it is on the
disk. `state.json` lists the CRC-32 of its other files, so that a truncated or changed file is detected
before it is used. The checkpoint is then quarantined as `damaged-step-00000100`, and the run resumes from
the one before.
"""

import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparse_bitnet.checkpoint.model_folder import file_inside
from sparse_bitnet.errors import UserError
from sparse_bitnet.files import TEMPORARY_PREFIX, file_crc32, remove_leftovers

CHECKPOINT_VERSION = 2
STATE = "state.json"
FOLDER, MODEL_FOLDER = "sharded", "model"
"""Sub-folders of a checkpoint: its shards, and the description of their model."""


@dataclass(frozen=True)
class SavedStep:
    """A complete checkpoint on the disk."""

    path: Path
    step: int


def list_checkpoints(run: Path) -> list[SavedStep]:
    """Complete checkpoints of a run, oldest first."""
    folder = run / "checkpoints"
    found = [
        SavedStep(path, int(path.name.removeprefix("step-")))
        for path in folder.glob("step-*")
        if path.name.removeprefix("step-").isdecimal() and (path / STATE).is_file()
    ]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def checkpoint_path(run: Path, step: int) -> Path:
    """Return the path of the checkpoint after `step`."""
    return run / "checkpoints" / f"step-{step:08d}"


def drop_old(run: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints; 0 keeps all."""
    if keep:
        for old in list_checkpoints(run)[:-keep]:
            # Rename first: if the process is killed in between, `clean_run` removes the rest.
            doomed = old.path.with_name(f"{TEMPORARY_PREFIX}old-{old.path.name}")
            os.rename(old.path, doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def clean_run(run: Path) -> None:
    """Remove what a killed process left half-written."""
    for folder in (run, run / "checkpoints"):
        if folder.is_dir():
            remove_leftovers(folder)


def checksums(folder: Path, files: Iterable[Path]) -> dict[str, str]:
    """Return the CRC-32 of files below a folder, by their names relative to it."""
    return {str(path.relative_to(folder)): f"{file_crc32(path):08x}" for path in sorted(files)}


def write_state(
    folder: Path, step: int, data_identity: dict[str, Any], files: dict[str, str]
) -> None:
    """Write `state.json`, the last file of a checkpoint."""
    state = {"version": CHECKPOINT_VERSION, "step": step, "data": data_identity, "files": files}
    (folder / STATE).write_text(json.dumps(state, indent=2) + "\n")


def check_state(checkpoint: SavedStep, data_identity: dict[str, Any]) -> None:
    """Raise `UserError` for a checkpoint of another version, or of other data."""
    path = checkpoint.path
    state = json.loads((path / STATE).read_bytes())
    if state.get("version") != CHECKPOINT_VERSION:
        raise UserError(
            f"{path}: checkpoint version {state.get('version')}, this release reads "
            f"{CHECKPOINT_VERSION}; continue the run with the release that wrote it"
        )
    if state.get("data") != data_identity:
        raise UserError(
            f"{path}: written while training on other data; use its data or a new --out"
        )


def damage(checkpoint: SavedStep, part: int = 0, parts: int = 1) -> str | None:
    """Return a message on the first damaged file of a checkpoint, or None if all are intact.

    Args:
        checkpoint: one of those that `list_checkpoints` returns.
        part, parts: check only every `parts`-th file from the `part`-th, so that processes share the
            reading.
    """
    try:
        files = json.loads((checkpoint.path / STATE).read_bytes())["files"]
        for name, expected in sorted(files.items())[part::parts]:
            checksum = f"{file_crc32(file_inside(checkpoint.path, name, STATE)):08x}"
            if checksum != expected:
                return f"{name} is damaged (checksum {checksum}, written as {expected})"
    except OSError as error:
        return f"{error.filename or 'a file'} cannot be read ({error.strerror or error})"
    except UserError as error:
        return str(error)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{STATE} is damaged ({error})"
    return None


def quarantine(checkpoint: SavedStep) -> None:
    """Keep a damaged checkpoint under a name that is not listed."""
    kept = checkpoint.path.with_name(f"damaged-{checkpoint.path.name}")
    shutil.rmtree(kept, ignore_errors=True)
    os.rename(checkpoint.path, kept)
