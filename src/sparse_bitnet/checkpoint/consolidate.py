# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of a run as the model folder that everything else reads.

A run has `final` at its end; before that its checkpoints are split by rows. Who names such a run to
`evaluate`, `pack`, `export` or `analyze` gets the newest one put together, once, by one process:
RUN/consolidated/step-00000100 with config.json, model.safetensors, train_config.json and state.json.
"""

import io
import pickle
import pickletools
import shutil
import warnings
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.metadata as dcp_metadata
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from sparse_bitnet.checkpoint.model_folder import (
    MASTERS_HELD,
    check_folder,
    finish_folder,
    read_small,
)
from sparse_bitnet.checkpoint.saved_steps import FOLDER, MODEL_FOLDER, STATE, SavedStep, damage
from sparse_bitnet.errors import UserError, reason_of
from sparse_bitnet.files import NO_SPACE, atomic_folder

CONSOLIDATED = "consolidated"
MODEL_PREFIX = "model/"
MOMENTS = ("exp_avg", "exp_avg_sq")
_MAY_LACK = ("rng/", *(f"{moment}/" for moment in MOMENTS))


def consolidated(checkpoint: SavedStep) -> Path:
    """The model folder of a sharded checkpoint, made if it is not there; those of other steps go.

    Takes the memory of the float32 weights, no more; optimiser state is not read.

    Raises `UserError` for a damaged checkpoint, and when the folder cannot be written.
    """
    path = checkpoint.path
    made = path.parent.parent / CONSOLIDATED / path.name
    if (made / "config.json").is_file():
        return made
    if what := damage(checkpoint):
        raise UserError(f"{path}: {what}; name an older checkpoint, or continue the run")
    described = path / MODEL_FOLDER
    check_folder(described)
    weights = read_weights(checkpoint)
    if any(".lora_A." in name for name in weights):
        raise UserError(
            f"{path} holds adapters beside the weights; continue the run, which merges them"
        )
    with atomic_folder(made) as folder:
        for file in (*described.iterdir(), path / STATE):
            shutil.copy(file, folder)
        (folder / "train_config.json").write_bytes(read_small(path / "train_config.json"))
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        finish_folder(folder, MASTERS_HELD)
    for other in made.parent.glob("step-*"):
        if other != made:
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
"""Without `BytesStorageMetadata`, whose values torch unpickles in their turn."""


class _Unpickler(pickle.Unpickler):
    """Reads what torch pickles of a checkpoint's tensors, and refuses any other name."""

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" == "builtins.getattr":
            # The first releases of Python 3.11 pickle enums by it.
            return lambda enum, member: dcp_metadata._MEM_FORMAT_ENCODING[member]
        if module.startswith("pathlib") and name in ("PosixPath", "WindowsPath"):
            return lambda *parts: "/".join(parts)
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _HELD.get(module, ()):
            return super().find_class(module, name)
        raise ValueError(f"it names {module}.{name}, which no checkpoint holds")


class _ShardReader(dcp.FileSystemReader):
    """Reads the shards of a folder, whose `.metadata` is a pickle: torch's own runs whatever it names."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """Return torch's metadata. Raises `OSError`, and `ValueError` for what is none of tensors."""
        data = (Path(self.path) / ".metadata").read_bytes()
        try:
            # Unpickling makes a table as long as an index in the file says.
            puts = (
                int(arg or 0) for op, arg, _ in pickletools.genops(data) if op.name.endswith("PUT")
            )
            if max(puts, default=0) > len(data):
                raise ValueError("an index beyond its end")
            metadata = _Unpickler(io.BytesIO(data)).load()
            for entry in metadata.state_dict_metadata.values():
                are_sizes = isinstance(entry.size, torch.Size) and min(entry.size, default=0) >= 0
                if not (are_sizes and isinstance(entry.properties.dtype, torch.dtype)):
                    raise ValueError("an entry is no tensor")
            for place in metadata.storage_data.values():
                if place.relative_path != Path(place.relative_path).name:
                    raise ValueError(
                        f"it names {place.relative_path!r}, which is not in its folder"
                    )
            metadata.storage_meta = metadata.storage_meta or dcp_metadata.StorageMeta()
            metadata.storage_meta.load_id = self.load_id
        except Exception as error:  # of bytes that anyone made, anything
            raise ValueError(f".metadata is damaged: {error}") from error
        return metadata


def read_weights(checkpoint: SavedStep) -> dict[str, Tensor]:
    """The parameters of a sharded checkpoint by name, whole. Raises `UserError` as `read_tensors`."""
    shards = checkpoint.path / FOLDER
    try:
        entries = _ShardReader(shards).read_metadata().state_dict_metadata
        there = sum(path.stat().st_size for path in shards.glob("*.distcp"))
        asked = sum(
            prod(entry.size) * entry.properties.dtype.itemsize for entry in entries.values()
        )
        if asked > there:
            raise ValueError(f"its tensors have {asked:,} bytes, its shards {there:,}")
    except (OSError, ValueError) as error:
        raise UserError(f"{checkpoint.path}: cannot be read ({error})") from error
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if key.startswith(MODEL_PREFIX)
    }
    read_tensors(checkpoint, state)
    return {key.removeprefix(MODEL_PREFIX): tensor for key, tensor in state.items()}


def read_tensors(
    checkpoint: SavedStep, state: dict[str, Tensor], group: Any = None, *, no_dist: bool = True
) -> None:
    """Fill tensors, named as in the checkpoint, in place; of split ones the own part.

    Random states may be missing there, and moments, which a weight without gradients does not have.

    Args:
        checkpoint: a listed one.
        state: by key.
        group: of the processes that read together.
        no_dist: whether this process reads alone.

    Raises `UserError` when the files are unreadable or lack a tensor.
    """
    try:
        reader = _ShardReader(checkpoint.path / FOLDER)
        stored = reader.read_metadata().state_dict_metadata
        for key in [key for key in state if key.startswith(_MAY_LACK) and key not in stored]:
            del state[key]
        with warnings.catch_warnings():
            # A single process may read alone.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            dcp.load(state, storage_reader=reader, process_group=group, no_dist=no_dist)
    except (OSError, CheckpointException, RuntimeError, ValueError) as error:
        raise UserError(f"{checkpoint.path}: cannot be read ({first_reason(error)})") from error


def first_reason(error: BaseException) -> str:
    """The first line that says why, of an exception that wraps those of all processes or of one."""
    failures = getattr(error, "failures", None)
    if failures:
        cause = next(iter(failures.values()))[0]
        return getattr(cause, "strerror", None) or first_reason(cause)
    if "inline_container" in str(error):  # torch's writer does not tell what the system said
        return f"{NO_SPACE}, or it failed"
    return reason_of(error)
