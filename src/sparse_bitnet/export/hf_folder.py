# SPDX-License-Identifier: Apache-2.0
"""The files of a Hugging Face model folder: weights, config, tokenizer, generation config.

Tensors are computed when they are written, so that an export needs the memory of one layer. Importing
this module imports no torch.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_bitnet.checkpoint.config_fields import FULL, WINDOWED
from sparse_bitnet.checkpoint.load import load_tokenizer
from sparse_bitnet.checkpoint.model_folder import (
    EXPORTED_FORMAT,
    TOKENIZER_FILES,
    WITHOUT_IMPORT,
    copy_files,
    read_json,
    read_json_if_there,
    stored_ends,
    write_json,
)
from sparse_bitnet.errors import UserError, os_errors_as
from sparse_bitnet.packing.tensor_file import TensorFileWriter, TensorSpec
from sparse_bitnet.progress import OnProgress

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def check_new_folder(out: str | Path) -> Path:
    """Return `out` as a path. Raises `UserError` if it exists: an export replaces nothing."""
    out = Path(out)
    if out.suffix == ".gguf":
        raise UserError(f"{out}: OUT is a folder, so leave .gguf out of its name")
    with os_errors_as(f"cannot write {out}"):
        if out.exists() and not (out.is_dir() and not any(out.iterdir())):
            raise UserError(f"{out} exists already; choose another folder or remove it")
    return out


Tensors = list[tuple[TensorSpec, Iterable[Any]]]
"""Tensors to write, in order, each with the pieces of its values, computed when they are iterated."""


def converted(
    name: str, dtype: "torch.dtype", shape: tuple[int, ...], read: Callable[[], Any]
) -> Tensors:
    """Return one tensor: the result of `read`, a tensor or an array, cast to `dtype`. Iterating raises
    `UserError` for values that the type cannot hold."""

    def pieces() -> "Iterator[Tensor]":
        import torch

        values = torch.as_tensor(read()).to(dtype)
        if not values.isfinite().all():
            raise UserError(f"{name} has values beyond {dtype}; use --embeddings bf16 or f32")
        yield values

    return [(TensorSpec(name, dtype, shape), pieces())]


def write_safetensors(path: Path, tensors: Tensors, on_progress: OnProgress) -> None:
    """Write one safetensors file, a tensor at a time.

    Raises `OSError` when the disk is full; the caller's folder is temporary.
    """
    done, total = 0, sum(spec.nbytes for spec, _ in tensors)
    with TensorFileWriter(path, [spec for spec, _ in tensors], {"kind": "export"}) as file:
        for spec, pieces in tensors:
            file.write(spec.name, pieces)
            done += spec.nbytes
            on_progress(done, total)


def plain_config(config: dict[str, Any], dtype: "torch.dtype | str" = "float32") -> dict[str, Any]:
    """Return a config.json without quantization, as if the model had never been exported. It states
    `dtype` under the one of its two names that readers look at first."""
    dropped = ("torch_dtype", "quantization_config", EXPORTED_FORMAT, *WITHOUT_IMPORT)
    others = {key: value for key, value in config.items() if key not in dropped}
    return others | {"dtype": str(dtype).removeprefix("torch.")}


def older_rope(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of `rope_parameters` under transformers 4's names, which ignores that table."""
    tables = config.get("rope_parameters")
    if not isinstance(tables, dict):
        return {}
    by_kind, kind = any(isinstance(table, dict) for table in tables.values()), config["model_type"]
    if by_kind and kind not in ("gemma3_text", "gemma3n_text", "olmo3"):
        return {}  # transformers 4 does not know the others
    if not by_kind and (config.get("rope_scaling") or kind.startswith("gemma3")):
        return {}  # a table that no release reads
    rope, windowed = tables.get(FULL, tables) or {}, tables.get(WINDOWED) or {}
    named = {"rope_theta": "rope_theta", "partial_rotary_factor": "partial_rotary_factor"}
    if kind == "gpt_neox":
        named = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
    older = {old: rope[name] for name, old in named.items() if name in rope}
    if "rope_theta" in windowed:
        older["rope_local_base_freq"] = windowed["rope_theta"]
    if rope.get("rope_type", "default") != "default":
        older["rope_scaling"] = {key: rope[key] for key in rope if key not in named}
    return older


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the tokenizer files, under a class name that every release of transformers knows, and
    generation_config.json, naming the end tokens where it names none."""
    copy_files(source, folder, TOKENIZER_FILES)
    if (source / "tokenizer_config.json").is_file():
        config = read_json(source / "tokenizer_config.json")
        if config.get("tokenizer_class") == "TokenizersBackend":
            # The name in transformers 5; older releases, which vLLM may use, refuse it.
            config["tokenizer_class"] = "PreTrainedTokenizerFast"
            config.pop("backend", None)
        if isinstance(config.get("extra_special_tokens"), list):
            # Releases 4 and 5 read a list under this older name; under the new, 4 wants a table.
            config["additional_special_tokens"] = config.pop("extra_special_tokens")
        write_json(folder / "tokenizer_config.json", config)
    config = read_json_if_there(source / "generation_config.json")
    if config.get("eos_token_id") is None and (source / "tokenizer.json").is_file():
        end, ends = load_tokenizer(source).eos_token_id, stored_ends(source)
        config |= {"eos_token_id": end if ends is None else ends, "pad_token_id": end}
    if config:
        write_json(folder / "generation_config.json", config)
