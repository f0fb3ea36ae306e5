# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of a run folder: which are complete and intact, which are dropped, and their tensors.

A checkpoint is a folder `checkpoints/step-00000100`; it gets that name only when all of it is on the
disk. `state.json` lists the CRC-32 of its other files, so that a truncated or changed file is detected
before it is used.

A run has `final` at its end; before that its checkpoints are split by rows. Commands that read models
read the newest one put together as RUN/consolidated/step-00000100, a model folder.
"""

import io
import json
import os
import pickle
import pickletools
import shutil
import warnings
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_bitnet.checkpoint.model_folder import (
    MASTERS_HELD,
    check_folder,
    file_inside,
    finish_folder,
    read_small,
)
from sparse_bitnet.errors import UserError, reason_of
from sparse_bitnet.files import (
    NO_SPACE,
    TEMPORARY_PREFIX,
    atomic_folder,
    file_crc32,
    remove_leftovers,
)

if TYPE_CHECKING:
    from torch import Tensor

CHECKPOINT_VERSION = 2
STATE = "state.json"
FOLDER, MODEL_FOLDER = "sharded", "model"
"""Sub-folders of a checkpoint: its shards, and the description of their model."""
MOMENTS = ("exp_avg", "exp_avg_sq")
_MODEL_PREFIX = "model/"
_MAY_LACK = tuple(f"{moment}/" for moment in MOMENTS)


@dataclass(frozen=True)
class SavedStep:
    """A complete checkpoint on the disk."""

    path: Path
    step: int


def list_checkpoints(run: Path) -> list[SavedStep]:
    """Return the complete checkpoints of a run, oldest first."""
    steps = [
        SavedStep(path, int(path.name.removeprefix("step-")))
        for path in (run / "checkpoints").glob("step-*")
        if path.name.removeprefix("step-").isdecimal() and (path / STATE).is_file()
    ]
    return sorted(steps, key=lambda checkpoint: checkpoint.step)


def is_started(run: Path) -> bool:
    """Whether the folder is that of a run with a checkpoint or a result."""
    if not os.path.isfile(run / "config.json"):  # False where it may not be read
        return False
    return bool(list_checkpoints(run) or (run / "final").exists() or (run / "result.json").exists())


def checkpoint_path(run: Path, step: int) -> Path:
    """Return the path of the checkpoint after `step`."""
    return run / "checkpoints" / f"step-{step:08d}"


def drop_old(run: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints; 0 keeps all."""
    for old in list_checkpoints(run)[:-keep] if keep else ():
        # Rename first: if the process is killed in between, `clean_run` removes the rest.
        doomed = old.path.with_name(f"{TEMPORARY_PREFIX}old-{old.path.name}")
        os.rename(old.path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def clean_run(run: Path) -> None:
    """Remove the half-written files of a killed process."""
    for folder in (run, run / "checkpoints"):
        remove_leftovers(folder)


def write_state(folder: Path, step: int, data: dict[str, Any], files: dict[str, str]) -> None:
    """Write `state.json`, the last file of a checkpoint; `data` identifies what the run learns from."""
    state = {"version": CHECKPOINT_VERSION, "step": step, "data": data, "files": files}
    (folder / STATE).write_text(json.dumps(state, indent=2) + "\n")


def stored_inputs(checkpoint: SavedStep) -> Any:
    """Return the identity of what the run learns from. Raises `UserError` for another version."""
    path = checkpoint.path
    state = json.loads((path / STATE).read_bytes())
    if (version := state.get("version")) != CHECKPOINT_VERSION:
        raise UserError(
            f"{path}: checkpoint version {version}, this release reads {CHECKPOINT_VERSION}; continue "
            "the run with the release that wrote it"
        )
    return state.get("data")


def damage(checkpoint: SavedStep, part: int = 0, parts: int = 1) -> str | None:
    """Return a message on the first damaged file of a checkpoint, or None if all are intact.

    Of `parts` processes that share the reading, the `part`-th checks every `parts`-th file.
    """
    try:
        state = json.loads((checkpoint.path / STATE).read_bytes())
        files = state["files"]
        if state["step"] != checkpoint.step or f"{FOLDER}/.metadata" not in files:
            return f"{STATE} is not of step {checkpoint.step}"
        for name, expected in sorted(files.items())[part::parts]:
            checksum = f"{file_crc32(file_inside(checkpoint.path, name, STATE)):08x}"
            if checksum != expected:
                return f"{name} is damaged (checksum {checksum}, written as {expected})"
    except (UserError, OSError) as error:
        return str(error)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{STATE} is damaged ({error})"
    return None


def consolidated(checkpoint: SavedStep) -> Path:
    """Return the model folder of a sharded checkpoint, made if it is not there.

    Takes the memory of the float32 weights, no more; optimiser state is not read.

    Raises `UserError` for a damaged checkpoint, and when the folder cannot be written.
    """
    path = checkpoint.path
    made = path.parent.parent / "consolidated" / path.name
    is_whole = (made / STATE).is_file() and (made / "model.safetensors").is_file()
    if is_whole and (made / STATE).read_bytes() == (path / STATE).read_bytes():
        return made
    if what := damage(checkpoint):
        raise UserError(f"{path}: {what}; name an older checkpoint, or continue the run")
    check_folder(path / MODEL_FOLDER)
    tensors = read_tensors(checkpoint).items()
    weights = {key.removeprefix(_MODEL_PREFIX): tensor for key, tensor in tensors}
    if any(".lora_A." in name for name in weights):
        raise UserError(
            f"{path} holds adapters beside the weights; continue the run, which merges them"
        )
    from safetensors.torch import save_file

    with atomic_folder(made) as folder:
        for file in (*(path / MODEL_FOLDER).iterdir(), path / STATE):
            shutil.copy(file, folder)
        (folder / "train_config.json").write_bytes(read_small(path / "train_config.json"))
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        finish_folder(folder, MASTERS_HELD)
    for other in made.parent.glob("step-*"):
        if not (path.parent / other.name).exists():
            shutil.rmtree(other, ignore_errors=True)
    return made


_HELD = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "TensorProperties"),
        *("ChunkStorageMetadata", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
}
"""Names in the metadata of torch's checkpoints, by module. `BytesStorageMetadata` is absent: torch would
unpickle its values in their turn."""


