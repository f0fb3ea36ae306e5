# SPDX-License-Identifier: Apache-2.0
"""Ternary checkpoints of other tools, opened: which layers are ternary, and their codes and scales.

Read are Hugging Face `bitnet` (bitlinear and autobitlinear, packed), compressed-tensors with two- or
eight-bit weights that hold ternary codes, and the published form of BitNet b1.58 masters: bfloat16
weights that the reader quantises to ternary on every forward (`bitnet` in "online" mode). What has no
such entry but is ternary: ternary_folders.py.
"""

import dataclasses
import functools
import re
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sparse_bitnet.checkpoint.checkpoint import (
    Checkpoint,
    StoredModel,
    linear_shapes,
    stored_tensors,
)
from sparse_bitnet.checkpoint.config_fields import Fields
from sparse_bitnet.checkpoint.model_folder import EXPORTED_FORMAT, LINEAR_NORMS
from sparse_bitnet.checkpoint.weight_files import WeightFiles
from sparse_bitnet.errors import UserError
from sparse_bitnet.layer_config import SparseBitConfig
from sparse_bitnet.packing.ternary import TernaryWeight
from sparse_bitnet.packing.two_bits import (
    CODES_PER_WORD,
    W2A8,
    W8A8,
    unpack_row_planes,
    unpack_words,
)
from sparse_bitnet.pattern import NMPattern

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def read(found: StoredModel) -> Checkpoint:
    """Open a folder of another tool, recognised by its config.json.

    Raises `UserError` for settings that have no counterpart here, and for incomplete files.
    """
    if found.entry.get("quant_method") == "compressed-tensors":
        return _open_compressed(found)
    files = WeightFiles.in_folder(found.folder)
    prefix = "" if any(name.startswith("model.") for name in files.shapes) else "model."

    def new_name(name: str) -> str:
        # The first published form is a Llama with two norms more; norms in linears have two names.
        for old, new in _RENAMED.items():
            name = name.replace(old, new)
        return name if name.startswith("lm_head") else prefix + name

    return _open_bitnet(found, files.renamed(new_name))


def has_linear_norms(folder: Path) -> bool:
    """Whether the layers of a folder of other tools have norms of their own (BitNet-embedding)."""
    if not any(folder.glob("model*.safetensors")):
        return False
    return any(_IS_LINEAR_NORM(name) for name in WeightFiles.in_folder(folder).shapes)


_FLOATS = ("F64", "F32", "F16", "BF16")
_COMPUTED = ".rotary_emb.inv_freq"
"""End of the names of what old folders hold that follows from the config."""

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
        layers = _scaled(linears, files, per_row=False)

    if LINEAR_NORMS in found.config:
        complete(layers, files, "norm.weight")

    def read_ternary(layer: str) -> TernaryWeight:
        codes = _bitnet_codes(files.read(f"{layer}.weight"), layers[layer], layer)
        scale = files.read(f"{layer}.weight_scale").float()
        return _checked(codes, scale if auto else 1 / scale, layer)

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


