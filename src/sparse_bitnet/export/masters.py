# SPDX-License-Identifier: Apache-2.0
"""Masters for codes of other tools.

Our checkpoints hold masters, from which codes and scale follow. Where only codes are known, masters
are made from which exactly these follow: with z the share of non-zero codes, the weights
codes * scale / z have the mean magnitude `scale` and round to `codes`. They are a start for further
training, not the weights the model was trained with.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparse_bitnet.checkpoint.checkpoint import Checkpoint, warn_of_zeros
from sparse_bitnet.checkpoint.model_folder import (
    LINEAR_NORMS,
    MASTERS_HELD,
    finish_folder,
    write_json,
)
from sparse_bitnet.errors import UserError
from sparse_bitnet.export.deferred import DeferredTensors, deferred, write_safetensors
from sparse_bitnet.export.hf_folder import plain_config
from sparse_bitnet.files import atomic_folder
from sparse_bitnet.layer_config import SparseBitConfig
from sparse_bitnet.nn.convert import FORMAT_VERSION
from sparse_bitnet.nn.selection import select
from sparse_bitnet.packing.formats import SCALE_FLOOR
from sparse_bitnet.packing.ternary import TernaryWeight
from sparse_bitnet.progress import OnProgress


def write_masters(
    foreign: Checkpoint,
    format: SparseBitConfig,
    out: Path,
    write_tokenizer: Callable[[Path], None],
    on_progress: OnProgress | None,
) -> None:
    """The folder `out` with float32 masters for the codes of another tool's checkpoint.

    Raises `UserError` for codes outside the format's pattern, and for scales that no masters have.
    """
    if foreign.config.get(LINEAR_NORMS):
        raise UserError(
            f"{foreign.folder} has a norm in each linear, which masters here do not: import it with "
            "--packed auto"
        )
    with atomic_folder(out) as temporary:
        write_safetensors(
            temporary / "model.safetensors", list(_plan(foreign, format)), on_progress
        )
        write_json(temporary / "config.json", _config(foreign, format))
        write_tokenizer(temporary)
        finish_folder(temporary, MASTERS_HELD)


def _config(foreign: Checkpoint, format: SparseBitConfig) -> dict[str, Any]:
    return plain_config(foreign.config) | {
        "quantization_config": {
            "quant_method": "sparse_bitnet",
            "version": FORMAT_VERSION,
            "format": format.to_dict(),
            "modules_to_not_convert": foreign.dense_linears,
        },
    }


def _plan(foreign: Checkpoint, format: SparseBitConfig) -> Iterator[DeferredTensors]:
    for layer, sizes in foreign.layers.items():
        read = partial(_master, foreign, layer, format)
        yield deferred(f"{layer}.weight", torch.float32, sizes, read)
    for name, shape in foreign.others.items():
        yield deferred(name, torch.float32, shape, partial(foreign.read, name))


def _master(foreign: Checkpoint, layer: str, format: SparseBitConfig) -> Tensor:
    if foreign.has_masters:
        master = foreign.master(layer)
        if not format.pattern.is_dense:
            ternary_of(master, format, layer)
        return master
    ternary = TernaryWeight(*map(torch.as_tensor, foreign.ternary(layer)))
    warn_of_zeros(ternary, layer, foreign)
    if ternary.weight_scale.dim():
        raise UserError(
            f"layer {layer} has several scales, which masters cannot have: import it with --packed auto"
        )
    if ternary.weight_scale < SCALE_FLOOR:
        raise UserError(
            f"layer {layer}: a weight scale of {ternary.weight_scale:.4g} is below {SCALE_FLOOR:g}, "
            "the smallest there is here"
        )
    size, nonzero = ternary.codes.numel(), int(ternary.codes.count_nonzero())
    # Above it the magnitudes, or the sum of which the mean is taken, would be infinite.
    largest = torch.finfo(torch.float32).max * nonzero / size**2
    if nonzero and ternary.weight_scale.item() > largest:
        raise UserError(
            f"layer {layer}: a weight scale of {ternary.weight_scale:.4g} is too large for masters: "
            "import it with --packed auto"
        )
    master = masters_of(ternary)
    codes, weight_scale = ternary_of(master, format, layer, ternary.codes)
    assert weight_scale == ternary.weight_scale or not codes.any()
    return master


def ternary_of(
    master: Tensor, format: SparseBitConfig, layer: str, expected: Tensor | None = None
) -> TernaryWeight:
    """Codes and scale of a master. Raises `UserError` unless the codes are those `expected`, by default
    the ones without the pattern: to mask what was trained without would make another model."""
    codes, _, scale = select(master.float(), format)[:3]
    if expected is None and not format.pattern.is_dense:
        expected = select(master.float(), format, kept=format.pattern.m).codes
    assert codes is not None
    assert scale is not None
    if expected is not None and not torch.equal(codes, expected):
        raise UserError(
            f"layer {layer}: its codes do not keep to the pattern {format.pattern}; import with "
            "--pattern 8:8"
        )
    return TernaryWeight(codes, scale)


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
