# SPDX-License-Identifier: Apache-2.0
"""Ternary checkpoints of other tools as checkpoints of ours, codes and scales unchanged.

Our checkpoints hold masters, from which codes and scale follow. Where only codes are known, masters
are made from which exactly these follow: with z the share of non-zero codes, the weights
codes * scale / z have the mean magnitude `scale` and round to `codes`. They are a start for further
training, not the weights the model was trained with.
"""

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparse_bitnet.checkpoint.checkpoint import Checkpoint, stored_tensors
from sparse_bitnet.checkpoint.open_checkpoint import open_checkpoint
from sparse_bitnet.errors import UserError
from sparse_bitnet.export.deferred import DeferredTensors, write_safetensors
from sparse_bitnet.export.export_checkpoint import check_new_folder
from sparse_bitnet.export.hf_folder import (
    EXPORTED_FORMAT,
    copy_tokenizer,
    with_dtype,
    write_generation_config,
    write_json,
)
from sparse_bitnet.export.pack import pack_checkpoint
from sparse_bitnet.files import atomic_folder
from sparse_bitnet.nn.convert import FORMAT_VERSION
from sparse_bitnet.nn.layer import SparseBitConfig
from sparse_bitnet.nn.selection import select
from sparse_bitnet.ops.operands import SCALE_FLOOR
from sparse_bitnet.packing.formats import check_format
from sparse_bitnet.packing.tensor_writer import TensorSpec
from sparse_bitnet.packing.ternary import TernaryWeight
from sparse_bitnet.pattern import NMPattern
from sparse_bitnet.progress import OnProgress


@dataclass(frozen=True, kw_only=True)
class Imported:
    """What was read and written."""

    folder: Path
    kind: str
    """The format read."""
    format: SparseBitConfig
    layers: int
    """Ternary layers."""


def import_checkpoint(
    folder: str | Path,
    out: str | Path,
    *,
    pattern: NMPattern | None = None,
    packed: str | None = None,
    embeddings: str = "bf16",
    on_progress: OnProgress | None = None,
) -> Imported:
    """Write a foreign checkpoint as a folder of ours, float32 masters included, or packed.

    Args:
        folder: what another tool, or `export`, wrote.
        out: a new folder.
        pattern: that the codes keep to. Default: that of an export of ours, else dense.
        packed: a packed format or "auto", to write the packed form, a tensor at a time and without
            masters.
        embeddings: their precision in the packed form (`pack_checkpoint`).
        on_progress: called with (bytes written, bytes in all) after every tensor.

    Raises `UserError` for what `open_foreign` cannot read, codes outside the pattern, an `out` that
    exists, and a full disk; nothing is then left behind.
    """
    out = check_new_folder(out)
    if packed not in (None, "auto"):
        check_format(packed)
    foreign = open_checkpoint(folder, "foreign")
    format = foreign.format if pattern is None else SparseBitConfig(pattern=pattern)
    for name, (_, in_features) in foreign.layers.items():
        format.pattern.check_divides(in_features, name)
    if packed is None:
        _write(foreign, format, out, on_progress)
    else:
        pack_checkpoint(
            _to_pack(foreign, format),
            out,
            format=packed,
            embeddings=embeddings,
            progress=on_progress,
        )
    return Imported(folder=out, kind=foreign.tool, format=format, layers=len(foreign.layers))


def _write(
    foreign: Checkpoint, format: SparseBitConfig, out: Path, on_progress: OnProgress | None
) -> None:
    with atomic_folder(out) as temporary:
        write_safetensors(
            temporary / "model.safetensors", list(_plan(foreign, format)), on_progress
        )
        write_json(temporary / "config.json", _config(foreign, format))
        _write_tokenizer(foreign, temporary)


def _write_tokenizer(foreign: Checkpoint, folder: Path) -> None:
    if foreign.write_tokenizer is not None:
        foreign.write_tokenizer(folder)
    else:
        copy_tokenizer(foreign.folder, folder)
        write_generation_config(foreign.folder, folder)


