# SPDX-License-Identifier: Apache-2.0
"""Opens a stored model by the name that a user gives: the one entry point of every command."""

import hashlib
import importlib
from pathlib import Path

from sparse_bitnet.checkpoint.checkpoint import Checkpoint, StoredModel
from sparse_bitnet.checkpoint.config_fields import QWEN35_TYPES
from sparse_bitnet.checkpoint.declared_rotation import MANIFEST, MLX_KEYS
from sparse_bitnet.checkpoint.load import open_folder
from sparse_bitnet.checkpoint.model_folder import (
    CONFIG_FILE,
    check_weights_as_stored,
    gguf_inside,
    is_gguf,
    is_hub_id,
    local_folder,
    read_config,
)
from sparse_bitnet.checkpoint.saved_steps import consolidated, list_checkpoints
from sparse_bitnet.checkpoint.weight_files import WeightFiles
from sparse_bitnet.errors import UserError, os_errors_as
from sparse_bitnet.packing.formats import QUANT_METHOD

_READERS = {
    None: ("dense", "trained.TrainedCheckpoint"),
    "sparse_bitnet": ("trained", "trained.TrainedCheckpoint"),
    QUANT_METHOD: ("packed", "packed.PackedCheckpoint"),
    "bitnet": ("foreign", "foreign.BitnetFolder"),
    "compressed-tensors": ("foreign", "foreign.CompressedTensors"),
}
"""quant_method in config.json, None for none -> kind, and the class here that opens it."""
_ROTATED_BY = {
    "foreign.TernaryFloats": (MANIFEST,),
    "mlx_folder.MlxFolder": (MLX_KEYS, "hadamard_config", f"model_type {QWEN35_TYPES[2]}"),
}
"""Class that reads rotated weights -> the files and settings of config.json that declare them."""
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
        steps = list_checkpoints(path) or list_checkpoints(path.parent.parent)
        named = [step for step in steps if path in (step.path, step.path.parent.parent)]
        if named:
            try:
                return str(consolidated(named[-1]))
            except (UserError, OSError):
                if named[-1].path.exists():
                    raise
                return resolve_checkpoint(path)  # the run went on, and dropped that one
        if (path / CONFIG_FILE).is_file() and "model_type" in read_config(path):
            return str(path)
        if path.exists():
            more = gguf_inside(path) if path.is_dir() else " nor a GGUF file: name its folder"
            raise UserError(
                f"{path} is neither a run folder with a checkpoint nor a model folder (config.json){more}"
            )
        if is_hub_id(str(path_or_id)):
            return str(local_folder(path_or_id) if ".gguf" in str(path_or_id) else path_or_id)
        raise UserError(
            f"no such checkpoint: no folder or file {path_or_id}; a hub model is written OWNER/NAME, or "
            "OWNER/NAME/FILE.gguf (not :TAG)"
        )


def find_checkpoint(path: str | Path) -> StoredModel:
    """Find the stored model that a user names: a run, our or another tool's model folder, a hub id.

    Raises `UserError` for anything that is not a model, and for files that must not be opened.
    """
    name = resolve_checkpoint(path)
    if Path(name).is_file():
        from sparse_bitnet.checkpoint.gguf import GgufCheckpoint

        return GgufCheckpoint(Path(name))
    folder, config, entry = open_folder(name)
    method = entry.get("quant_method")
    kind, reader = _READERS.get(method if method is None else str(method), ("unknown", ""))
    is_read = kind not in ("packed", "unknown") and any(folder.glob("model*.safetensors"))
    files = WeightFiles.in_folder(folder) if is_read else None
    if method is None:
        from sparse_bitnet.checkpoint.foreign import has_linear_norms, ternary_reader

        if config.get("architectures") == ["BitnetForCausalLM"]:
            # The first published form of BitNet b1.58.
            config |= {"model_type": "bitnet", "architectures": ["BitNetForCausalLM"]}
        if (by_looking := ternary_reader(config, files)) is not None:
            kind, reader = "foreign", by_looking
        elif config.get("model_type") == "bitnet" or has_linear_norms(files):
            kind, reader = _READERS["bitnet"]
    check_weights_as_stored(folder, _ROTATED_BY.get(reader, ()))
    if config.get("tie_word_embeddings") is not False and files is not None:
        tables = [name for name in files.shapes if name.endswith(_TABLES)]
        if len(tables) == 2 and not files.equal(*tables):
            # transformers keeps a head apart whose values differ from the embedding's.
            config["tie_word_embeddings"] = False
    return StoredModel(
        name=name, folder=folder, kind=kind, reader=reader, config=config, entry=entry
    )


