# SPDX-License-Identifier: Apache-2.0
"""Export of a trained checkpoint to the files of another tool: one function for all formats.

Models that a format does not support are refused, by names and shapes, before anything is written; the
files appear under their names when all are complete.

Formats that are Hugging Face folders:

bitnet: transformers reads it natively, for any architecture; four codes per byte (`pack_row_planes`).
The `bitlinear` class divides its output by `weight_scale`, which therefore holds the reciprocal of our
scale; `autobitlinear` multiplies, but the bias as well, which breaks q, k and v of Qwen2. In "offline"
mode nothing is quantised again when loading.

compressed-tensors: vLLM reads it, and transformers with the package of that name. W2A8
`pack-quantized`: `weight_packed` int32 (`pack_words`). W8A8 `int-quantized`: `weight` int8, four times
larger but read by every vLLM since mid-2024. Both hold one scale per row, often the same for all, in
float32 whatever the dtype of the rest, since readers cast it to their compute dtype. No
`sparsity_config`: current readers refuse it.

dense: holds codes * scale, for tools without a ternary format. Such a tool multiplies with
unquantised activations, so its logits differ from ours by the rounding of our activations.
A tool that quantises the weights to ternary again gets a wrong scale, since zeros enter its mean (a
factor of 0.65 for a 6:8 Gaussian); hence the warning. Rotated weights are rotated back.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparse_bitnet.checkpoint.checkpoint import Checkpoint, check_tensors, stored_tensors
from sparse_bitnet.checkpoint.model_folder import EXPORTED_FORMAT, LINEAR_NORMS, write_json
from sparse_bitnet.checkpoint.open_checkpoint import open_checkpoint
from sparse_bitnet.errors import UserError
from sparse_bitnet.export import gguf_export
from sparse_bitnet.export.export_config import ExportConfig
from sparse_bitnet.export.hf_folder import (
    Tensors,
    check_new_folder,
    converted,
    copy_tokenizer,
    older_rope,
    plain_config,
    write_safetensors,
)
from sparse_bitnet.export.model_card import gguf_file_name, model_card
from sparse_bitnet.export.verify import Verification, absent_reader, text_to_verify, verify
from sparse_bitnet.files import atomic_folder, write_atomic
from sparse_bitnet.packing.gguf_blocks import BLOCK_TYPES, PRISM_TYPES, BlockType
from sparse_bitnet.packing.tensor_file import TensorSpec
from sparse_bitnet.packing.two_bits import CODES_PER_BYTE, W2A8, W8A8, pack_row_planes, pack_words
from sparse_bitnet.progress import OnProgress

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
DENSE_WARNING = (
    "these are the effective weights, codes x scale. Do not let a tool quantise them to ternary again "
    "(transformers' online bitnet mode, a GGUF converter): it gets a wrong scale. Export the trained "
    "checkpoint to that tool's format instead"
)


class Export(NamedTuple):
    """Result of an export."""

    nbytes: int
    """Size of all files, in bytes."""
    warning: str | None
    """Note that users of this format must know, or None."""
    verification: Verification | None
    """Result of the verification; None if it was not requested."""


def export(
    checkpoint: str | Path,
    out: str | Path,
    config: ExportConfig,
    *,
    on_progress: OnProgress = lambda done, total: None,
    on_verified: OnProgress = lambda done, total: None,
) -> Export:
    """Write a trained model in the format of another tool; verify it if `config.verify` is set.

    Args:
        checkpoint: run folder, model folder or hub id of a trained or packed model.
        out: a new folder.
        config: format and options.
        on_progress: called with (bytes written, bytes in all) after every tensor.
        on_verified: called with (tokens compared, tokens in all) during the verification.

    A failed verification is returned, not raised; the files stay, and their model card records it.

    Raises `UserError` for an unusable checkpoint, an `out` that exists, a model that the format does not
    support, or a full disk; nothing is then left behind.
    """
    out = check_new_folder(out)
    source = open_checkpoint(checkpoint, "trained", "packed")
    block = _block(config)
    if config.verify and block is not None:
        gguf_export.check_reader(source, block)
    if config.verify and (absent := absent_reader(config.format)):
        raise UserError(f"--verify: {absent}; without --verify, the export does not need it")
    text = text_to_verify(source, config) if config.verify else None
    write(source, out, config, on_progress)
    verification = None
    if text is not None:
        verification = verify(source, out, config, text, on_verified)
        card = model_card(source, config.format, config.embeddings, checked=verification.rows())
        write_atomic(out / "README.md", card)
    warning = None if block is None else gguf_export.notes(source, block)
    if config.format == "dense" and source.format.weight == "ternary":
        warning = DENSE_WARNING
    nbytes = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    return Export(nbytes, warning, verification)


def write(
    source: Checkpoint, out: Path, config: ExportConfig, on_progress: OnProgress = lambda *_: None
) -> None:
    """Check, then write the folder `out` in one step; see `export`."""
    assert config.embeddings is not None
    if source.format.variant("activation").has("transform"):
        raise UserError(
            f"{source.folder} was trained with activation={source.format.activation}, which transforms "
            "inputs of layers; no other tool does that: run it with --engine transformers"
        )
    block = _block(config)
    if source.rotation and block not in PRISM_TYPES and config.format != "dense":
        raise UserError(
            f"{source.folder} has rotated weights, which readers of {config.format} do not support: "
            "use --to dense; with a scale per matrix or 128 weights also gguf-pq2_0 or gguf-ptq1_0"
        )
    _check_tensors(source, holds_linear_norms=block is not None)
    group = check_folder_format(source, config.format) if block is None else 0
    with atomic_folder(out) as folder:
        if block is not None:
            path = folder / gguf_file_name(config.format)
            gguf_export.write(path, source, block, config.embeddings, on_progress)
        else:
            dtype = DTYPES[config.embeddings]
            tensors: Tensors = []
            for name in source.layers:
                tensors += _layer(source, name, config.format, dtype, group)
            for name, shape in source.others.items():
                read = partial(_unrotated, source, source.read, name)
                tensors += converted(name, dtype, shape, read)
            write_safetensors(folder / "model.safetensors", tensors, on_progress)
            values = older_rope(source.config) | plain_config(source.config, dtype)
            values |= {EXPORTED_FORMAT: str(source.format)}
            if config.format != "dense":
                values["quantization_config"] = _quantization_config(source, config.format, group)
            write_json(folder / "config.json", values)
            copy_tokenizer(source.folder, folder)
        card = model_card(source, config.format, config.embeddings)
        (folder / "README.md").write_text(card, encoding="utf-8")


def _check_tensors(source: Checkpoint, *, holds_linear_norms: bool) -> None:
    """Raise `UserError` unless a packed model's tensors are those of its config.json: readers would drop
    extra ones and invent missing ones."""
    if source.kind != "packed":
        return
    wanted = stored_tensors(source.model)
    if holds_linear_norms and LINEAR_NORMS in source.config:
        norms = {f"{name}.norm.weight": shape[1] for name, shape in source.layers.items()}
        wanted |= {name: torch.empty(size, device="meta") for name, size in norms.items()}
    layers = {f"{name}.weight": shape for name, shape in source.layers.items()}
    dtypes = source.dtypes | dict.fromkeys((*layers, *source.embeddings), "F32")
    check_tensors(wanted, source.others | layers, dtypes, source.folder)


def _block(config: ExportConfig) -> BlockType | None:
    """Return the block type of a GGUF format, or None for any other format."""
    return BLOCK_TYPES.get(config.format.removeprefix("gguf-").upper())


def check_folder_format(source: Checkpoint, format: str) -> int:
    """Return how many weights of a row share a scale in the exported model; 0: whole rows or matrices.

    Raises `UserError` for a model that a format does not support, or its readers compute otherwise.
    """
    if format == "dense":
        return 0
    is_bitnet = format == "bitnet"
    target = "bitnet" if is_bitnet else "compressed-tensors"
    if source.format.weight != "ternary":
        raise UserError(
            f"{source.folder} is {source.format}: {target} stores ternary weights; use --to dense"
        )
    if source.format.activation != "int8":
        raise UserError(
            f"{source.folder} was trained without int8 activations ({source.format}), but readers of "
            f"{target} compute with them; use --to dense"
        )
    groups = gguf_export.scale_groups(source)
    sizes = {size for name, size in groups.items() if size not in (0, source.layers[name][1])}
    shared = min(sizes, default=0) if format == "compressed-tensors-w2a8" else 0
    for name, (rows, columns) in source.layers.items():
        group = groups[name]
        allowed = (0,) if is_bitnet else (0, shared, columns)
        if group not in allowed or (shared and columns % shared):
            raise UserError(
                f"layer {name} has one scale per {group} weights of a row, {format} one per "
                f"{'matrix' if is_bitnet else f'{shared} in all layers' if shared else 'row'}; use "
                "--to dense, or `sparse-bitnet pack`"
            )
        if is_bitnet and rows % CODES_PER_BYTE:
            raise UserError(
                f"layer {name} has {rows} rows, not a multiple of {CODES_PER_BYTE} as bitnet needs; "
                "use --to compressed-tensors-w8a8"
            )
    return shared


def _unrotated(source: Checkpoint, read: Callable[[str], Tensor], name: str) -> Tensor:
    """Return `read(name)`, a layer's weight or another tensor, without a rotation of its basis."""
    values, rotation = read(name), source.rotation
    if rotation is None or name not in (*source.layers, *rotation.tables(source.embeddings)):
        return values
    return rotation.rows(values)


