# SPDX-License-Identifier: Apache-2.0
"""Folders of other tools with ternary weights: Hugging Face's `bitnet`, compressed-tensors, and floats
that hold only 0, +s and -s. MLX's are in mlx_folder.py.

Their tensors must be exactly those of the model that config.json describes.
"""

import re
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from sparse_bitnet.checkpoint.checkpoint import (
    Checkpoint,
    StoredModel,
    check_tensors,
    exported_format,
    finite,
    linear_shapes,
    stored_tensors,
)
from sparse_bitnet.checkpoint.config_fields import Fields, check_experts, check_fields, shown
from sparse_bitnet.checkpoint.declared_rotation import MANIFEST, manifest_keys, read_rotation
from sparse_bitnet.checkpoint.model_folder import EXPORTED_FORMAT, LINEAR_NORMS
from sparse_bitnet.checkpoint.weight_files import WeightFiles
from sparse_bitnet.errors import UserError
from sparse_bitnet.packing.tensor_file import FLOATS
from sparse_bitnet.packing.ternary import TernaryWeight, ternary_of_floats, with_fewest_scales
from sparse_bitnet.packing.two_bits import (
    CODES_PER_WORD,
    W2A8,
    W8A8,
    unpack_row_planes,
    unpack_words,
)

_COMPUTED = ".rotary_emb.inv_freq"
"""Name ending of tensors in old folders that follow from the config."""
_LOOKED_AT = 64
"""Number of rows of a matrix that decide whether it is ternary."""


class ForeignFolder(Checkpoint):
    """A folder of another tool; a subclass for each format reads its codes. `shapes` are those of all
    tensors as the model has them."""

    of_layer: tuple[str, ...] = ("weight",)
    """Names of a layer's own tensors, the codes first."""

    def __init__(self, stored: StoredModel) -> None:
        """Raises `UserError` unless all tensors are those of the model, and for a layer without codes."""
        super().__init__(stored)
        check_experts(stored.config, f"{stored.folder}/config.json")
        self.format = exported_format(stored.config.get(EXPORTED_FORMAT))
        self.files = WeightFiles.in_folder(stored.folder)
        self.shapes = self.files.shapes
        self.prepare()
        model = self.model
        linears = linear_shapes(model)
        self.layers = {n: shape for n, shape in linears.items() if self.has_codes(n, shape)}
        if not self.layers:
            raise UserError(f"{self.folder} has no ternary layer")
        for name, shape in self.layers.items():
            codes = f"{name}.{self.of_layer[0]}"
            if codes not in self.files or 0 in shape:
                raise UserError(
                    f"{self.folder} lacks {codes} of {list(shape)}: the files are incomplete"
                )
        internal = {f"{name}.{end}" for name in self.layers for end in ("weight", *self.of_layer)}
        internal |= model.all_tied_weights_keys.keys()
        for name, sizes in self.shapes.items():
            if name not in internal and not name.endswith(_COMPUTED):
                is_plain = sizes == self.files.shapes[name]
                self.others[name] = sizes
                self.dtypes[name] = self.files.dtypes[name] if is_plain else "F32"
        wanted = {n: tensor for n, tensor in stored_tensors(model).items() if n not in internal}
        check_tensors(wanted, self.others, self.dtypes, self.folder)
        if (declared := self.declared_rotation()) is not None:
            keys, where, prefix = declared
            columns = {f"{prefix}{n}.weight": shape[1] for n, shape in self.layers.items()}
            tables = [prefix + name for name in self.embeddings]
            self.rotation = read_rotation(keys, where, layers=columns, tables=tables)

    def prepare(self) -> None:
        """Read the format's own settings. Raises `UserError` for settings without a counterpart."""

    def declared_rotation(self) -> tuple[dict[str, Any], str, str] | None:
        """Return the keys that declare rotated weights, the beginning of messages about them, and what
        precedes the tensors' names in them; None without a declaration."""
        path = self.folder / MANIFEST
        return (manifest_keys(self.folder), f"{path}: ", "") if path.exists() else None

    def has_codes(self, name: str, shape: tuple[int, int]) -> bool:
        """Whether a linear layer of this shape has codes. Raises `UserError` for invalid scales."""
        raise NotImplementedError

    def has_scale(self, name: str, rows: int, runs: int = 1) -> bool:
        """Whether a layer has a scale beside it: one, one for each of `rows`, or one for each of several
        `runs` of every row. Raises `UserError` for scales of another shape, and for values that are not
        positive numbers."""
        if (scale := f"{name}.weight_scale") not in self.files:
            return False
        shape, dtype = self.files.shapes[scale], self.files.dtypes[scale]
        fits = shape == (rows, runs) or (runs == 1 and (prod(shape) == 1 or shape == (rows,)))
        if not fits or dtype not in FLOATS:
            wanted = f"[{rows}, {runs}] floats" if runs > 1 else f"{rows} floats or one"
            raise UserError(
                f"layer {name}: weight_scale is {dtype} {list(shape)}, expected {wanted}"
            )
        low, high = self.scale_of(name).aminmax()
        if not 0 < low <= high < float("inf"):
            raise UserError(f"layer {name}: its weight scale is not a positive number")
        self.has_one_scale &= bool(low == high)
        return True

    def stored_values(self, name: str, part: slice = slice(None)) -> Tensor:
        return self.files.read(name, part)

    def master(self, layer: str) -> Tensor:
        weight = self.codes_of(layer, None, self.layers[layer])
        return finite(weight, f"{layer}.weight", self.folder)

    def codes_of(self, layer: str, dtype: torch.dtype | None, shape: tuple[float, ...]) -> Tensor:
        """Return the stored codes of a layer. Raises `UserError` for another shape or another dtype; None
        stands for any float dtype."""
        stored = self.files.read(f"{layer}.{self.of_layer[0]}")
        is_kind = stored.is_floating_point() if dtype is None else stored.dtype == dtype
        if is_kind and tuple(stored.shape) == shape:
            return stored
        raise UserError(
            f"layer {layer}: {self.of_layer[0]} is {stored.dtype} {list(stored.shape)}, expected "
            f"{dtype or 'floats'} {list(shape)}"
        )

    def scale_of(self, layer: str) -> Tensor:
        """Return the stored scale of a layer, float32."""
        return self.files.read(f"{layer}.weight_scale").float()


