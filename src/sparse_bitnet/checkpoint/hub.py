# SPDX-License-Identifier: Apache-2.0
"""Saves and loads trained models, master weights included, as Hugging Face folders.

The folder is an ordinary transformers checkpoint (config.json, model.safetensors, tokenizer) whose
config carries `quant_method: "sparse_bitnet"`, a version and the whole `SparseBitConfig`. Once
`sparse_bitnet` is imported, transformers' own `from_pretrained` loads the trained model, bit for bit; the
master weights are stored, so training can continue from there. Packed folders load in the same way.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparse_bitnet.checkpoint.checkpoint import (
    Checkpoint,
    StoredModel,
    check_tensors,
    embedding_weights,
    stored_tensors,
)
from sparse_bitnet.checkpoint.config_fields import check_fields
from sparse_bitnet.checkpoint.load import from_pretrained
from sparse_bitnet.checkpoint.model_folder import (
    CONFIG_FILE,
    MASTERS_HELD,
    TOKENIZER_FILES,
    WITHOUT_IMPORT,
    copy_files,
    finish_folder,
)
from sparse_bitnet.checkpoint.open_checkpoint import find_checkpoint
from sparse_bitnet.checkpoint.packed import PackedCheckpoint, finish_model_, prepare_model_
from sparse_bitnet.checkpoint.weight_files import WeightFiles
from sparse_bitnet.errors import UserError
from sparse_bitnet.files import TEMPORARY_PREFIX, atomic_folder, check_ours
from sparse_bitnet.layer_config import FORMAT_VERSION, REGISTERED
from sparse_bitnet.nn.convert import convert_, first_unpackable, quantization_config, sparse_layers
from sparse_bitnet.nn.layer import SparseBitConfig
from sparse_bitnet.nn.selection import Selection, select
from sparse_bitnet.nn.ternary_tables import quantize_table, set_tables_
from sparse_bitnet.packing.formats import QUANT_METHOD, SCALE_GROUPS, scale_group
from sparse_bitnet.packing.rotation import Rotation
from sparse_bitnet.packing.tensor_file import DTYPES
from sparse_bitnet.packing.ternary import TernaryWeight
from sparse_bitnet.pattern import NMPattern
from sparse_bitnet.variants.registry import Matrix

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_REQUIRED_KEYS = ("version", "format", "modules_to_not_convert")


def read_format(entry: dict[str, Any], where: str = "config.json") -> SparseBitConfig:
    """Return the `SparseBitConfig` of the `quantization_config` in the config.json `where`.

    Raises `UserError` for a missing or an unknown key, or a version newer than this package reads.
    """
    for key in _REQUIRED_KEYS:
        if key not in entry:
            raise UserError(f"{where}: quantization_config lacks {key}")
    check_fields(entry, ("quant_method", *_REQUIRED_KEYS), f"{where}: quantization_config")
    kept = entry["modules_to_not_convert"]
    if not isinstance(kept, list) or not all(isinstance(name, str) for name in kept):
        raise UserError(f"{where}: modules_to_not_convert is not a list of names")
    if not isinstance(entry["version"], int) or not 1 <= entry["version"] <= FORMAT_VERSION:
        raise UserError(
            f"{where}: sparse_bitnet format version {entry['version']} is not readable by this "
            f"release (it reads up to {FORMAT_VERSION}); upgrade sparse-bitnet"
        )
    try:
        return SparseBitConfig.from_dict(entry["format"])
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def save_pretrained(
    model: "PreTrainedModel", folder: str | Path, tokenizer: "PreTrainedTokenizerBase | None" = None
) -> None:
    """Write a converted model, and its tokenizer if given, as a complete folder in one step. A checkpoint
    in `folder` is replaced; without a tokenizer, its own stays.

    Raises `UserError` when the model holds no `SparseBitLinear`, `folder` holds other files than a
    checkpoint's, or the disk is full; `folder` is then unchanged.
    """
    configs = [layer.config for layer in sparse_layers(model).values()]
    if not configs:
        raise UserError(
            f"{type(model).__name__} has no SparseBitLinear to save; use convert_ first"
        )
    if any(config != configs[0] for config in configs):
        raise UserError("layers differ in their format; one checkpoint holds one format")
    folder = Path(folder)
    check_ours(folder, ["config.json"], "a checkpoint")
    model.config.quantization_config = quantization_config(model, configs[0])
    with atomic_folder(folder) as temporary:
        model.save_pretrained(temporary)
        copy_files(folder, temporary, TOKENIZER_FILES if tokenizer is None else ())
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        finish_folder(temporary, MASTERS_HELD)
        patterns = ("model*.safetensors*", ".lock", *TOKENIZER_FILES)
        ours = {path for pattern in patterns for path in folder.glob(pattern)}
        ours |= {path.parent for path in ours}
        for path in sorted(folder.rglob("*")):
            top = (name := path.relative_to(folder)).parts[0]
            is_ours = path in ours or top.startswith(TEMPORARY_PREFIX)
            if not (is_ours or (temporary / name).exists()):
                raise UserError(f"{folder} holds {top}, no checkpoint's: choose another one")


class TrainedCheckpoint(Checkpoint):
    """A folder whose names and shapes are those of the model that config.json describes."""

    def __init__(self, stored: StoredModel) -> None:
        """Open the folder. Raises `UserError` unless it is complete."""
        super().__init__(stored)
        folder, entry, model = stored.folder, stored.entry, self.model
        self.format = SparseBitConfig(weight="full", pattern=NMPattern(1, 1))
        if entry:
            self.format = read_format(entry, where=str(folder / CONFIG_FILE))
            dense = set(entry["modules_to_not_convert"])
            self.not_linear = first_unpackable(model, dense.__contains__)
            convert_(model, self.format, lambda module, name: name not in dense)
            set_tables_(model, ternary=False)  # which are read as `others`
        self.layers = {
            name: (layer.out_features, layer.in_features)
            for name, layer in sparse_layers(model).items()
        }
        # Stored are the weights that multiply rotated inputs.
        self.rotation = Rotation.of_format(
            self.format, {width for _, width in self.layers.values()}
        )
        if self.rotation:
            self.format = replace(self.format, activation="int8")
        self.has_masters = True
        self.has_one_scale = self.format.quantizer == REGISTERED["quantizer"]
        wanted = stored_tensors(model)
        self.files: WeightFiles | dict[str, Tensor] = WeightFiles.in_folder(folder)
        shapes, dtypes = self.files.shapes, self.files.dtypes
        if not shapes.keys() <= model.state_dict().keys() and len(shapes) <= len(wanted):
            # transformers renames these tensors on loading (GPT-NeoX), so they are read into memory.
            self.files = from_pretrained(folder).state_dict()
            names = {getattr(torch, name): key for key, name in DTYPES.items()}
            shapes = {name: tuple(value.shape) for name, value in self.files.items()}
            dtypes = {name: names[value.dtype] for name, value in self.files.items()}
        shapes = {n: shape for n, shape in shapes.items() if n not in model.all_tied_weights_keys}
        check_tensors(wanted, shapes, dtypes, folder)
        masters = {f"{name}.{part}" for name in self.layers for part in ("weight", "input_norm")}
        first = [name for name in embedding_weights(model) if name in wanted]
        others = [*first, *(name for name in wanted if name not in masters and name not in first)]
        self.others = {name: shapes[name] for name in others}
        self.dtypes = {name: dtypes[name] for name in others}

    def ternary_rows(self, name: str, part: slice) -> TernaryWeight | None:
        if self.format.embeddings != "ternary" or name not in self.embeddings:
            return None
        return quantize_table(super().read(name, part))

    def read(self, name: str, part: slice = slice(None)) -> Tensor:
        table = self.ternary_rows(name, part)
        return super().read(name, part) if table is None else table.values()

    def stored_values(self, name: str, part: slice = slice(None)) -> Tensor:
        if isinstance(self.files, WeightFiles):
            return self.files.read(name, part)
        return self.files[name][part] if self.files[name].dim() else self.files[name]

    def master(self, layer: str) -> Tensor:
        return self.read(f"{layer}.weight")

    def ternary(self, layer: str) -> TernaryWeight:
        codes, _, weight_scale = self._selection(layer)[:3]
        assert codes is not None
        assert weight_scale is not None
        if weight_scale.dim() and scale_group(tuple(weight_scale.shape), *codes.shape) is None:
            raise UserError(
                f"{self.folder}: {self.format.quantizer} gives {layer} scales {list(weight_scale.shape)} "
                f"for {list(codes.shape)} weights; packed folders hold one scale per matrix, row or "
                f"{', '.join(map(str, SCALE_GROUPS))} weights: use `export --to dense`"
            )
        return TernaryWeight(codes, weight_scale)

    def effective(self, layer: str) -> Tensor:
        return self._selection(layer).effective(self.master(layer).float())

    def _selection(self, layer: str) -> Selection:
        """Select mask, codes and scales from a layer's trained weight, in the checkpoint's format."""
        norm = f"{layer}.input_norm"
        matrix = Matrix(input_norm=self.read(norm) if norm in self.files else None)
        return select(self.master(layer), self.format, matrix=matrix)


def register() -> None:
    """Enter our two methods in transformers' registry of quantizers; a second call does nothing."""
    from transformers.quantizers import auto
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    if QUANT_METHOD in auto.AUTO_QUANTIZER_MAPPING:
        return

    class Entry(QuantizationConfigMixin):
        """The `quantization_config` entry as transformers passes it around."""

        def __init__(self, **entry: Any) -> None:
            self.__dict__.update(entry)

    class MastersQuantizer(HfQuantizer):
        """Converts the empty model before its weights are read."""

        is_trainable = is_qat_trainable = is_compileable = True

        def update_attn_implementation(self, config: Any) -> Any:
            # `finish_folder` put this there, to make loading without this quantizer fail.
            if config._attn_implementation in WITHOUT_IMPORT.values():
                config._attn_implementation = None
            return config

        update_tp_plan = update_attn_implementation  # for releases without the other

        def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
            return self.is_trainable

        def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
            entry = self.quantization_config.to_dict()
            format = read_format(entry)
            # A base model without its head has the same names less the prefix.
            prefix = f"{model.base_model_prefix}."
            dense = {name.removeprefix(prefix) for name in entry["modules_to_not_convert"]}
            convert_(model, format, lambda module, name: name.removeprefix(prefix) not in dense)

    class PackedQuantizer(MastersQuantizer):
        """Replaces the layers of the empty model and decodes them when they are loaded.

        It saves nothing, which would lack checksums and metadata: copy the folder instead.
        """

        requires_calibration = True
        is_trainable = is_qat_trainable = is_compileable = False

        def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
            folder = Path(kwargs["checkpoint_files"][0]).parent
            prepare_model_(model, PackedCheckpoint(find_checkpoint(folder)))

        def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
            finish_model_(model)

    for method, quantizer in (("sparse_bitnet", MastersQuantizer), (QUANT_METHOD, PackedQuantizer)):
        auto.register_quantization_config(method)(Entry)
        auto.register_quantizer(method)(quantizer)