def _layer(source: Checkpoint, name: str, format: str, dtype: torch.dtype, group: int) -> Tensors:
    """Return the tensors that store a sparse layer's weight in `format`, with a scale for each `group` of
    a row or, if that is 0, for each row."""
    shape = source.layers[name]
    runs = shape[1] // group if group else 1
    if format == "dense":
        read = partial(_unrotated, source, source.effective, name)
        return converted(f"{name}.weight", dtype, shape, read)

    def stored() -> Iterator[Tensor]:
        ternary = source.ternary(name)
        tensors = _stored(format, *ternary, dtype, runs)
        if tensors["weight_scale"].isinf().any():
            raise UserError(
                f"layer {name}: bitnet stores 1 / its weight scale {ternary[1].item():.4g}, which is too "
                "large for float16; use --embeddings bf16 or f32"
            )
        yield from tensors.values()

    codes = torch.empty(shape, dtype=torch.int8, device="meta")
    described = _stored(format, codes, torch.empty((), device="meta"), dtype, runs).items()
    specs = [TensorSpec(f"{name}.{end}", each.dtype, tuple(each.shape)) for end, each in described]
    tensors = stored()
    return [(spec, islice(tensors, 1)) for spec in specs]


def _stored(
    format: str, codes: Tensor, weight_scale: Tensor, dtype: torch.dtype, runs: int
) -> dict[str, Tensor]:
    """Return the tensors of a layer in `format`, by the end of their names, with `runs` scales a row."""
    if format == "bitnet":
        reciprocal = (1 / weight_scale).reshape(1).to(dtype)
        return {"weight": pack_row_planes(codes), "weight_scale": reciprocal}
    scales = weight_scale.float().expand(len(codes), runs)
    # Readers divide by scales, also by those of codes which are all zero.
    scales = scales.where(scales != 0, 1.0)
    if format == "compressed-tensors-w8a8":
        return {"weight": codes, "weight_scale": scales}
    shape = torch.tensor(codes.shape, dtype=torch.int64)
    return {"weight_packed": pack_words(codes), "weight_scale": scales, "weight_shape": shape}


def _quantization_config(source: Checkpoint, format: str, group: int) -> dict[str, Any]:
    """Return the `quantization_config` of config.json."""
    if format == "bitnet":
        return {
            "quant_method": "bitnet",
            "linear_class": "bitlinear",
            "quantization_mode": "offline",
            "modules_to_not_convert": source.dense_linears,
        }
    stored, num_bits = (W2A8, 2) if format == "compressed-tensors-w2a8" else (W8A8, 8)
    weights = {"num_bits": num_bits, "type": "int", "symmetric": True, "strategy": "channel"}
    inputs = weights | {"num_bits": 8, "strategy": "token", "dynamic": True}
    if group:
        weights |= {"strategy": "group", "group_size": group}
    group_0 = {"format": stored, "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "quantization_status": "compressed",
        "ignore": source.dense_linears,
        "config_groups": {"group_0": {"targets": ["Linear"], **group_0}},
    }
