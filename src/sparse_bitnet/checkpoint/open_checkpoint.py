# SPDX-License-Identifier: Apache-2.0
"""Opening a stored model by the name that a user gives: the one entry point of every command."""

import functools
import importlib
from pathlib import Path

from sparse_bitnet.checkpoint.checkpoint import Checkpoint, StoredModel
from sparse_bitnet.checkpoint.load import skeleton
from sparse_bitnet.checkpoint.model_folder import (
    CONFIG_FILE,
    gguf_inside,
    is_gguf,
    is_hub_id,
    local_folder,
    open_folder,
    read_config,
)
from sparse_bitnet.checkpoint.saved_steps import list_checkpoints
from sparse_bitnet.checkpoint.weight_files import WeightFiles
from sparse_bitnet.errors import UserError, os_errors_as
from sparse_bitnet.packing.formats import QUANT_METHOD

_READERS = {
    "sparse_bitnet": ("trained", "trained.TrainedCheckpoint"),
    QUANT_METHOD: ("packed", "packed.PackedCheckpoint"),
    "bitnet": ("foreign", "foreign.BitnetFolder"),
    "compressed-tensors": ("foreign", "foreign.CompressedTensors"),
}
"""quant_method in config.json -> kind, and the class here that opens it."""
_DENSE = ("dense", "trained.TrainedCheckpoint")
_UNKNOWN = ("unknown", "")
_TABLES = ("lm_head.weight", "embed_tokens.weight", "wte.weight", "word_embeddings.weight")
"""Ends of the names of a head and of the embedding to which it may be tied."""


def resolve_checkpoint(path_or_id: str | Path) -> str:
    """Return the folder, file or hub id to load for the name that a user gives.

    A run folder resolves to its finished model `final` or, before that, to its latest checkpoint, which
    is consolidated first if several processes wrote it. A folder with a transformers config.json, a .gguf
    file, and OWNER/NAME of a hub model that is not a local path resolve to themselves.

    Raises `UserError` for a folder that holds no model and for a path that does not exist.
    """
    path = Path(path_or_id)
    with os_errors_as(f"cannot read {path}"):
        if is_gguf(path):
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
                + (gguf_inside(path) if path.is_dir() else " nor a GGUF file: name its folder")
            )
        if is_hub_id(str(path_or_id)):
            is_file = ".gguf" in str(path_or_id)
            return str(local_folder(path_or_id)) if is_file else str(path_or_id)
        raise UserError(
            f"no such checkpoint: no folder {path_or_id} (hub models are OWNER/NAME, or "
            "OWNER/NAME/FILE.gguf instead of :TAG)"
        )


def _is_model_folder(path: Path) -> bool:
    return (path / CONFIG_FILE).is_file() and "model_type" in read_config(path)


def find_checkpoint(path: str | Path) -> StoredModel:
    """Find the stored model that a user names: a run, our or another tool's model folder, a hub id.

    Args:
        path: name of the model; a run stands for its finished model or its latest checkpoint.

    Raises `UserError` for anything that is not a model, and for files that must not be opened.
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
        from sparse_bitnet.checkpoint.foreign import has_linear_norms, ternary_reader

        if config.get("architectures") == ["BitnetForCausalLM"]:
            # The first published form of BitNet b1.58.
            config |= {"model_type": "bitnet", "architectures": ["BitNetForCausalLM"]}
        if (by_looking := ternary_reader(config, files)) is not None:
            kind, reader = "foreign", by_looking
        elif config.get("model_type") == "bitnet" or has_linear_norms(files):
            kind, reader = _READERS["bitnet"]
    if is_tied and files is not None and _has_own_head(files):
        config["tie_word_embeddings"] = False
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
    """Whether the files hold a head whose values differ from the embedding that the config ties it to;
    transformers then keeps the two separate."""
    tables = [name for name in files.shapes if name.endswith(_TABLES)]
    return len(tables) == 2 and not files.equal(*tables)


def open_checkpoint(path: str | Path, *kinds: str) -> Checkpoint:
    """Find a stored model as `find_checkpoint` does, and open its tensors.

    Args:
        path: name of the model, as in `find_checkpoint`.
        kinds: accepted kinds (`StoredModel.kind`); default: any.

    Raises `UserError` also for a checkpoint that is incomplete, damaged or of another kind.
    """
    found = find_checkpoint(path)
    if not found.reader or (kinds and found.kind not in kinds):
        raise unsuited(found, kinds)
    module, _, name = found.reader.partition(".")
    return getattr(importlib.import_module(f"sparse_bitnet.checkpoint.{module}"), name)(found)


def open_ternary(path: str | Path) -> Checkpoint:
    """Open a trained checkpoint with ternary weights. Raises `UserError` for any other."""
    checkpoint = open_checkpoint(path, "trained")
    if checkpoint.format.weight != "ternary":
        raise UserError(
            f"{checkpoint.folder} holds full-precision weights ({checkpoint.format}), which no packed "
            "format holds: `sparse-bitnet export --to dense` writes them for other tools"
        )
    return checkpoint


def unsuited(found: StoredModel, kinds: tuple[str, ...] = ("packed",)) -> UserError:
    """Return the error for a stored model of a kind that a command does not accept, with what to do."""
    method, is_file = found.entry.get("quant_method"), found.folder.is_file()
    said = f"quant_method {method!r}" if method else "no quantization_config"
    said = found.entry["not_ternary"] if is_file else f"{said} in {CONFIG_FILE}"
    others: dict[tuple[str, ...], str] = {
        ("foreign",): "is not importable",
        ("packed",): "is not packed",
    }
    distill = (
        f"`sparse-bitnet distill {found.name} OUT` (in Python, convert_) makes a ternary one of"
    )
    if found.kind == "dense":
        tool = "llama.cpp" if is_file else "`generate --engine transformers`"
        why = f"it is a plain model; {distill} it, and {tool} runs it as it is"
    elif found.kind == "unknown":
        readable = " and ".join(name for name, (kind, _) in _READERS.items() if kind == "foreign")
        why = f"`sparse-bitnet import` reads {readable}; {distill} the model that it was made from"
    elif found.kind == "packed":
        why = "it is packed already, and generate, serve, evaluate and export take it as it is"
    elif found.kind == "trained" and kinds == ("foreign",):
        why = "it is a trained checkpoint of sparse-bitnet, which every command takes as it is"
    elif found.kind == "trained":
        why = f"pack it first: sparse-bitnet pack {found.name} OUT, or use --engine transformers"
    else:
        why = f"it is another tool's; sparse-bitnet import {found.name} OUT, then take OUT"
    refused = others.get(kinds, "is not a trained checkpoint of sparse-bitnet")
    return UserError(f"{found.folder} ({said}) {refused}: {why}")
