# SPDX-License-Identifier: Apache-2.0
"""What a user names as a checkpoint -> the folder that holds it."""

from pathlib import Path

from sparse_bitnet.checkpoint.model_folder import (
    CONFIG_FILE,
    is_hub_id,
    local_folder,
    read_config,
    read_json_if_there,
)
from sparse_bitnet.checkpoint.saved_steps import list_checkpoints
from sparse_bitnet.errors import UserError, os_errors_as

TRAINED_CONTEXT = "trained_context_length"
"""Key of a packed folder's config.json; other readers ignore it."""


def resolve_checkpoint(path_or_id: str | Path) -> str:
    """The folder (or hub id) to load for what a user names.

    A run folder stands for its finished model `final`, before that for its latest checkpoint, which
    is put together first if several processes wrote it; a folder with a config.json of transformers
    for itself, and so does a .gguf file; OWNER/NAME that is not a local path for a model of the hub.

    Raises `UserError` for a folder that holds no model and for a path that does not exist.
    """
    path = Path(path_or_id)
    with os_errors_as(f"cannot read {path}"):
        if path.suffix == ".gguf" and path.is_file():
            return str(path)
        if (path / "final" / "config.json").is_file():
            return str(path / "final")
        found = list_checkpoints(path) or list_checkpoints(path.parent.parent)
        named = [one for one in found if path in (one.path, one.path.parent.parent)]
        if named:
            from sparse_bitnet.checkpoint.consolidate import consolidated

            return str(consolidated(named[-1]))
        if _is_model_folder(path):
            return str(path)
        if path.exists():
            raise UserError(
                f"{path} is neither a run folder with a checkpoint nor a model folder (config.json)"
            )
        if is_hub_id(str(path_or_id)):
            is_file = ".gguf" in path.name
            return str(local_folder(path_or_id)) if is_file else str(path_or_id)
        raise UserError(f"no such checkpoint: no folder {path_or_id} (hub models are OWNER/NAME)")


def _is_model_folder(path: Path) -> bool:
    return (path / CONFIG_FILE).is_file() and "model_type" in read_config(path)


def trained_context_length(checkpoint: str) -> int | None:
    """The sequence length with which a checkpoint of ours was trained; None for any other."""
    folder = Path(checkpoint)
    places = (
        (folder / "train_config.json", "sequence_length"),
        (folder / CONFIG_FILE, TRAINED_CONTEXT),
        (folder.parent / "config.json", "sequence_length"),
    )
    for path, key in places:
        found = read_json_if_there(path).get(key)
        if type(found) is int and found > 0:
            return found
    return None
