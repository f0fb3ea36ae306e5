# SPDX-License-Identifier: Apache-2.0
"""Ternary checkpoints of other tools as checkpoints of ours, codes and scales unchanged.

The packed form of a GGUF file is made without torch; masters (masters.py) need it.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sparse_bitnet.checkpoint.checkpoint import Checkpoint, warn_of_zeros
from sparse_bitnet.checkpoint.model_folder import POOLING_FILES, copy_files
from sparse_bitnet.checkpoint.open_checkpoint import open_checkpoint
from sparse_bitnet.export.hf_folder import (
    check_new_folder,
    copy_tokenizer,
    plain_config,
    write_generation_config,
)
from sparse_bitnet.export.pack_checkpoint import pack_checkpoint
from sparse_bitnet.layer_config import SparseBitConfig
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
    embeddings: str = "auto",
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
    foreign = open_checkpoint(folder, "foreign")
    format = foreign.format if pattern is None else SparseBitConfig(pattern=pattern)
    for name, (_, in_features) in foreign.layers.items():
        format.pattern.check_divides(in_features, name)
    if packed is None:
        from sparse_bitnet.export.masters import write_masters

        write_masters(foreign, format, out, partial(_write_tokenizer, foreign), on_progress)
    else:
        pack_checkpoint(
            _ToPack(foreign, format),
            out,
            format=packed,
            embeddings=embeddings,
            progress=on_progress,
        )
    return Imported(folder=out, kind=foreign.tool, format=format, layers=len(foreign.layers))


def _write_tokenizer(foreign: Checkpoint, folder: Path) -> None:
    if not foreign.write_tokenizer(folder):
        copy_tokenizer(foreign.folder, folder)
        copy_files(foreign.folder, folder, (POOLING_FILES,))
        write_generation_config(foreign.folder, folder)


class _ToPack(Checkpoint):
    """The checkpoint as ours with masters would be: float32 beside the codes, in the model's order."""

    def __init__(self, foreign: Checkpoint, format: SparseBitConfig) -> None:
        others = {name: foreign.others[name] for name in foreign.stored}
        super().__init__(
            foreign,
            format=format,
            layers=foreign.layers,
            others=others,
            dtypes=dict.fromkeys(others, "F32"),
            has_one_scale=foreign.has_one_scale,
        )
        self.foreign, self.embeddings = foreign, foreign.embeddings
        self.config = plain_config(foreign.config)

    def stored_values(self, name: str, part: slice = slice(None)) -> Any:
        values = self.foreign.stored_values(name, part)
        return values if isinstance(values, np.ndarray) else values.float()

    def ternary(self, layer: str) -> TernaryWeight:
        if self.foreign.has_masters:
            from sparse_bitnet.export.masters import ternary_of

            return ternary_of(self.foreign.master(layer), self.format, layer)
        ternary = self.foreign.ternary(layer)
        warn_of_zeros(ternary, layer, self.foreign)
        return ternary

    def ternary_rows(self, name: str, part: slice) -> TernaryWeight | None:
        return self.foreign.ternary_rows(name, part)

    def write_tokenizer(self, folder: Path) -> bool:
        _write_tokenizer(self.foreign, folder)
        return True