_RENAMED = {
    ".inner_attn_ln.": ".attn_sub_norm.",
    ".ffn_layernorm.": ".ffn_sub_norm.",
    "_proj.rms_norm.": "_proj.norm.",
}
"""The first published form is a Llama with two norms more; norms in linears have two names."""
_IS_LINEAR_NORM = re.compile(r".*_proj\.(rms_)?norm\.weight").fullmatch


def has_linear_norms(files: WeightFiles | None) -> bool:
    """Whether a folder has norms of the inputs of linear layers (BitNet-embedding)."""
    return files is not None and any(map(_IS_LINEAR_NORM, files.shapes))


class BitnetFolder(ForeignFolder):
    """`bitnet` of transformers: bitlinear and autobitlinear, packed, and the published form of BitNet
    b1.58 masters, bfloat16 weights that the reader quantises on every forward ("online" mode).

    config.json says so, or linears have norms of their own.
    """

    of_layer = ("weight", "weight_scale")
    has_one_scale = True

    def prepare(self) -> None:
        prefix = "" if any(name.startswith("model.") for name in self.shapes) else "model."

        def new_name(name: str) -> str:
            for old, new in _RENAMED.items():
                name = name.replace(old, new)
            return name if name.startswith("lm_head") else prefix + name

        self.files = self.files.renamed(new_name)
        self.shapes = self.files.shapes
        entry = self.entry or {"quantization_mode": "online"}
        if entry.get("use_rms_norm") or has_linear_norms(self.files):
            self._add_linear_norms()
        mode = entry.get("quantization_mode", "offline")
        kind = entry.get("linear_class", "bitlinear")
        if mode not in ("offline", "online") or kind not in ("bitlinear", "autobitlinear"):
            raise UserError(f"{self.folder}/config.json: bitnet has no {shown(mode)} {shown(kind)}")
        self.has_masters = mode == "online"
        self.tool = "bitnet masters" if self.has_masters else "bitnet"
        self.stores_multiplier = kind == "autobitlinear"
        kept = entry.get("modules_to_not_convert") or ["lm_head"]
        # transformers' regexes, which can take time without end, are refused.
        self.kept = list(map(str, kept)) if isinstance(kept, list) else [""]
        if not all(re.fullmatch(r"[\w.]+", name) for name in self.kept):
            raise UserError(
                f"{self.folder}/config.json: modules_to_not_convert is not a list of names"
            )

    def has_codes(self, name: str, shape: tuple[int, int]) -> bool:
        if not self.has_masters:
            return self.has_scale(name, 1)
        # transformers leaves a module unconverted if `kept` has a start or an end of its name.
        return not any(f"{name}.".startswith(f"{key}.") or name.endswith(key) for key in self.kept)

    def _add_linear_norms(self) -> None:
        """Give each linear layer of the model, except the head, a norm of its input."""
        # transformers, which makes them for `use_rms_norm`, reads the entry alone.
        values = self.entry if self.entry.get("use_rms_norm") else self.config | self.entry
        epsilon = Fields(values, f"{self.folder}/config.json: ").optional("rms_norm_eps", 1e-6)
        for name, module in self.model.named_modules():
            if type(module) is nn.Linear and name != "lm_head":
                module.norm = nn.RMSNorm(module.in_features, eps=epsilon, device="meta")
        self.config = {**self.config, LINEAR_NORMS: epsilon}

    def ternary(self, layer: str) -> TernaryWeight:
        rows, columns = self.layers[layer]
        codes = unpack_row_planes(self.codes_of(layer, torch.uint8, (rows / 4, columns)))
        scale = self.scale_of(layer)
        scale = scale if self.stores_multiplier else 1 / scale
        return with_fewest_scales(codes, scale.view(-1, 1), layer)

    def stored_values(self, name: str, part: slice = slice(None)) -> Tensor:
        tensor, layer = super().stored_values(name, part), name.removesuffix(".bias")
        if layer == name or layer not in self.layers or self.has_masters:
            return tensor
        # autobitlinear multiplies its whole output, the bias included, by the scale.
        return tensor.float() * self.scale_of(layer) if self.stores_multiplier else tensor


