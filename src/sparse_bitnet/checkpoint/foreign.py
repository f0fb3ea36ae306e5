# SPDX-License-Identifier: Apache-2.0
"""Folders of other tools with ternary weights: Hugging Face's `bitnet`, compressed-tensors, MLX's two
bits, and floats that hold but 0 and +s and -s.

Their tensors must be those of the model that config.json describes, no more and no less.
"""

import functools
import re
from math import prod
from typing import TYPE_CHECKING, Any

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
from sparse_bitnet.checkpoint.config_fields import Fields, check_fields
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

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_COMPUTED = ".rotary_emb.inv_freq"
"""Name ending of tensors in old folders that follow from the config."""

_LOOKED_AT = 64
"""Number of rows of a matrix that decide whether it is ternary."""


class ForeignFolder(Checkpoint):
    """A folder of another tool; a subclass for each format reads its codes."""

    def __init__(
        self,
        stored: StoredModel,
        files: WeightFiles,
        layers: dict[str, tuple[int, int]],
        tool: str,
        *,
        of_layer: tuple[str, ...] = ("weight",),
        shapes: dict[str, tuple[int, ...]] | None = None,
        has_masters: bool = False,
        has_one_scale: bool = False,
    ) -> None:
        """Check the tensors beside the codes.

        Args:
            stored: the folder.
            files: its tensors.
            layers: those with codes.
            tool: the name of the format.
            of_layer: names of a layer's own tensors, the codes first.
            shapes: of all tensors, where they are not those in the files.
            has_masters, has_one_scale: see `Checkpoint`.

        Raises `UserError` unless all tensors are those of the model, and for a layer without codes.
        """
        self.files, self.codes_name = files, of_layer[0]
        if not layers:
            raise UserError(f"{files.folder} has no ternary layer")
        for name, shape in layers.items():
            if 0 in shape:
                raise UserError(f"{files.folder}: layer {name} is empty, {list(shape)}")
            if f"{name}.{self.codes_name}" not in files:
                raise UserError(
                    f"{files.folder} lacks {name}.{self.codes_name}: the files are incomplete"
                )
        model = stored.model()
        internal = {f"{layer}.{name}" for layer in layers for name in ("weight", *of_layer)}
        internal |= model.all_tied_weights_keys.keys()
        shapes, dtypes = files.shapes if shapes is None else shapes, {}
        for name in shapes:
            if name not in internal and not name.endswith(_COMPUTED):
                is_plain = shapes[name] == files.shapes[name]
                dtypes[name] = files.dtypes[name] if is_plain else "F32"
        shapes = {name: shapes[name] for name in dtypes}
        wanted = {n: tensor for n, tensor in stored_tensors(model).items() if n not in internal}
        check_tensors(wanted, shapes, dtypes, stored.folder)
        super().__init__(
            stored,
            format=exported_format(stored.config.get(EXPORTED_FORMAT)),
            layers=layers,
            others=shapes,
            dtypes=dtypes,
            tool=tool,
            has_masters=has_masters,
            has_one_scale=has_one_scale,
        )

    def stored_values(self, name: str, part: slice = slice(None)) -> Tensor:
        return self.files.read(name, part)

    def master(self, layer: str) -> Tensor:
        self.codes_of(layer, None, self.layers[layer])
        return finite(self.files.read(f"{layer}.weight"), f"{layer}.weight", self.folder)

    def codes_of(self, layer: str, dtype: torch.dtype | None, shape: tuple[int, int]) -> Tensor:
        """Return the stored codes of a layer. Raises `UserError` for another shape or another dtype; None
        stands for any float dtype."""
        stored = self.files.read(f"{layer}.{self.codes_name}")
        is_kind = stored.is_floating_point() if dtype is None else stored.dtype == dtype
        if is_kind and tuple(stored.shape) == shape:
            return stored
        raise UserError(
            f"layer {layer}: {self.codes_name} is {stored.dtype} {list(stored.shape)}, expected "
            f"{dtype or 'floats'} {list(shape)}"
        )

    def scale_of(self, layer: str) -> Tensor:
        """Return the stored scale of a layer, float32."""
        return self.files.read(f"{layer}.weight_scale").float()


