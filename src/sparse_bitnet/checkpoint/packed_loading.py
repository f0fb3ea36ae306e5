# SPDX-License-Identifier: Apache-2.0
"""`from_pretrained` for packed folders, through transformers' quantizer registry.

The whole file is checked before a weight is used: header, sizes, the checksum of every tensor, that
no tensor is missing, and on decoding that every byte is one the format has and that codes keep to the
pattern. The layers hold the packed bytes and their decoded codes; embeddings stored as int8 are
dequantised to the model's dtype.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sparse_bitnet.checkpoint.checkpoint import stored_tensors
from sparse_bitnet.checkpoint.hub import with_own_attention
from sparse_bitnet.checkpoint.model_folder import LINEAR_NORMS, check_folder
from sparse_bitnet.checkpoint.packed import check_scales, ternary_table
from sparse_bitnet.errors import UserError
from sparse_bitnet.nn.packed_linear import PackedSparseBitLinear
from sparse_bitnet.packing.formats import row_bytes, scale_group
from sparse_bitnet.packing.metadata import QUANT_METHOD, PackedMetadata, check_version
from sparse_bitnet.packing.tensor_file import DTYPES, TensorFile
from sparse_bitnet.pattern import NMPattern

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def open_packed(path: Any) -> tuple[TensorFile, PackedMetadata]:
    """A packed file and what it says of itself, every tensor compared with its checksum.

    Raises `UserError`, naming file and tensor, for a file that is damaged, truncated or of another
    version.
    """
    check_folder(Path(path).parent)
    file = TensorFile(path)
    metadata = PackedMetadata.from_json(file.metadata, str(path))
    file.verify()
    return file, metadata


def prepare_model_(model: "PreTrainedModel", file: TensorFile, metadata: PackedMetadata) -> None:
    """Give a model without weights the modules into which the file's tensors fit.

    Raises `UserError`, naming the tensor, where file and model differ.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    packed: dict[nn.Module, PackedSparseBitLinear] = {}
    for name, (rows, in_features) in metadata.layers.items():
        linear = modules.get(name)
        if type(linear) is not nn.Linear or linear.weight.shape != (rows, in_features):
            raise UserError(
                f"{file.path}: tensor {name}.weight_packed is for a linear layer [{rows}, "
                f"{in_features}], which {type(model).__name__} does not have there"
            )
        entry, scales = (file.entries.get(f"{name}.weight_{end}") for end in ("packed", "scale"))
        scale_shape = scales.shape if scales else (1,)
        if scale_group(scale_shape, rows, in_features) is None:
            raise UserError(
                f"{file.path}: tensor {name}.weight_scale {list(scale_shape)} holds no scales of a "
                f"matrix [{rows}, {in_features}]"
            )
        epsilon, norm = getattr(model.config, LINEAR_NORMS, None), None
        if epsilon is not None:
            norm = nn.RMSNorm(in_features, eps=epsilon, device=linear.weight.device)
        packed[linear] = PackedSparseBitLinear(
            in_features,
            rows,
            linear.bias,
            config=metadata.format,
            packed_format=metadata.packed_format,
            scale_shape=scale_shape,
            norm=norm,
            name=name,
            device=linear.weight.device,
        )
    for name, module in modules.items():
        if module in packed:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, packed[module])
    if metadata.embeddings in ("int8", "ternary"):
        for name, module in _tables(model).items():
            rows, columns = module.weight.shape
            entry = file.entries.get(f"{name}.weight")
            form = metadata.table_form(entry.dtype if entry else None)
            if form == "bf16":
                continue
            stored, groups = (torch.int8, columns), 1
            if form == "ternary":
                stored = (torch.uint8, row_bytes("i2", NMPattern(1, 1), columns))
                groups = _table_groups(file, f"{name}.weight_scale", rows, columns)
            weight = torch.empty(rows, stored[1], dtype=stored[0], device=module.weight.device)
            module.weight = nn.Parameter(weight, requires_grad=False)
            scale = torch.empty(rows, groups, dtype=torch.float32, device=weight.device)
            module.register_buffer("weight_scale", scale)
    _check_tensors(model, file)