_READ = (
    *("quant_method", "format", "quantization_status", "ignore", "config_groups"),
    *("global_compression_ratio", "version"),
)
_PARTS = ("weights", "input_activations")
_READ_OF_GROUP = (
    *("targets", "format", "weights.strategy", "weights.group_size"),
    # Fields that do not affect what is stored.
    *(f"{part}.{key}" for part in _PARTS for key in ("observer", "observer_kwargs")),
    *(f"{part}.{key}" for part in _PARTS for key in ("scale_dtype", "zp_dtype")),
)
_BY_DEFAULT = {
    **{f"{part}.type": "int" for part in _PARTS},
    **{f"{part}.symmetric": True for part in _PARTS},
    "weights.dynamic": False,
}
_ONLY = {
    **_BY_DEFAULT,
    **{"input_activations.num_bits": 8, "input_activations.strategy": "token"},
    "input_activations.dynamic": True,
}
"""Fields of a group that may only have this value, those in `_BY_DEFAULT` also if they are absent."""


class CompressedTensors(ForeignFolder):
    """A compressed-tensors folder: ternary codes in two- or eight-bit weights, with scales of rows or of
    groups of `group` weights of a row."""

    has_one_scale = True

    def prepare(self) -> None:
        self.group = _group_of(self.entry, f"{self.folder}/config.json")
        self.tool = f"compressed-tensors {self.entry['format']}"
        self.is_packed = self.entry["format"] == W2A8
        codes = "weight_packed" if self.is_packed else "weight"
        self.of_layer = (codes, "weight_scale", "weight_shape")

    def has_codes(self, name: str, shape: tuple[int, int]) -> bool:
        if self.group and shape[1] % self.group:
            raise UserError(f"layer {name}: group_size {self.group} does not divide {shape[1]}")
        return self.has_scale(name, shape[0], shape[1] // self.group if self.group else 1)

    def ternary(self, layer: str) -> TernaryWeight:
        rows, columns = self.layers[layer]
        scale, shape = self.scale_of(layer), f"{layer}.weight_shape"
        if shape in self.files and self.files.read(shape).tolist() != [rows, columns]:
            raise UserError(f"{self.folder}: layer {layer}: weight_shape is not {[rows, columns]}")
        if self.is_packed:
            words = self.codes_of(layer, torch.int32, (rows, -(-columns // CODES_PER_WORD)))
            codes = unpack_words(words, columns)
        else:
            codes = self.codes_of(layer, torch.int8, (rows, columns))
        return with_fewest_scales(codes, scale.view(-1, columns // (self.group or columns)), layer)


def _group_of(entry: dict[str, Any], where: str) -> int:
    """Return how many weights of a row share a scale, 0 for all of them. Raises `UserError` for settings
    that have no counterpart here."""
    check_fields(entry, _READ, f"{where}: quantization_config")
    groups, formats = entry.get("config_groups"), {W2A8: 2, W8A8: 8}
    group = next(iter(groups.values())) if isinstance(groups, dict) and len(groups) == 1 else None
    bits = formats.get(str(entry.get("format")))
    if bits is None or not isinstance(group, dict):
        raise UserError(
            f"{where}: compressed-tensors needs one group, of format {' or '.join(formats)}, not "
            f"{entry.get('format')!r} with {shown(groups)}"
        )
    only = {**_ONLY, "weights.num_bits": bits}
    # Fields without a default have to be there.
    given = dict.fromkeys(key for key in only if key not in _BY_DEFAULT)
    for key, value in group.items():
        is_part = key in _PARTS and isinstance(value, dict)
        given |= {f"{key}.{n}": each for n, each in value.items()} if is_part else {key: value}
    check_fields(given, _READ_OF_GROUP, f"{where}: quantization_config", only)
    strategy, size = given.get("weights.strategy"), given.get("weights.group_size")
    if strategy == "group" and type(size) is int and size > 0:
        return size
    if strategy not in ("channel", "tensor") or size is not None:
        raise UserError(
            f"{where}: weights have strategy {strategy!r} and group_size {size!r}; channel, tensor, and "
            "group with a size are supported"
        )
    return 0


_MLX_ENTRY = "quantization"
"""Key of config.json under which MLX describes its quantisation."""


def ternary_reader(config: dict[str, Any], files: WeightFiles | None) -> str | None:
    """Return the class that opens a folder without quantization_config, or None if it is not ternary.

    For floats, the first rows of the first block matrix decide. MLX's entry is removed from `config`.
    """
    entry = config.get(_MLX_ENTRY)
    if isinstance(entry, dict):
        if entry.get("bits") != 2:
            return None
        # Layers with settings of their own have a table under their name.
        for table in (entry, *(value for value in entry.values() if isinstance(value, dict))):
            fields = {key: v for key, v in table.items() if not isinstance(v, dict)}
            read, only = ("bits", "group_size"), {"mode": "affine"}
            check_fields(fields, read, f"config.json: {_MLX_ENTRY}", only)
        del config[_MLX_ENTRY]
        return "mlx_folder.MlxFolder"
    if files is None:
        return None
    first = min((name for name in files.shapes if name.endswith("proj.weight")), default="")
    return "foreign.TernaryFloats" if _looks_ternary(files, first) else None


def _looks_ternary(files: WeightFiles, name: str) -> bool:
    shape = files.shapes.get(name, ())
    if files.dtypes.get(name) not in ("F32", "F16", "BF16") or len(shape) != 2 or 0 in shape:
        return False
    first = files.read(name, slice(0, _LOOKED_AT))
    return bool(first.isfinite().all()) and ternary_of_floats(first, name) is not None


class TernaryFloats(ForeignFolder):
    """A folder of floats in which each run of a row holds only 0, +s and -s (TriLM, BitCPM, dequantised
    Bonsai). Layers that are not exactly ternary are refused."""

    tool = "ternary floats"

    def has_codes(self, name: str, shape: tuple[int, int]) -> bool:
        return name != "lm_head" and _looks_ternary(self.files, f"{name}.weight")

    def ternary(self, layer: str) -> TernaryWeight:
        if (ternary := ternary_of_floats(self.master(layer), layer)) is None:
            raise UserError(
                f"layer {layer} of {self.folder} is not ternary, though its first rows are"
            )
        return ternary

    def ternary_rows(self, name: str, part: slice) -> TernaryWeight | None:
        return ternary_of_floats(self.files.read(name, part), name)
