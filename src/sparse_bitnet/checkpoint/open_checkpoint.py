# SPDX-License-Identifier: Apache-2.0
"""What a user names -> the stored model that it is: the one way in for every command."""

import dataclasses
import functools
import importlib
from pathlib import Path
from typing import Any

from sparse_bitnet.checkpoint.checkpoint import Checkpoint, StoredModel, finite
from sparse_bitnet.checkpoint.load import skeleton
from sparse_bitnet.checkpoint.model_folder import (
    CONFIG_FILE,
    is_hub_id,
    local_folder,
    open_folder,
    read_config,
)
from sparse_bitnet.checkpoint.saved_steps import list_checkpoints
from sparse_bitnet.checkpoint.weight_files import WeightFiles
from sparse_bitnet.errors import UserError, os_errors_as
from sparse_bitnet.packing.metadata import QUANT_METHOD

_READERS = {
    "sparse_bitnet": ("trained", "trained"),
    QUANT_METHOD: ("packed", "packed"),
    "bitnet": ("foreign", "bitnet_folders"),
    "compressed-tensors": ("foreign", "compressed_tensors"),
}
"""quant_method in config.json -> kind, and the file here whose `read(found)` opens it."""
_DENSE = ("dense", "trained")
_UNKNOWN = ("unknown", "")
_TABLES = ("lm_head.weight", "embed_tokens.weight", "wte.weight", "word_embeddings.weight")
"""Ends of the names of a head and of the embedding to which it may be tied."""


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
            is_file = ".gguf" in str(path_or_id)
            return str(local_folder(path_or_id)) if is_file else str(path_or_id)
        raise UserError(f"no such checkpoint: no folder {path_or_id} (hub models are OWNER/NAME)")


def _is_model_folder(path: Path) -> bool:
    return (path / CONFIG_FILE).is_file() and "model_type" in read_config(path)


def find_checkpoint(path: str | Path) -> StoredModel:
    """Whatever a user names, found: a run folder, a model folder of ours or of another tool, a hub id.

    Args:
        path: of a run, its finished model or its latest checkpoint is found.

    Raises `UserError` for what is not a model folder, and for one whose files are not to be read.
    """
    name = resolve_checkpoint(path)
    if Path(name).is_file():
        from sparse_bitnet.checkpoint.gguf import find_gguf

        return find_gguf(Path(name))
    folder, config, entry = open_folder(name)
    method = entry.get("quant_method")
    kind, reader = _DENSE if method is None else _READERS.get(str(method), _UNKNOWN)
    is_tied = config.get("tie_word_embeddings") is not False
    files = None
    if kind == "dense" or (is_tied and kind not in ("packed", "unknown")):
        files = WeightFiles.if_any(folder)
    if method is None:
        from sparse_bitnet.checkpoint.bitnet_folders import has_linear_norms
        from sparse_bitnet.checkpoint.ternary_folders import found_ternary

        if config.get("architectures") == ["BitnetForCausalLM"]:
            # The first published form of BitNet b1.58.
            config = {**config, "model_type": "bitnet", "architectures": ["BitNetForCausalLM"]}
        if (ternary := found_ternary(config, files)) is not None:
            config, kind, reader = ternary, "foreign", "ternary_folders"
        elif config.get("model_type") == "bitnet" or has_linear_norms(files):
            kind, reader = _READERS["bitnet"]
    if is_tied and files is not None and _has_own_head(files):
        config = {**config, "tie_word_embeddings": False}
    return StoredModel(
        name=name,
        folder=folder,
        kind=kind,
        reader=reader,
        config=config,
        entry=entry,
        model=functools.cache(functools.partial(skeleton, config, folder)),
    )


def _has_own_head(files: WeightFiles) -> bool:
    """Whether the files hold a head with other values than the embedding to which the config ties it:
    transformers then leaves the two apart."""
    tables = [name for name in files.shapes if name.endswith(_TABLES)]
    return len(tables) == 2 and not files.equal(*tables)


def open_checkpoint(path: str | Path, *kinds: str) -> Checkpoint:
    """As `find_checkpoint`, its tensors opened.

    Args:
        path: as there.
        kinds: those that will do, "foreign" for all of other tools; default: any.

    Raises `UserError` also for what is incomplete or damaged, and for another kind.
    """
    found = find_checkpoint(path)
    if not found.reader or (kinds and found.kind not in kinds):
        method = found.entry.get("quant_method")
        said = f"quant_method {method!r}" if method else "no quantization_config"
        raise UserError(f"{found.folder} ({said} in {CONFIG_FILE}) {_remedy(found, kinds)}")
    opened = importlib.import_module(f"sparse_bitnet.checkpoint.{found.reader}").read(found)

    def read(name: str, *part: slice) -> Any:
        return finite(opened.read(name, *part), name, found.folder)

    return dataclasses.replace(opened, read=read)


def open_ternary(path: str | Path) -> Checkpoint:
    """A trained checkpoint with ternary weights. Raises `UserError` for any other."""
    checkpoint = open_checkpoint(path, "trained")
    if checkpoint.format.weight != "ternary":
        raise UserError(
            f"{checkpoint.folder} holds full-precision weights ({checkpoint.format}), which no packed "
            "format holds: `sparse-bitnet export --format dense` writes them for other tools"
        )
    return checkpoint


def _remedy(found: StoredModel, kinds: tuple[str, ...]) -> str:
    if kinds == ("foreign",):
        readable = [method for method, (kind, _) in _READERS.items() if kind == "foreign"]
        return f"is not importable: readable are {' and '.join(readable)} with ternary codes"
    if kinds == ("packed",):
        return (
            f"is not packed; pack it first: sparse-bitnet pack {found.folder} OUT, or use --engine "
            "transformers"
        )
    packed, foreign = "it is packed already", "`sparse-bitnet import` reads those of other tools"
    why = packed if found.kind == "packed" else foreign
    return f"is not a trained checkpoint of sparse-bitnet: {why}"
