# SPDX-License-Identifier: Apache-2.0
"""A complete Hugging Face model folder: config, weights, tokenizer, generation config, model card."""

import json
from collections.abc import Callable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from sparse_bitnet.checkpoint.checkpoint import Checkpoint
from sparse_bitnet.checkpoint.model_folder import (
    CONFIG_FILE,
    EXPORTED_FORMAT,
    TOKENIZER_FILES,
    copy_files,
    read_json,
    read_json_if_there,
)
from sparse_bitnet.errors import UserError
from sparse_bitnet.export.deferred import DeferredTensors, write_safetensors
from sparse_bitnet.files import atomic_folder
from sparse_bitnet.packing.tensor_writer import TensorSpec
from sparse_bitnet.progress import OnProgress

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LayerTensors = Callable[[str, tuple[int, int]], DeferredTensors]
"""(layer name, [out_features, in_features]) -> what stands for the layer's weight."""


def check_new_folder(out: str | Path) -> Path:
    """`out` as a path. Raises `UserError` when something is there: an export replaces nothing."""
    out = Path(out)
    if out.suffix == ".gguf":
        raise UserError(f"{out}: give a folder, which gets the .gguf file and a model card")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"{out} exists already; choose another folder or remove it")
    return out


def require_ternary_int8(source: Checkpoint, target: str) -> None:
    """Raise `UserError` unless the model computes as `target` does: ternary x int8."""
    if source.format.weight != "ternary":
        raise UserError(
            f"{source.folder} is {source.format}: {target} holds ternary weights; use --format dense"
        )
    if source.format.activation != "int8":
        raise UserError(
            f"{source.folder} was trained without int8 activations ({source.format}), with which every "
            f"reader of {target} computes; use --format dense"
        )


def scale_groups(source: Checkpoint) -> dict[str, int]:
    """Of each sparse layer how many weights of a row share a scale, 0 where all of the matrix do."""
    groups = dict.fromkeys(source.layers, 0)
    for name, (_, columns) in source.layers.items() if not source.has_one_scale else ():
        stored = source.file.entries.get(f"{name}.weight_scale") if source.file else None
        shape = (stored or source.ternary(name).weight_scale).shape
        groups[name] = 0 if prod(shape) == 1 else columns // shape[-1]
    return groups


def refuse_groups(source: Checkpoint, target: str, rows: bool) -> None:
    """Raise `UserError` for more scales than one a matrix, or with `rows` than one a row."""
    for name, group in scale_groups(source).items():
        if group and not (rows and group == source.layers[name][1]):
            what = "row" if rows else "matrix"
            raise UserError(
                f"layer {name} has a scale for every {group} weights of a row, {target} one for a "
                f"{what}; use --format dense, or `sparse-bitnet pack`"
            )


def plan_tensors(
    source: Checkpoint, dtype: "torch.dtype", layer_tensors: LayerTensors
) -> Iterator[DeferredTensors]:
    """Every tensor of the export: sparse layers by `layer_tensors`, the rest cast to `dtype`."""
    for layer, sizes in source.layers.items():
        yield layer_tensors(layer, sizes)
    for name, shape in source.others.items():
        yield _cast(source, name, shape, dtype)


def _cast(
    source: Checkpoint, name: str, shape: tuple[int, ...], dtype: "torch.dtype"
) -> DeferredTensors:
    def make() -> "Sequence[Tensor]":
        return (source.read(name).to(dtype),)

    return DeferredTensors((TensorSpec(name, dtype, shape),), make)


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
        config = with_dtype(source.config, dtype) | {EXPORTED_FORMAT: str(source.format)}
        if quantization_config is not None:
            config["quantization_config"] = quantization_config
        write_json(folder / "config.json", config)
        copy_tokenizer(source.folder, folder)
        write_generation_config(source.folder, folder)
        (folder / "README.md").write_text(model_card, encoding="utf-8")


def with_dtype(config: dict[str, Any], dtype: Union["torch.dtype", str]) -> dict[str, Any]:
    """A config.json without quantization that says `dtype`, under the one of its two names that readers
    look at first."""
    dropped = ("torch_dtype", "quantization_config")
    others = {key: value for key, value in config.items() if key not in dropped}
    return others | {"dtype": str(dtype).removeprefix("torch.")}


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
        write_json(folder / "tokenizer_config.json", config)


def write_generation_config(source: Path, folder: Path) -> None:
    """Copy generation_config.json, naming the end tokens where it names none."""
    config = read_json_if_there(source / "generation_config.json")
    end = end_token_id(source)
    if config.get("eos_token_id") is None and end is not None:
        ends = stored_ends(source)
        config |= {"eos_token_id": end if ends is None else ends, "pad_token_id": end}
    if config:
        write_json(folder / "generation_config.json", config)


def stored_ends(folder: Path) -> Any:
    """`eos_token_id` of generation_config.json, else of config.json: a token, a list of them, or None."""
    for name in ("generation_config.json", CONFIG_FILE):
        if (ends := read_json_if_there(folder / name).get("eos_token_id")) is not None:
            return ends
    return None


def end_token_id(folder: Path) -> int | None:
    """Id of the tokenizer's end-of-text token; None without a tokenizer."""
    from sparse_bitnet.checkpoint.load import load_tokenizer

    if not (folder / "tokenizer.json").is_file():
        return None
    return load_tokenizer(folder).eos_token_id


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Indented, sorted as given, with a newline at the end."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