class _Unpickler(pickle.Unpickler):
    """Reads what torch pickles of a checkpoint's tensors, and refuses any other name."""

    def find_class(self, module: str, name: str) -> Any:
        import torch
        from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

        if f"{module}.{name}" == "builtins.getattr":
            # The first releases of Python 3.11 pickle enums by it.
            return lambda enum, member: _MEM_FORMAT_ENCODING[member]
        if module.startswith("pathlib") and name in ("PosixPath", "WindowsPath"):
            return lambda *parts: "/".join(parts)
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _HELD.get(module, ()):
            return super().find_class(module, name)
        raise ValueError(f"it names {module}.{name}, which no checkpoint holds")


def _read_metadata(shards: Path) -> Any:
    """Return torch's description of a folder of shards. It is a pickle; torch's reader would run it.

    Raises `OSError`, and `ValueError` for what describes no tensors of that size there.
    """
    import torch

    data = (shards / ".metadata").read_bytes()
    try:
        # Unpickling makes a table as long as an index in the file says.
        puts = (int(arg or 0) for op, arg, _ in pickletools.genops(data) if op.name.endswith("PUT"))
        if max(puts, default=0) > len(data):
            raise ValueError("an index beyond its end")
        metadata, needed = _Unpickler(io.BytesIO(data)).load(), 0
        for entry in metadata.state_dict_metadata.values():
            are_sizes = isinstance(entry.size, torch.Size) and min(entry.size, default=0) >= 0
            if not (are_sizes and isinstance(entry.properties.dtype, torch.dtype)):
                raise ValueError("an entry is no tensor")
            needed += prod(entry.size) * entry.properties.dtype.itemsize
        for place in metadata.storage_data.values():
            if place.relative_path != Path(place.relative_path).name:
                raise ValueError(f"it names {place.relative_path!r}, which is not in its folder")
    except Exception as error:  # untrusted bytes can raise anything
        raise ValueError(f".metadata is damaged: {error}") from error
    there = sum(path.stat().st_size for path in shards.glob("*.distcp"))
    if needed > there:
        raise ValueError(f"its tensors have {needed:,} bytes, its shards {there:,}")
    return metadata


def read_tensors(
    checkpoint: SavedStep,
    state: "dict[str, Tensor] | None" = None,
    group: Any = None,
    *,
    no_dist: bool = True,
) -> "dict[str, Tensor]":
    """Fill tensors in place from a checkpoint and return them; of a sharded tensor, only the local shard.

    Moments that the checkpoint lacks are removed from `state`: a weight without gradients has none.

    Args:
        state: tensors by key; None creates one for every parameter, unsharded.
        group: processes that read together.
        no_dist: whether this process reads alone.

    Raises `UserError` when the files are unreadable or lack a tensor.
    """
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    class Reader(dcp.FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return _read_metadata(Path(self.path))

    try:
        reader = Reader(checkpoint.path / FOLDER)
        stored = reader.read_metadata().state_dict_metadata
        if state is None:
            state = {
                key: torch.empty(entry.size, dtype=entry.properties.dtype)
                for key, entry in stored.items()
                if key.startswith(_MODEL_PREFIX)
            }
        for key in [key for key in state if key.startswith(_MAY_LACK) and key not in stored]:
            del state[key]
        with warnings.catch_warnings():
            # A single process may read alone.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            dcp.load(state, storage_reader=reader, process_group=group, no_dist=no_dist)
    except (OSError, CheckpointException, RuntimeError, ValueError) as error:
        raise UserError(f"{checkpoint.path}: cannot be read ({first_reason(error)})") from error
    return state


def first_reason(error: BaseException) -> str:
    """Return the first line that says why, of an exception that wraps those of one or all processes."""
    if failures := getattr(error, "failures", None):
        cause = next(iter(failures.values()))[0]
        if isinstance(cause, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        return getattr(cause, "strerror", None) or first_reason(cause)
    if "inline_container" in str(error):  # torch's writer does not tell what the system said
        return f"{NO_SPACE}, or it failed"
    return reason_of(error)
