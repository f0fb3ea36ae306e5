# SPDX-License-Identifier: Apache-2.0
"""Folders of Hugging Face's `bitnet`: bitlinear and autobitlinear, packed, and the published form of
BitNet b1.58 masters, bfloat16 weights that the reader quantises on every forward ("online" mode)."""

import dataclasses
import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sparse_bitnet.checkpoint.checkpoint import Checkpoint, StoredModel, linear_shapes
from sparse_bitnet.checkpoint.config_fields import Fields
from sparse_bitnet.checkpoint.foreign_checkpoint import (
    complete,
    opened,
    scaled,
    stored_floats,
    ternary_weight,
)
from sparse_bitnet.checkpoint.model_folder import LINEAR_NORMS
from sparse_bitnet.checkpoint.weight_files import WeightFiles
from sparse_bitnet.errors import UserError
from sparse_bitnet.packing.ternary import TernaryWeight
from sparse_bitnet.packing.two_bits import unpack_row_planes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def read(found: StoredModel) -> Checkpoint:
    """Open a folder that config.json says to be of `bitnet`, or whose linears have norms of their own.

    Raises `UserError` for settings that have no counterpart here, and for incomplete files.
    """
    files = WeightFiles.in_folder(found.folder)
    prefix = "" if any(name.startswith("model.") for name in files.shapes) else "model."

    def new_name(name: str) -> str:
        # The first published form is a Llama with two norms more; norms in linears have two names.
        for old, new in _RENAMED.items():
            name = name.replace(old, new)
        return name if name.startswith("lm_head") else prefix + name

    return _open_bitnet(found, files.renamed(new_name))


def has_linear_norms(files: WeightFiles | None) -> bool:
    """Whether the layers of a folder of other tools have norms of their own (BitNet-embedding)."""
    return files is not None and any(map(_IS_LINEAR_NORM, files.shapes))


_RENAMED = {
    ".inner_attn_ln.": ".attn_sub_norm.",
    ".ffn_layernorm.": ".ffn_sub_norm.",
    "_proj.rms_norm.": "_proj.norm.",
}
_IS_LINEAR_NORM = re.compile(r".*_proj\.(rms_)?norm\.weight").fullmatch


def _with_linear_norms(found: StoredModel) -> StoredModel:
    """The model with the norms that each of its linears has of its input."""
    values = {"rms_norm_eps": found.config.get("rms_norm_eps")} | found.entry
    epsilon = Fields(values, f"{found.folder}/config.json: ").optional("rms_norm_eps", 1e-6)

    @functools.cache
    def model() -> "PreTrainedModel":
        built = found.model()
        for name, module in built.named_modules():
            if type(module) is nn.Linear and name != "lm_head":
                module.norm = nn.RMSNorm(module.in_features, eps=epsilon, device="meta")
        return built

    return dataclasses.replace(found, config={**found.config, LINEAR_NORMS: epsilon}, model=model)


def _open_bitnet(found: StoredModel, files: WeightFiles) -> Checkpoint:
    entry = found.entry or {"quantization_mode": "online"}
    if entry.get("use_rms_norm") or any(map(_IS_LINEAR_NORM, files.shapes)):
        found = _with_linear_norms(found)
    linears = linear_shapes(found.model())
    online = entry.get("quantization_mode", "offline") == "online"
    auto = entry.get("linear_class", "bitlinear") == "autobitlinear" or online
    if online:
        kept = entry.get("modules_to_not_convert") or ["lm_head"]
        layers = {
            name: shape for name, shape in linears.items() if not _matches(name, kept, found.folder)
        }
    else:
        layers = scaled(linears, files, per_row=False)

    if LINEAR_NORMS in found.config:
        complete(layers, files, "norm.weight")

    def read_ternary(layer: str) -> TernaryWeight:
        codes = _bitnet_codes(files.read(f"{layer}.weight"), layers[layer], layer)
        scale = files.read(f"{layer}.weight_scale").float()
        return ternary_weight(codes, scale if auto else 1 / scale, layer)

    def read_other(name: str, part: slice | None = None) -> Tensor:
        tensor = files.read(name, part)
        layer = name.removesuffix(".bias")
        if auto and not online and name != layer and layer in layers:
            # That class multiplies its whole output, the bias included, by the scale.
            tensor = tensor.float() * files.read(f"{layer}.weight_scale").float()
        return tensor

    return opened(
        found,
        "bitnet masters" if online else "bitnet",
        files,
        complete(layers, files, "weight"),
        of_layer=("weight", "weight_scale"),
        read=read_other,
        master=(lambda layer: stored_floats(files, layer, layers[layer])) if online else None,
        ternary=read_ternary,
    )


def _bitnet_codes(stored: Tensor, shape: tuple[int, int], layer: str) -> Tensor:
    rows, columns = shape
    fits = tuple(stored.shape) == (rows // 4, columns) and rows % 4 == 0
    if stored.dtype == torch.uint8 and fits:
        return unpack_row_planes(stored)
    raise UserError(
        f"layer {layer}: weight is {stored.dtype} {list(stored.shape)}, expected torch.uint8 "
        f"{[rows // 4, columns]}"
    )


def _matches(name: str, kept: Any, where: Path) -> bool:
    """Whether transformers would leave a module alone: a start or an end of its name. Its regexes, which
    can take time without end, are refused."""
    if not isinstance(kept, list) or not all(re.fullmatch(r"[\w.]+", str(key)) for key in kept):
        raise UserError(f"{where}/config.json: modules_to_not_convert is not a list of names")
    return any(f"{name}.".startswith(f"{key}.") or name.endswith(str(key)) for key in kept)
