# SPDX-License-Identifier: Apache-2.0
"""A complete Hugging Face model folder: config, weights, tokenizer, generation config, model card."""

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from sparse_bitnet.checkpoint.checkpoint import Checkpoint
from sparse_bitnet.checkpoint.config_fields import FULL, WINDOWED
from sparse_bitnet.checkpoint.load import load_tokenizer
from sparse_bitnet.checkpoint.model_folder import (
    CONFIG_FILE,
    EXPORTED_FORMAT,
    TOKENIZER_FILES,
    WITHOUT_IMPORT,
    copy_files,
    read_json,
    read_json_if_there,
    write_json,
)
from sparse_bitnet.errors import UserError, os_errors_as
from sparse_bitnet.export.deferred import DeferredTensors, write_safetensors
from sparse_bitnet.files import atomic_folder
from sparse_bitnet.progress import OnProgress

if TYPE_CHECKING:
    import torch


def check_new_folder(out: str | Path) -> Path:
    """`out` as a path. Raises `UserError` when something is there: an export replaces nothing."""
    out = Path(out)
    if out.suffix == ".gguf":
        raise UserError(f"{out}: give a folder; one of such a name would be taken for a GGUF file")
    with os_errors_as(f"cannot write {out}"):
        if out.exists() and not (out.is_dir() and not any(out.iterdir())):
            raise UserError(f"{out} exists already; choose another folder or remove it")
    return out


def scale_groups(source: Checkpoint) -> dict[str, int]:
    """Of each sparse layer how many weights of a row share a scale, 0 where all of the matrix do."""
    groups = dict.fromkeys(source.layers, 0)
    for name, (_, columns) in source.layers.items() if not source.has_one_scale else ():
        stored = source.file.entries.get(f"{name}.weight_scale") if source.file else None
        shape = (stored or source.ternary(name).weight_scale).shape
        groups[name] = 0 if prod(shape) == 1 else columns // shape[-1]
    return groups


def write_folder(
    out: Path,
    source: Checkpoint,
    tensors: Sequence[DeferredTensors],
    *,
    dtype: "torch.dtype",
    quantization_config: dict[str, Any] | None,
    model_card: str,
    on_progress: OnProgress | None = None,
) -> None:
    """Write the folder `out` in one step; nothing is there before all of it is.

    Raises `UserError` when the disk is full or `out` cannot be written.
    """
    with atomic_folder(out) as folder:
        write_safetensors(folder / "model.safetensors", tensors, on_progress)
        config = _older_rope(source.config) | with_dtype(source.config, dtype)
        config |= {EXPORTED_FORMAT: str(source.format)}
        if quantization_config is not None:
            config["quantization_config"] = quantization_config
        write_json(folder / "config.json", config)
        copy_tokenizer(source.folder, folder)
        write_generation_config(source.folder, folder)
        (folder / "README.md").write_text(model_card, encoding="utf-8")


def with_dtype(config: dict[str, Any], dtype: Union["torch.dtype", str]) -> dict[str, Any]:
    """A config.json without quantization that says `dtype`, under the one of its two names that readers
    look at first."""
    dropped = ("torch_dtype", "quantization_config", *WITHOUT_IMPORT)
    others = {key: value for key, value in config.items() if key not in dropped}
    return others | {"dtype": str(dtype).removeprefix("torch.")}


def _older_rope(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of `rope_parameters` under the names of transformers 4, which ignores that table."""
    tables = config.get("rope_parameters")
    if not isinstance(tables, dict):
        return {}
    rope = tables.get(FULL, tables)
    named = {"rope_theta": "rope_theta", "partial_rotary_factor": "partial_rotary_factor"}
    if config.get("model_type") == "gpt_neox":
        named = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
    older = {old: rope[name] for name, old in named.items() if name in rope}
    if WINDOWED in tables:
        older["rope_local_base_freq"] = tables[WINDOWED]["rope_theta"]
    if rope.get("rope_type", "default") != "default":
        older["rope_scaling"] = {key: rope[key] for key in rope if key not in named}
    return older


def plain_config(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json of float32 without quantization, that of an export as before it."""
    config = {key: value for key, value in config.items() if key != EXPORTED_FORMAT}
    return with_dtype(config, "float32")


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the tokenizer files, under the class name that every release of transformers knows."""
    copy_files(source, folder, TOKENIZER_FILES)
    if (source / "tokenizer_config.json").is_file():
        config = read_json(source / "tokenizer_config.json")
        if config.get("tokenizer_class") == "TokenizersBackend":
            # The name in transformers 5; older releases, which vLLM may sit on, refuse it.
            config["tokenizer_class"] = "PreTrainedTokenizerFast"
            config.pop("backend", None)
        if isinstance(config.get("extra_special_tokens"), list):
            # The older name of such a list, which releases 4 and 5 read; under this one, 4 wants a table.
            config["additional_special_tokens"] = config.pop("extra_special_tokens")
        write_json(folder / "tokenizer_config.json", config)


def write_generation_config(source: Path, folder: Path) -> None:
    """Copy generation_config.json, naming the end tokens where it names none."""
    config = read_json_if_there(source / "generation_config.json")
    if config.get("eos_token_id") is None and (source / "tokenizer.json").is_file():
        end, ends = load_tokenizer(source).eos_token_id, stored_ends(source)
        config |= {"eos_token_id": end if ends is None else ends, "pad_token_id": end}
    if config:
        write_json(folder / "generation_config.json", config)


def stored_ends(folder: Path) -> Any:
    """`eos_token_id` of generation_config.json, else of config.json: a token, a list of them, or None."""
    for name in ("generation_config.json", CONFIG_FILE):
        if (ends := read_json_if_there(folder / name).get("eos_token_id")) is not None:
            return ends
    return None