def open_checkpoint(path: str | Path, *kinds: str) -> Checkpoint:
    """Find a stored model as `find_checkpoint` does, of one of these kinds (default: any), and open it.

    Raises `UserError` also for a checkpoint that is incomplete, damaged or of another kind; with
    `kinds`, also for layers that packed and exported models have no place for.
    """
    stored = find_checkpoint(path)
    if not stored.reader or (kinds and stored.kind not in kinds):
        raise unsuited(stored, kinds)
    if isinstance(stored, Checkpoint):
        return stored
    module, _, name = stored.reader.partition(".")
    opened = getattr(importlib.import_module(f"sparse_bitnet.checkpoint.{module}"), name)(stored)
    if kinds and opened.not_linear:
        raise UserError(
            f"{opened.folder}: {opened.not_linear} is a stack of experts, or transposed: "
            "`pack` and `export` do not support that, `generate` runs it with --engine transformers"
        )
    return opened


def open_ternary(path: str | Path) -> Checkpoint:
    """Open a trained checkpoint with ternary weights. Raises `UserError` for any other."""
    checkpoint = open_checkpoint(path, "trained")
    if checkpoint.format.weight != "ternary":
        raise UserError(
            f"{checkpoint.folder} holds full-precision weights ({checkpoint.format}), which packed "
            "formats do not store: `sparse-bitnet export --to dense` writes them for other tools"
        )
    return checkpoint


def fingerprint(path: str) -> str:
    """Return 16 hexadecimal digits that identify a model's config and weights."""
    folder, content = find_checkpoint(path).folder, hashlib.blake2b(digest_size=8)
    weights = [*folder.glob("*.safetensors")] or [*folder.glob("*.bin")]
    for file in [folder] if folder.is_file() else sorted([folder / "config.json", *weights]):
        with os_errors_as(f"cannot read {file}"), open(file, "rb") as opened:
            hashlib.file_digest(opened, lambda: content)
    return content.hexdigest()


_REFUSED = {"foreign": "is not importable", "packed": "is not packed"}
"""Accepted kinds -> description of an accepted model, for the error."""
_REMEDIES = {
    "dense": (
        "it is a plain model; `sparse-bitnet distill {name} OUT` (in Python, convert_) makes a ternary "
        "one of it, and {tool} runs it as it is"
    ),
    "unknown": (
        "`sparse-bitnet import` reads bitnet and compressed-tensors; `sparse-bitnet distill {name} OUT` "
        "(in Python, convert_) makes a ternary one of the model that it was made from"
    ),
    "packed": "it is packed already, and generate, serve, evaluate and export read it as it is",
    "trained": "pack it first: sparse-bitnet pack {name} OUT",
    "foreign": "it is another tool's; run sparse-bitnet import {name} OUT, then use OUT",
}
"""Kind of a model -> what to do where a command does not accept it."""


def unsuited(stored: StoredModel, kinds: tuple[str, ...] = ("packed",)) -> UserError:
    """Return the error for a stored model of a kind that a command does not accept, with what to do."""
    method, is_file = stored.entry.get("quant_method"), stored.folder.is_file()
    said = f"quant_method {method!r}" if method else "no quantization_config"
    of_file = stored.entry.get("not_ternary", "a ternary GGUF file")
    said = of_file if is_file else f"{said} in {CONFIG_FILE}"
    refused = _REFUSED.get(" ".join(kinds), "is not a trained checkpoint of sparse-bitnet")
    remedy = _REMEDIES[stored.kind]
    if stored.kind == "trained" and kinds == ("foreign",):
        remedy = "it is a checkpoint of sparse-bitnet already, which every command reads"
    tool = "llama.cpp" if is_file else "`generate --engine transformers`"
    why = remedy.format(name=stored.name, tool=tool)
    return UserError(f"{stored.folder} ({said}) {refused}: {why}")
