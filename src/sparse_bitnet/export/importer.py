# SPDX-License-Identifier: Apache-2.0
"""Ternary checkpoints of other tools as checkpoints of ours, codes and scales unchanged.

The packed form of a GGUF file is made without torch; masters (masters.py) need it.
"""

import dataclasses
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
            _to_pack(foreign, format),
            out,
            format=packed,
            embeddings=embeddings,
            progress=on_progress,
        )
    return Imported(folder=out, kind=foreign.tool, format=format, layers=len(foreign.layers))


def _write_tokenizer(foreign: Checkpoint, folder: Path) -> None:
    if foreign.write_tokenizer is not None:
        foreign.write_tokenizer(folder)
    else:
        copy_tokenizer(foreign.folder, folder)
        copy_files(foreign.folder, folder, (POOLING_FILES,))
        write_generation_config(foreign.folder, folder)


def _to_pack(foreign: Checkpoint, format: SparseBitConfig) -> Checkpoint:
    """The checkpoint as ours with masters would be: float32 beside the codes, in the model's order."""

    def ternary(layer: str) -> TernaryWeight:
        if foreign.master is not None:
            from sparse_bitnet.export.masters import ternary_of

            return ternary_of(foreign.master(layer), format, layer)
        found = foreign.ternary(layer)
        warn_of_zeros(found, layer, foreign)
        return found

    def read(*arguments: Any) -> Any:
        values = foreign.read(*arguments)
        return values if isinstance(values, np.ndarray) else values.float()

    others = {name: foreign.others[name] for name in foreign.stored}
    return dataclasses.replace(
        foreign,
        config=plain_config(foreign.config),
        format=format,
        others=others,
        dtypes=dict.fromkeys(others, "F32"),
        read=read,
        ternary=ternary,
        write_tokenizer=partial(_write_tokenizer, foreign),
    )
