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

from sparse_bitnet.checkpoint.checkpoint import check_tensors, stored_tensors
from sparse_bitnet.checkpoint.model_folder import LINEAR_NORMS, check_folder
from sparse_bitnet.checkpoint.packed import check_scales, check_scales_entry, ternary_table
from sparse_bitnet.errors import UserError
from sparse_bitnet.nn.packed_linear import PackedSparseBitLinear
from sparse_bitnet.packing.formats import PackedMetadata, row_bytes
from sparse_bitnet.packing.tensor_file import TensorFile
from sparse_bitnet.pattern import NMPattern

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def open_packed(path: Any) -> tuple[TensorFile, PackedMetadata]:
    """Open a packed file and its metadata; every tensor is compared with its checksum.

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
        check_scales_entry(file, f"{name}.weight_scale", (rows, in_features), one=("F32",))
        epsilon, norm = getattr(model.config, LINEAR_NORMS, None), None
        if epsilon is not None:
            norm = nn.RMSNorm(in_features, eps=epsilon, device=linear.weight.device)
        packed[linear] = PackedSparseBitLinear(
            in_features,
            rows,
            linear.bias,
            config=metadata.format,
            packed_format=metadata.packed_format,
            scale_shape=file.entries[f"{name}.weight_scale"].shape,
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
                check_scales_entry(file, f"{name}.weight_scale", (rows, columns), one=())
                groups = file.entries[f"{name}.weight_scale"].shape[1]
            weight = torch.empty(rows, stored[1], dtype=stored[0], device=module.weight.device)
            module.weight = nn.Parameter(weight, requires_grad=False)
            scale = torch.empty(rows, groups, dtype=torch.float32, device=weight.device)
            module.register_buffer("weight_scale", scale)
    check_tensors(
        stored_tensors(model),
        {name: entry.shape for name, entry in file.entries.items()},
        {name: entry.dtype for name, entry in file.entries.items()},
        file.path,
    )


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
    """Return every `PackedSparseBitLinear` by full name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, PackedSparseBitLinear)
    }


def _tables(model: "PreTrainedModel") -> dict[str, Any]:
    """Return the embedding and, if it has a weight of its own, the output head, by name."""
    head: Any = model.get_output_embeddings()
    names = {id(module): name for name, module in model.named_modules()}
    tables: list[Any] = [model.get_input_embeddings()]
    if head is not None and f"{names[id(head)]}.weight" not in model.all_tied_weights_keys:
        tables.append(head)
    return {names[id(table)]: table for table in tables}
