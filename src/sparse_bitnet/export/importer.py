# SPDX-License-Identifier: Apache-2.0
"""Import of other tools' ternary checkpoints, with codes and scales unchanged.

A GGUF file is packed without torch. Our own checkpoints hold masters, from which codes and scale follow.
If only codes are known, masters are made that give exactly these codes and this scale: with z the share
of non-zero codes, the weights codes * scale / z have the mean magnitude `scale` and round to `codes`.
They are a start for further training, not the weights the model was trained with.
"""

import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sparse_bitnet.checkpoint.checkpoint import Checkpoint
from sparse_bitnet.checkpoint.model_folder import (
    LINEAR_NORMS,
    MASTERS_HELD,
    POOLING_FILES,
    copy_files,
    finish_folder,
    write_json,
)
from sparse_bitnet.checkpoint.open_checkpoint import open_checkpoint
from sparse_bitnet.errors import UserError
from sparse_bitnet.export.hf_folder import (
    Tensors,
    check_new_folder,
    converted,
    copy_tokenizer,
    plain_config,
    write_safetensors,
)
from sparse_bitnet.export.pack_checkpoint import pack_checkpoint
from sparse_bitnet.files import atomic_folder
from sparse_bitnet.layer_config import SparseBitConfig
from sparse_bitnet.packing.formats import SCALE_FLOOR
from sparse_bitnet.packing.ternary import TernaryWeight
from sparse_bitnet.pattern import NMPattern
from sparse_bitnet.progress import OnProgress

if TYPE_CHECKING:
    from torch import Tensor


class Imported(NamedTuple):
    """Result of an import."""

    kind: str
    """Name of the format that was read."""
    format: SparseBitConfig
    layers: int
    """Number of ternary layers."""


def import_checkpoint(
    folder: str | Path,
    out: str | Path,
    *,
    pattern: NMPattern | None = None,
    packed: str | None = None,
    embeddings: str = "auto",
    on_progress: OnProgress = lambda done, total: None,
) -> Imported:
    """Write another tool's checkpoint as a folder of ours, with float32 masters or packed.

    Args:
        folder: a folder or file that another tool, or `export`, wrote.
        out: a new folder.
        pattern: pattern of the codes. Default: that of an export of ours, else dense.
        packed, embeddings: packed format or "auto", and `embeddings` as in `pack_checkpoint`: write the
            packed form, one tensor at a time. None: write masters.
        on_progress: called with (bytes written, bytes in all) after every tensor.

    Raises `UserError` for a checkpoint that `open_checkpoint` cannot read, codes outside the pattern, an
    `out` that exists, and a full disk; nothing is then left behind.
    """
    out = check_new_folder(out)
    foreign = open_checkpoint(folder, "foreign")
    format = foreign.format if pattern is None else replace(foreign.format, pattern=pattern)
    for name, (_, in_features) in foreign.layers.items():
        format.pattern.check_divides(in_features, name)
    source = _Foreign(foreign, format)
    if packed is None:
        _write_masters(source, out, on_progress)
    else:
        pack_checkpoint(source, out, format=packed, embeddings=embeddings, progress=on_progress)
    return Imported(foreign.tool, format, len(foreign.layers))


class _Foreign(Checkpoint):
    """Another tool's checkpoint in a format of ours; other tensors are float32, in the model's order."""

    def __init__(self, foreign: Checkpoint, format: SparseBitConfig) -> None:
        super().__init__(foreign)
        self.foreign, self.format = foreign, format
        self.others = {name: foreign.others[name] for name in foreign.stored}
        self.dtypes = dict.fromkeys(self.others, "F32")
        self.config, self.has_masters = plain_config(foreign.config), False

    def stored_values(self, name: str, part: slice = slice(None)) -> Any:
        values = self.foreign.stored_values(name, part)
        return values if isinstance(values, np.ndarray) else values.float()

    def ternary(self, layer: str) -> TernaryWeight:
        if self.foreign.has_masters:
            return _ternary_of(self.foreign.master(layer), self.format, layer)
        ternary = self.foreign.ternary(layer)
        if not ternary.codes.any():
            warnings.warn(f"layer {layer} of {self.folder} has only zero weights", stacklevel=2)
        return ternary

    def ternary_rows(self, name: str, part: slice) -> TernaryWeight | None:
        return self.foreign.ternary_rows(name, part)

    def write_tokenizer(self, folder: Path) -> bool:
        if not self.foreign.write_tokenizer(folder):
            copy_tokenizer(self.folder, folder)
            copy_files(self.folder, folder, (POOLING_FILES, "LICENSE*"))
        return True