def _to_pack(foreign: Checkpoint, format: SparseBitConfig) -> Checkpoint:
    """The checkpoint as ours with masters would be: float32 beside the codes, in the model's order."""

    def ternary(layer: str) -> TernaryWeight:
        if foreign.master is not None:
            codes, _, scale = select(foreign.master(layer).float(), format)[:3]
            assert codes is not None
            assert scale is not None
            return TernaryWeight(codes, scale)
        found = foreign.ternary(layer)
        if not found.codes.any():
            warnings.warn(
                f"layer {layer} of {foreign.folder} has no weight but zeros", stacklevel=2
            )
        return found

    model: Any = foreign.model()
    others = {
        name: foreign.others[name] for name in stored_tensors(model) if name in foreign.others
    }
    return dataclasses.replace(
        foreign,
        config=_config(foreign, format),
        format=format,
        others=others,
        dtypes=dict.fromkeys(others, "F32"),
        read=lambda *arguments: foreign.read(*arguments).float(),
        ternary=ternary,
        write_tokenizer=partial(_write_tokenizer, foreign),
    )


def _config(foreign: Checkpoint, format: SparseBitConfig) -> dict[str, Any]:
    config = {key: value for key, value in foreign.config.items() if key != EXPORTED_FORMAT}
    return with_dtype(config, torch.float32) | {
        "quantization_config": {
            "quant_method": "sparse_bitnet",
            "version": FORMAT_VERSION,
            "format": format.to_dict(),
            "modules_to_not_convert": foreign.dense_linears,
        },
    }


def _plan(foreign: Checkpoint, format: SparseBitConfig) -> Iterator[DeferredTensors]:
    for layer, sizes in foreign.layers.items():
        yield _deferred(f"{layer}.weight", sizes, partial(_master, foreign, layer, format))
    for name, shape in foreign.others.items():
        yield _deferred(name, shape, partial(foreign.read, name))


def _deferred(name: str, shape: tuple[int, ...], read: Callable[[], Tensor]) -> DeferredTensors:
    return DeferredTensors((TensorSpec(name, torch.float32, shape),), lambda: (read().float(),))


def _master(foreign: Checkpoint, layer: str, format: SparseBitConfig) -> Tensor:
    if foreign.master is not None:
        return foreign.master(layer)
    ternary = foreign.ternary(layer)
    if ternary.weight_scale.dim():
        raise UserError(
            f"layer {layer} has several scales, which masters cannot have: import it with --packed auto"
        )
    if ternary.weight_scale < SCALE_FLOOR:
        raise UserError(
            f"layer {layer}: a weight scale of {ternary.weight_scale:.4g} is below {SCALE_FLOOR:g}, "
            "the smallest there is here"
        )
    master = masters_of(ternary)
    codes, _, weight_scale = select(master, format)[:3]
    assert codes is not None
    if not torch.equal(codes, ternary.codes):
        raise UserError(
            f"layer {layer}: its codes do not keep to the pattern {format.pattern}; import with "
            "--pattern 8:8"
        )
    assert weight_scale == ternary.weight_scale or not codes.any()
    return master


def masters_of(ternary: TernaryWeight) -> Tensor:
    """float32 masters from which ternary quantisation gives exactly these codes and this scale.

    All zero where all codes are; the scale then does not matter.
    """
    codes, weight_scale = ternary
    nonzero = codes != 0
    count = int(nonzero.sum())
    if count == 0:
        return torch.zeros(codes.shape)
    magnitude = weight_scale.double().item() * codes.numel() / count
    # The mean must round to the very scale: some weights get the float above, the rest the one below.
    below = np.float32(magnitude)
    if float(below) > magnitude:
        below = np.nextafter(below, np.float32(0))
    above = np.nextafter(below, np.float32(np.inf))
    share = (magnitude - float(below)) / (float(above) - float(below))
    order = nonzero.flatten().cumsum(0).view(codes.shape)
    magnitudes = torch.where(order <= round(share * count), float(above), float(below))
    return codes * magnitudes.float()