def _scaled(
    linears: dict[str, tuple[int, int]], files: WeightFiles, *, per_row: bool
) -> dict[str, tuple[int, int]]:
    """Return the layers with a scale in the files. Raises `UserError` for scales of other shapes."""
    layers = {name: shape for name, shape in linears.items() if f"{name}.weight_scale" in files}
    for name, (rows, _) in layers.items():
        shape, dtype = (each[f"{name}.weight_scale"] for each in (files.shapes, files.dtypes))
        fits = prod(shape) == 1 or (per_row and shape in ((rows,), (rows, 1)))
        if not fits or dtype not in FLOATS:
            raise UserError(
                f"layer {name}: weight_scale is {dtype} {list(shape)}, expected a float for "
                f"{'a row' if per_row else 'the matrix'}"
            )
    return layers


def _ternary_weight(codes: Tensor, scale: Tensor, layer: str) -> TernaryWeight:
    """Return int8 codes [rows, columns] with one scale, or with one a row. Raises `UserError` for codes
    other than -1, 0 and 1, and for scales that are not positive numbers."""
    low, high = codes.aminmax()
    if low < -1 or high > 1:
        raise UserError(f"layer {layer} is not ternary: it has codes from {low} to {high}")
    smallest, largest = scale.aminmax()
    if not (0 < smallest <= largest < float("inf")):
        raise UserError(f"layer {layer}: its weight scale is not a positive number")
    return TernaryWeight(codes, largest if smallest == largest else scale.view(-1, 1))


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

    def __init__(self, stored: StoredModel) -> None:
        files = WeightFiles.in_folder(stored.folder)
        prefix = "" if any(name.startswith("model.") for name in files.shapes) else "model."

        def new_name(name: str) -> str:
            for old, new in _RENAMED.items():
                name = name.replace(old, new)
            return name if name.startswith("lm_head") else prefix + name

        files = files.renamed(new_name)
        entry = stored.entry or {"quantization_mode": "online"}
        if entry.get("use_rms_norm") or has_linear_norms(files):
            _add_linear_norms(stored)
        linears = linear_shapes(stored.model())
        online = entry.get("quantization_mode", "offline") == "online"
        self.stores_multiplier = entry.get("linear_class", "bitlinear") == "autobitlinear"
        if online:
            kept = entry.get("modules_to_not_convert") or ["lm_head"]
            # transformers' regexes, which can take time without end, are refused.
            if not isinstance(kept, list) or not all(re.fullmatch(r"[\w.]+", str(k)) for k in kept):
                raise UserError(
                    f"{stored.folder}/config.json: modules_to_not_convert is not a list of names"
                )
            layers = {name: shape for name, shape in linears.items() if not _is_kept(name, kept)}
        else:
            layers = _scaled(linears, files, per_row=False)
        super().__init__(
            stored,
            files,
            layers,
            "bitnet masters" if online else "bitnet",
            of_layer=("weight", "weight_scale"),
            has_masters=online,
            has_one_scale=True,
        )

    def ternary(self, layer: str) -> TernaryWeight:
        rows, columns = self.layers[layer]
        if rows % 4:
            raise UserError(f"layer {layer}: {rows} rows are not a multiple of 4")
        codes = unpack_row_planes(self.codes_of(layer, torch.uint8, (rows // 4, columns)))
        scale = self.scale_of(layer)
        return _ternary_weight(codes, scale if self.stores_multiplier else 1 / scale, layer)

    def stored_values(self, name: str, part: slice = slice(None)) -> Tensor:
        tensor, layer = super().stored_values(name, part), name.removesuffix(".bias")
        if (
            self.stores_multiplier
            and not self.has_masters
            and layer != name
            and layer in self.layers
        ):
            # That class multiplies its whole output, the bias included, by the scale.
            return tensor.float() * self.scale_of(layer)
        return tensor


def _is_kept(name: str, kept: list[Any]) -> bool:
    """Whether transformers leaves a module unconverted: `kept` has a start or an end of its name."""
    return any(f"{name}.".startswith(f"{key}.") or name.endswith(str(key)) for key in kept)


def _add_linear_norms(stored: StoredModel) -> None:
    """Give each linear layer of the model, except the head, a norm of its input."""
    values = {"rms_norm_eps": stored.config.get("rms_norm_eps")} | stored.entry
    epsilon = Fields(values, f"{stored.folder}/config.json: ").optional("rms_norm_eps", 1e-6)
    plain = stored.model

    @functools.cache
    def model() -> "PreTrainedModel":
        built = plain()
        for name, module in built.named_modules():
            if type(module) is nn.Linear and name != "lm_head":
                module.norm = nn.RMSNorm(module.in_features, eps=epsilon, device="meta")
        return built

    stored.model, stored.config = model, {**stored.config, LINEAR_NORMS: epsilon}


_READ = (
    *("quant_method", "format", "quantization_status", "ignore", "config_groups"),
    *("global_compression_ratio", "version"),
)
_READ_OF_GROUP = ("targets", "format", "weights", "input_activations")
_SETTINGS = {"type": "int", "symmetric": True, "dynamic": False}
_TOKENS_OF_8_BITS = {"num_bits": 8, "strategy": "token", "dynamic": True}
_OF_TRAINING = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
"""Fields that do not affect what is stored."""


class CompressedTensors(ForeignFolder):
    """A compressed-tensors folder: ternary codes in two- or eight-bit weights, with scales of rows."""

    def __init__(self, stored: StoredModel) -> None:
        """Raises `UserError` also for settings that have no counterpart here."""
        _check_settings(stored.entry, f"{stored.folder}/config.json")
        self.is_packed = stored.entry["format"] == W2A8
        files = WeightFiles.in_folder(stored.folder)
        layers = _scaled(linear_shapes(stored.model()), files, per_row=True)
        scales = (files.read(f"{layer}.weight_scale") for layer in layers)
        codes_name = "weight_packed" if self.is_packed else "weight"
        super().__init__(
            stored,
            files,
            layers,
            f"compressed-tensors {stored.entry['format']}",
            of_layer=(codes_name, "weight_scale", "weight_shape"),
            has_one_scale=all(len(scale.unique()) == 1 for scale in scales),
        )

    def ternary(self, layer: str) -> TernaryWeight:
        rows, columns = self.layers[layer]
        if self.is_packed:
            words = self.codes_of(layer, torch.int32, (rows, -(-columns // CODES_PER_WORD)))
            codes = unpack_words(words, columns)
        else:
            codes = self.codes_of(layer, torch.int8, (rows, columns))
        return _ternary_weight(codes, self.scale_of(layer), layer)


def _check_settings(entry: dict[str, Any], where: str) -> None:
    check_fields(entry, _READ, f"{where}: quantization_config")
    groups = list(_table(entry.get("config_groups")).values())
    formats = {W2A8: 2, W8A8: 8}
    bits = formats.get(str(entry.get("format")))
    if bits is None or len(groups) != 1 or not isinstance(groups[0], dict):
        raise UserError(
            f"{where}: compressed-tensors with one group of format {' or '.join(formats)} is "
            f"importable, not {entry.get('format')!r} with {len(groups)} groups"
        )
    check_fields(groups[0], _READ_OF_GROUP, f"{where}: quantization_config")
    for part, own in (("weights", {"num_bits": bits}), ("input_activations", _TOKENS_OF_8_BITS)):
        given = {"num_bits": None, **_SETTINGS, "strategy": None, **_table(groups[0].get(part))}
        read = (*_OF_TRAINING, *(("strategy",) if part == "weights" else ()))
        check_fields(given, read, f"{where}: {part}", {**_SETTINGS, **own})
        if part == "weights" and given["strategy"] not in ("channel", "tensor"):
            raise UserError(
                f"{where}: weights of strategy {given['strategy']!r}, not channel or tensor"
            )


def _table(value: Any) -> dict[str, Any]:
    """Return `value` if it is a table, else an empty table."""
    return value if isinstance(value, dict) else {}


_MLX_ENTRY = "quantization"
"""Key of config.json under which MLX describes its quantisation."""
_MLX_MODE = {"mode": "affine"}


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
            check_fields(fields, ("bits", "group_size"), f"config.json: {_MLX_ENTRY}", _MLX_MODE)
        del config[_MLX_ENTRY]
        return "foreign.MlxFolder"
    matrices = (
        sorted(name for name in files.shapes if name.endswith("proj.weight")) if files else []
    )
    is_ternary = files is not None and matrices and _looks_ternary(files, matrices[0])
    return "foreign.TernaryFloats" if is_ternary else None


def _looks_ternary(files: WeightFiles, name: str) -> bool:
    shape = files.shapes.get(name, ())
    if files.dtypes.get(name) not in ("F32", "F16", "BF16") or len(shape) != 2 or 0 in shape:
        return False
    first = files.read(name, slice(0, _LOOKED_AT))
    return bool(first.isfinite().all()) and ternary_of_floats(first, name) is not None


class TernaryFloats(ForeignFolder):
    """A folder of floats in which each run of a row holds only 0, +s and -s (TriLM, BitCPM, dequantised
    Bonsai). Layers that are not exactly ternary are refused."""

    def __init__(self, stored: StoredModel) -> None:
        files = WeightFiles.in_folder(stored.folder)
        layers = {
            name: shape
            for name, shape in linear_shapes(stored.model()).items()
            if name != "lm_head" and _looks_ternary(files, f"{name}.weight")
        }
        super().__init__(stored, files, layers, "ternary floats")

    def ternary(self, layer: str) -> TernaryWeight:
        ternary = ternary_of_floats(self.master(layer), layer)
        if ternary is None:
            raise UserError(
                f"layer {layer} of {self.folder} is not ternary, though its first rows are"
            )
        return ternary

    def ternary_rows(self, name: str, part: slice) -> TernaryWeight | None:
        return ternary_of_floats(self.files.read(name, part), name)


class MlxFolder(ForeignFolder):
    """A folder of MLX's 2-bit format: words of 16 codes q, with value = q * scale + bias for each group.
    The values are ternary, (q - 1) * scale, where bias = -scale."""

    def __init__(self, stored: StoredModel) -> None:
        """Raises `UserError` also for words, scales and biases that do not belong together."""
        files = WeightFiles.in_folder(stored.folder)
        self.quantised = {n.removesuffix(".scales") for n in files.shapes if n.endswith(".scales")}
        for name in self.quantised:
            words, scales, biases = (
                files.shapes.get(f"{name}.{end}", ()) for end in ("weight", "scales", "biases")
            )
            are_words = files.dtypes.get(f"{name}.weight") in ("U32", "I32") and len(words) == 2
            are_words &= files.dtypes.get(f"{name}.scales") in ("F32", "F16", "BF16")
            runs = scales[1] if len(scales) == 2 and are_words and scales[0] == words[0] else 0
            if scales != biases or not runs or CODES_PER_WORD * words[1] % runs:
                raise UserError(
                    f"layer {name} of {stored.folder}: its words {list(words)}, scales {list(scales)} "
                    f"and biases {list(biases)} do not belong together"
                )
        linears = linear_shapes(stored.model())
        layers = {n: linears[n] for n in linears if n in self.quantised and n != "lm_head"}
        shapes = {}
        for name, shape in files.shapes.items():
            module, _, end = name.rpartition(".")
            if module not in self.quantised:
                shapes[name] = shape
            elif end == "weight":
                shapes[name] = (shape[0], CODES_PER_WORD * shape[1])
        super().__init__(stored, files, layers, "MLX 2-bit", shapes=shapes)

    def ternary(self, layer: str) -> TernaryWeight:
        codes, scales = self._codes_and_scales(layer, slice(None))
        if tuple(codes.shape) != self.layers[layer]:
            raise UserError(
                f"layer {layer}: {list(codes.shape)} codes, expected {list(self.layers[layer])}"
            )
        return with_fewest_scales(codes, scales, layer)

    def ternary_rows(self, name: str, part: slice) -> TernaryWeight | None:
        module = name.removesuffix(".weight")
        if module not in self.quantised:
            return ternary_of_floats(self.files.read(name, part), name)
        return with_fewest_scales(*self._codes_and_scales(module, part), module)

    def stored_values(self, name: str, part: slice = slice(None)) -> Tensor:
        module = name.removesuffix(".weight")
        if module not in self.quantised:
            return self.files.read(name, part)
        return TernaryWeight(*self._codes_and_scales(module, part)).values()

    def _codes_and_scales(self, name: str, part: slice) -> tuple[Tensor, Tensor]:
        words, scales = (self.files.read(f"{name}.{end}", part) for end in ("weight", "scales"))
        if not torch.equal(self.files.read(f"{name}.biases", part), -scales):
            raise UserError(f"layer {name} of {self.folder} is not ternary: a bias is not -scale")
        # `unpack_words` returns q - 2, which compressed-tensors' words stand for.
        codes = unpack_words(words.view(torch.int32), CODES_PER_WORD * words.shape[1]) + 1
        return codes, scales