def finish_model_(model: "PreTrainedModel", metadata: PackedMetadata) -> None:
    """Decode the codes of the loaded layers, and embeddings to floats.

    Raises `UserError`, naming the tensor, for bytes that break the format or the pattern.
    """
    if metadata.embeddings in ("int8", "ternary"):
        for name, module in _tables(model).items():
            if not hasattr(module, "weight_scale"):
                continue
            weight, scale = module.weight, module.weight_scale
            if metadata.embeddings == "int8":
                weight = weight * scale
            else:
                weight = ternary_table(
                    weight, scale, model.config.hidden_size, f"{name}.weight"
                ).values()
            module.weight = nn.Parameter(weight.to(model.dtype), requires_grad=False)
            del module.weight_scale
        model.tie_weights()
    for name, layer in packed_layers(model).items():
        check_scales(layer.weight_scale, f"{name}.weight_scale")
        layer.decode_()


def packed_layers(model: nn.Module) -> dict[str, PackedSparseBitLinear]:
    """Every `PackedSparseBitLinear` by full name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, PackedSparseBitLinear)
    }


def _tables(model: "PreTrainedModel") -> dict[str, Any]:
    """By name: the embedding, and the output head where it has a weight of its own."""
    head: Any = model.get_output_embeddings()
    names = {id(module): name for name, module in model.named_modules()}
    tables: list[Any] = [model.get_input_embeddings()]
    if head is not None and f"{names[id(head)]}.weight" not in model.all_tied_weights_keys:
        tables.append(head)
    return {names[id(table)]: table for table in tables}


def _table_groups(file: TensorFile, name: str, rows: int, columns: int) -> int:
    shape = file.entries[name].shape if name in file.entries else ()
    if len(shape) != 2 or scale_group(shape, rows, columns) is None:
        raise UserError(f"{file.path}: tensor {name} {list(shape)} holds no scales of groups")
    return shape[1]


def _check_tensors(model: "PreTrainedModel", file: TensorFile) -> None:
    """The file has every tensor of the model, in its shape and kind, and no other."""
    wanted = stored_tensors(model)
    if missing := sorted(wanted.keys() - file.entries.keys()):
        raise UserError(f"{file.path}: tensor {missing[0]} is missing")
    if unknown := sorted(file.entries.keys() - wanted.keys()):
        raise UserError(
            f"{file.path}: tensor {unknown[0]} is not part of {type(model).__name__} as config.json "
            "describes it"
        )
    for name, tensor in wanted.items():
        entry = file.entries[name]
        same_kind = (
            entry.is_floating_point
            if tensor.is_floating_point()
            else getattr(torch, DTYPES[entry.dtype]) == tensor.dtype
        )
        if entry.shape != tuple(tensor.shape) or not same_kind:
            raise UserError(
                f"{file.path}: tensor {name} is torch.{DTYPES[entry.dtype]} {list(entry.shape)}, the "
                f"model needs {tensor.dtype} {list(tensor.shape)}"
            )


def register() -> None:
    """Enter "sparse_bitnet_packed" in transformers' quantizer registry; a second call does nothing."""
    from transformers.quantizers.auto import (
        AUTO_QUANTIZER_MAPPING,
        register_quantization_config,
        register_quantizer,
    )
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    if QUANT_METHOD in AUTO_QUANTIZER_MAPPING:
        return

    @register_quantization_config(QUANT_METHOD)
    class PackedQuantizationConfig(QuantizationConfigMixin):
        """The `quantization_config` entry as transformers passes it around."""

        def __init__(self, quant_method: str = QUANT_METHOD, **entry: Any) -> None:
            check_version(entry, "config.json")
            self.__dict__.update(entry, quant_method=quant_method)

    @register_quantizer(QUANT_METHOD)
    class PackedQuantizer(HfQuantizer):
        """Replaces the layers of the empty model and decodes them when they are loaded."""

        requires_calibration = True

        def update_attn_implementation(self, config: Any) -> Any:
            return with_own_attention(config)

        update_tp_plan = update_attn_implementation  # of releases that lack the other

        def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
            files = kwargs.get("checkpoint_files") or []
            if len(files) != 1 or not str(files[0]).endswith(".safetensors"):
                raise UserError("a packed model is one model.safetensors file; pack it again")
            file, self.metadata = open_packed(files[0])
            self.metadata.check_config_entry(self.quantization_config.to_dict(), str(files[0]))
            prepare_model_(model, file, self.metadata)

        def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
            finish_model_(model, self.metadata)

        @property
        def is_trainable(self) -> bool:
            return False

        def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
            # What save_pretrained writes would lack checksums and metadata: copy the folder instead.
            return False