def _write_masters(source: _Foreign, out: Path, on_progress: OnProgress) -> None:
    """Write the folder `out` with float32 masters for the codes of another tool's checkpoint.

    Raises `UserError` for codes outside the format's pattern, and for scales that masters cannot have.
    """
    import torch

    foreign, format = source.foreign, source.format
    if foreign.rotation or foreign.config.get(LINEAR_NORMS):
        what = "rotated weights" if foreign.rotation else "norms in its linear layers"
        raise UserError(
            f"{foreign.folder} has {what}, which only packed folders hold: import it with "
            "--packed-format auto"
        )
    tensors: Tensors = []
    for layer, sizes in foreign.layers.items():
        read = partial(_master, source, layer)
        tensors += converted(f"{layer}.weight", torch.float32, sizes, read)
    for name, shape in foreign.others.items():
        tensors += converted(name, torch.float32, shape, partial(foreign.read, name))
    entry = format.config_entry(foreign.dense_linears)
    with atomic_folder(out) as temporary:
        write_safetensors(temporary / "model.safetensors", tensors, on_progress)
        write_json(temporary / "config.json", source.config | {"quantization_config": entry})
        source.write_tokenizer(temporary)
        finish_folder(temporary, MASTERS_HELD)


def _master(source: _Foreign, layer: str) -> "Tensor":
    import torch

    if source.foreign.has_masters:
        _ternary_of(master := source.foreign.master(layer), source.format, layer)
        return master
    ternary = TernaryWeight(*map(torch.as_tensor, source.ternary(layer)))
    if ternary.weight_scale.dim():
        raise UserError(
            f"layer {layer} has several scales, which only packed folders hold: import it with "
            "--packed-format auto (packed models cannot be trained)"
        )
    # Above `largest`, the magnitudes or the sum for their mean would be infinite.
    nonzero, size = int(ternary.codes.count_nonzero()), ternary.codes.numel()
    largest = torch.finfo(torch.float32).max * nonzero / size**2
    if nonzero and not SCALE_FLOOR <= ternary.weight_scale.item() <= largest:
        raise UserError(
            f"layer {layer}: a weight scale of {ternary.weight_scale:.4g} is outside "
            f"{SCALE_FLOOR:g}..{largest:.3g}, the range of master weights: import it with "
            "--packed-format auto"
        )
    master = masters_of(ternary)
    codes, weight_scale = _ternary_of(master, source.format, layer, ternary.codes)
    assert weight_scale == ternary.weight_scale or not codes.any()
    return master


def _ternary_of(
    master: "Tensor", format: SparseBitConfig, layer: str, expected: "Tensor | None" = None
) -> TernaryWeight:
    """Return the codes and scale of a master. Raises `UserError` unless the codes equal `expected`, by
    default those without the pattern: masking a model trained without a mask would change it."""
    import torch

    from sparse_bitnet.nn.selection import select

    codes, _, scale = select(master.float(), format)[:3]
    if expected is None:
        expected = select(master.float(), format, kept=format.pattern.m).codes
    assert codes is not None
    assert expected is not None
    assert scale is not None
    if not torch.equal(codes, expected):
        raise UserError(
            f"layer {layer}: its codes do not fit the pattern {format.pattern}; import it with "
            "--pattern 8:8"
        )
    return TernaryWeight(codes, scale)


def masters_of(ternary: TernaryWeight) -> "Tensor":
    """Return float32 masters that ternary quantisation turns into exactly these codes and this scale.

    The masters are all zero if all codes are; the scale then does not matter.
    """
    import torch

    codes, weight_scale = ternary
    nonzero = codes != 0
    if not (count := int(nonzero.sum())):
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