def _open_compressed(found: StoredModel) -> Checkpoint:
    folder, entry = found.folder, found.entry
    packed = _is_packed(folder, entry)
    files = WeightFiles.in_folder(folder)
    weight = "weight_packed" if packed else "weight"
    layers = _scaled(linear_shapes(found.model()), files, per_row=True)

    def read_ternary(layer: str) -> TernaryWeight:
        stored = files.read(f"{layer}.{weight}")
        rows, columns = layers[layer]
        words = -(-columns // CODES_PER_WORD)
        expected = (torch.int32, (rows, words)) if packed else (torch.int8, (rows, columns))
        if (stored.dtype, tuple(stored.shape)) != expected:
            raise UserError(
                f"layer {layer}: {weight} is {stored.dtype} {list(stored.shape)}, expected "
                f"{expected[0]} {list(expected[1])}"
            )
        codes = unpack_words(stored, columns) if packed else stored
        return _checked(codes, files.read(f"{layer}.weight_scale").float(), layer)

    return opened(
        found,
        f"compressed-tensors {entry['format']}",
        files,
        complete(layers, files, weight),
        of_layer=(weight, "weight_scale", "weight_shape"),
        read=files.read,
        master=None,
        ternary=read_ternary,
        has_one_scale=all(
            len(files.read(f"{layer}.weight_scale").unique()) == 1 for layer in layers
        ),
    )


def _scaled(
    linears: dict[str, tuple[int, int]], files: WeightFiles, *, per_row: bool
) -> dict[str, tuple[int, int]]:
    """Those with a scale in the files. Raises `UserError` for more scales than one, or than one a row."""
    found = {name: shape for name, shape in linears.items() if f"{name}.weight_scale" in files}
    for name, (rows, _) in found.items():
        shape, dtype = (each[f"{name}.weight_scale"] for each in (files.shapes, files.dtypes))
        fits = prod(shape) == 1 or (per_row and shape in ((rows,), (rows, 1)))
        if not fits or dtype not in _FLOATS:
            raise UserError(
                f"layer {name}: weight_scale is {dtype} {list(shape)}, expected a float for "
                f"{'a row' if per_row else 'the matrix'}"
            )
    return found


def _is_packed(folder: Path, entry: dict[str, Any]) -> bool:
    where = f"{folder}/config.json"
    if entry.get("sparsity_config"):
        raise UserError(f"{where}: a sparsity_config is not covered; decompress the model first")
    groups = list(_table(entry.get("config_groups")).values())
    formats = {W2A8: 2, W8A8: 8}
    bits = formats.get(str(entry.get("format")))
    if bits is None or len(groups) != 1 or not isinstance(groups[0], dict):
        raise UserError(
            f"{where}: compressed-tensors with one group of format {' or '.join(formats)} is "
            f"importable, not {entry.get('format')!r} with {len(groups)} groups"
        )
    weights = _table(groups[0].get("weights"))
    found = (weights.get("num_bits"), weights.get("symmetric"), weights.get("strategy"))
    if found[:2] != (bits, True) or found[2] not in ("channel", "tensor"):
        raise UserError(
            f"{where}: weights with num_bits, symmetric, strategy = {found} are not importable; "
            f"({bits}, True, channel or tensor) are"
        )
    if _table(groups[0].get("input_activations")).get("num_bits") != 8:
        raise UserError(f"{where}: the layers have no 8-bit activations, as ternary ones here have")
    return entry["format"] == W2A8


def _table(value: Any) -> dict[str, Any]:
    """What a config has where it should have a table; an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def _bitnet_codes(stored: Tensor, shape: tuple[int, int], layer: str) -> Tensor:
    rows, columns = shape
    fits = tuple(stored.shape) == (rows // 4, columns) and rows % 4 == 0
    if stored.dtype == torch.uint8 and fits:
        return unpack_row_planes(stored)
    raise UserError(
        f"layer {layer}: weight is {stored.dtype} {list(stored.shape)}, expected torch.uint8 "
        f"{[rows // 4, columns]}"
    )


def _checked(codes: Tensor, scale: Tensor, layer: str) -> TernaryWeight:
    low, high = codes.aminmax()
    if low < -1 or high > 1:
        raise UserError(f"layer {layer} is not ternary: it has codes from {low} to {high}")
    smallest, largest = scale.aminmax()
    if not (0 < smallest <= largest < float("inf")):
        raise UserError(f"layer {layer}: its weight scale is not a positive number")
    return TernaryWeight(codes, largest if smallest == largest else scale.view(-1, 1))


def stored_floats(files: WeightFiles, layer: str, shape: tuple[int, int]) -> Tensor:
    """A layer's weight. Raises `UserError`, naming it, unless it holds floats of that shape."""
    stored = files.read(f"{layer}.weight")
    if tuple(stored.shape) != shape or not stored.is_floating_point():
        raise UserError(
            f"layer {layer}: weight is {stored.dtype} {list(stored.shape)}, expected floats "
            f"{list(shape)}"
        )
    return stored


def complete(
    layers: dict[str, tuple[int, int]], files: WeightFiles, weight: str
) -> dict[str, tuple[int, int]]:
    """The layers. Raises `UserError` where there are none, or one has no tensor of the name `weight`."""
    if not layers:
        raise UserError(f"{files.folder} has no ternary layer")
    for name in layers:
        if f"{name}.{weight}" not in files:
            raise UserError(f"{files.folder} lacks {name}.{weight}: the files are incomplete")
    return layers


def opened(
    found: StoredModel,
    tool: str,
    files: WeightFiles,
    layers: dict[str, tuple[int, int]],
    of_layer: tuple[str, ...],
    shapes: dict[str, tuple[int, ...]] | None = None,
    **readers: Any,
) -> Checkpoint:
    """A folder's checkpoint.

    Args:
        of_layer: names of a layer's tensors that are none of the others.
        shapes: of all tensors, where they are not those in the files.

    Raises `UserError` unless the others are those of the model that config.json describes.
    """
    shapes = files.shapes if shapes is None else shapes
    internal = {f"{layer}.{name}" for layer in layers for name in of_layer}
    model = found.model()
    internal |= model.all_tied_weights_keys.keys()
    others = [name for name in shapes if name not in internal and not name.endswith(_COMPUTED)]
    wanted = {name: tuple(tensor.shape) for name, tensor in stored_tensors(model).items()}
    for name in internal | {f"{layer}.weight" for layer in layers}:
        wanted.pop(name, None)
    for name in sorted(wanted.keys() ^ set(others)):
        what = "lacks" if name in wanted else "has, and its config.json does not describe,"
        raise UserError(
            f"{found.folder} {what} {name}: the files are incomplete or of another model"
        )
    for name in others:
        is_plain = shapes[name] == files.shapes[name]
        if shapes[name] != wanted[name] or (is_plain and files.dtypes[name] not in _FLOATS):
            raise UserError(
                f"{found.folder}: {name} is {files.dtypes[name]} {list(shapes[name])}, its config.json "
                f"asks floats {list(wanted[name])}"
            )
    return Checkpoint(
        **vars(found),
        tool=tool,
        format=_format(found.config),
        layers=layers,
        others={name: shapes[name] for name in others},
        dtypes={name: files.dtypes[name] for name in others},
        **readers,
    )


def _format(config: dict[str, Any]) -> SparseBitConfig:
    """Ternary, and dense unless it is an export of ours, which remembers its pattern."""
    remembered = config.get(EXPORTED_FORMAT)
    pattern = NMPattern(8, 8)
    if isinstance(remembered, str):
        # Ablations change how masters give codes; the masters of an import are plain.
        pattern = SparseBitConfig.parse(remembered).pattern
    return SparseBitConfig(pattern=pattern)


def _matches(name: str, kept: Any, where: Path) -> bool:
    """Whether transformers would leave a module alone: a start or an end of its name. Its regexes, which
    can take time without end, are refused."""
    if not isinstance(kept, list) or not all(re.fullmatch(r"[\w.]+", str(key)) for key in kept):
        raise UserError(f"{where}/config.json: modules_to_not_convert is not a list of names")
    return any(f"{name}.".startswith(f"{key}.") or name.endswith(str(key)) for key in kept)
