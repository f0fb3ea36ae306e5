# SPDX-License-Identifier: Apache-2.0
"""Folders that `sparse-bitnet pack` wrote: their tensors, and how transformers loads them.

Opening one imports no torch. When transformers loads one, the whole file is checked before a weight is
used: header, sizes, the checksum of every tensor, and that no tensor is missing. Decoding checks that
every byte is valid in the format and that codes keep to the pattern.
"""

import math
from typing import TYPE_CHECKING, Any

from sparse_bitnet.checkpoint.checkpoint import (
    Checkpoint,
    StoredModel,
    check_tensors,
    stored_tensors,
)
from sparse_bitnet.checkpoint.model_folder import LINEAR_NORMS
from sparse_bitnet.errors import UserError
from sparse_bitnet.packing.formats import PackedMetadata, scale_group
from sparse_bitnet.packing.tensor_file import DTYPES, TensorFile
from sparse_bitnet.packing.ternary import TernaryWeight
from sparse_bitnet.pattern import NMPattern

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from sparse_bitnet.nn.packed_linear import PackedSparseBitLinear

MODEL_FILE = "model.safetensors"


class PackedCheckpoint(Checkpoint):
    """A packed folder; a tensor is compared with its checksum when it is read."""

    file: TensorFile
    metadata: PackedMetadata
    tables: dict[str, tuple[int, int]]
    """Embedding and head with scales, one for each row of int8, or for each group of a row of i2: name ->
    (rows, columns) of their values."""

    def __init__(self, stored: StoredModel) -> None:
        """Raises `UserError` for a file that is damaged, of another version, or not of this config."""
        super().__init__(stored)
        self.file = file = TensorFile(stored.folder / MODEL_FILE)
        self.metadata = metadata = PackedMetadata.from_json(file.metadata, str(file.path))
        metadata.check_config_entry(stored.entry, str(file.path))
        internal = set()
        for name, shape in metadata.layers.items():
            if f"{name}.weight_packed" not in file.entries:
                raise UserError(f"{file.path}: tensor {name}.weight_packed is missing")
            self._check_entry(f"{name}.weight_scale", shape, one=("F32",))
            internal |= {f"{name}.weight_packed", f"{name}.weight_scale"}
        hidden = stored.config.get("hidden_size")
        self.tables = {}
        for name in [name for name in file.entries if f"{name}_scale" in file.entries]:
            entry = file.entries[name]
            if entry.dtype in ("I8", "U8") and len(entry.shape) == 2:
                rows, columns = entry.shape
                if entry.dtype == "U8":
                    columns = hidden if type(hidden) is int else 0
                self.tables[name] = rows, columns
                # Rows of int8 have one scale: rows of one value have no other groups.
                whole = (rows, 1 if entry.dtype == "I8" else columns)
                self._check_entry(f"{name}_scale", whole, one=())
                internal.add(f"{name}_scale")
        others = {name: entry for name, entry in file.entries.items() if name not in internal}
        self.others = {name: self.tables.get(name, entry.shape) for name, entry in others.items()}
        self.dtypes = {n: "F32" if others[n].dtype == "U8" else others[n].dtype for n in others}
        self.format, self.layers = metadata.format, metadata.layers
        self.rotation = metadata.rotation
        scales = (file.entries[f"{layer}.weight_scale"] for layer in metadata.layers)
        self.has_one_scale = all(scale.shape == (1,) for scale in scales)

    def _check_entry(self, name: str, shape: tuple[int, ...], *, one: tuple[str, ...]) -> None:
        """Raise `UserError` for a tensor of scales that is missing or not of a matrix of this shape.

        `one`: types that a single scale of the whole matrix may have.
        """
        if (scales := self.file.entries.get(name)) is None:
            raise UserError(f"{self.file.path}: tensor {name} is missing")
        types = one if scales.shape == (1,) else ("F32", "F16", "BF16")
        if scales.dtype not in types or scale_group(scales.shape, *shape) is None:
            raise UserError(
                f"{self.file.path}: tensor {name} is {DTYPES[scales.dtype]} {list(scales.shape)}, not "
                f"scales for a matrix {list(shape)}"
            )

    def ternary(self, layer: str) -> TernaryWeight:
        from sparse_bitnet.packing.codec import unpack

        name, metadata = f"{layer}.weight_packed", self.metadata
        packed, scale = self.file.checked(name), self.file.checked(f"{layer}.weight_scale")
        _check_scales(scale, f"{layer}.weight_scale")
        whole = metadata.layers[layer]
        codes = unpack(packed, metadata.packed_format, metadata.pattern, whole, name=name)
        return TernaryWeight(codes, scale.clone().view(() if scale.shape == (1,) else scale.shape))

    def ternary_rows(self, name: str, part: slice) -> TernaryWeight | None:
        if name not in self.tables or self.file.entries[name].dtype != "U8":
            return None
        packed, scales = (self.file.checked(each)[part] for each in (name, f"{name}_scale"))
        return _ternary_table(packed, scales, self.tables[name][1], name)

    def stored_values(self, name: str, part: slice = slice(None)) -> "Tensor":
        if (table := self.ternary_rows(name, part)) is not None:
            return table.values()
        values = self.file.checked(name)
        values = values[part] if self.others[name] else values
        if name in self.tables:
            return values * self.file.checked(f"{name}_scale")[part]
        return values.clone()


def _check_scales(scales: "Tensor", name: str) -> None:
    """Raise `UserError` for scales that are not positive and finite. Several scales may include zeros,
    those of codes that are all zero."""
    low, high = (float(bound) for bound in scales.aminmax())
    if not (low > 0 or (low == 0 and scales.numel() > 1)) or not high < math.inf:
        raise UserError(
            f"tensor {name} has {low}, but scales must be positive and finite; pack the model again"
        )


def _ternary_table(packed: "Tensor", scales: "Tensor", columns: int, name: str) -> TernaryWeight:
    """Return rows of an embedding or head that is stored as i2 with scales of groups."""
    from sparse_bitnet.packing.codec import unpack

    whole = (len(packed), columns)
    return TernaryWeight(unpack(packed, "i2", NMPattern(1, 1), whole, name=name), scales)


def prepare_model_(model: "PreTrainedModel", packed: PackedCheckpoint) -> None:
    """Give a model without weights the modules into which the file's tensors fit, after comparing each
    tensor with its checksum.

    Raises `UserError`, naming the tensor, where file and model differ.
    """
    import torch
    from torch import nn

    from sparse_bitnet.nn.packed_linear import PackedSparseBitLinear

    file, metadata = packed.file, packed.metadata
    file.verify()
    modules = dict(model.named_modules(remove_duplicate=False))
    layers: dict[nn.Module, PackedSparseBitLinear] = {}
    for name, (rows, in_features) in packed.layers.items():
        linear = modules.get(name)
        if not isinstance(linear, nn.Linear) or linear.weight.shape != (rows, in_features):
            raise UserError(
                f"{file.path}: tensor {name}.weight_packed is for a linear layer [{rows}, "
                f"{in_features}], which {type(model).__name__} does not have there"
            )
        epsilon, norm = getattr(model.config, LINEAR_NORMS, None), None
        if epsilon is not None:
            norm = nn.RMSNorm(in_features, eps=epsilon, device=linear.weight.device)
        layers[linear] = PackedSparseBitLinear(
            in_features,
            rows,
            linear.bias,
            config=metadata.format,
            packed_format=metadata.packed_format,
            scale_shape=file.entries[f"{name}.weight_scale"].shape,
            norm=norm,
            rotation=metadata.rotation,
            name=name,
            device=linear.weight.device,
        )
    for name, module in modules.items():
        if module in layers:
            model.set_submodule(name, layers[module])
    for name in packed.tables:
        table: Any = modules.get(name.removesuffix(".weight"))
        if getattr(table, "weight", None) is None or table.weight.shape != packed.tables[name]:
            continue  # `check_tensors` names it
        entry, device = file.entries[name], table.weight.device
        weight = torch.empty(entry.shape, dtype=getattr(torch, DTYPES[entry.dtype]), device=device)
        table.weight = nn.Parameter(weight, requires_grad=False)
        scale = torch.empty(file.entries[f"{name}_scale"].shape, device=device)
        table.register_buffer("weight_scale", scale)
    check_tensors(
        stored_tensors(model),
        {name: entry.shape for name, entry in file.entries.items()},
        {name: entry.dtype for name, entry in file.entries.items()},
        file.path,
    )


def finish_model_(model: "PreTrainedModel") -> None:
    """Decode the codes of the loaded layers, and embeddings to floats of the model's dtype, in the basis
    from before a rotation.

    Raises `UserError`, naming the tensor, for bytes that break the format or the pattern.
    """
    from torch import nn

    layers: dict[str, Any] = packed_layers(model)
    rotation = next((layer.rotation for layer in layers.values()), None)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    for name, module in model.named_modules():
        if name not in layers and (scale := getattr(module, "weight_scale", None)) is not None:
            table: Any = module
            if table.weight.dtype.is_signed:
                values = table.weight * scale
            else:
                columns = model.config.hidden_size
                values = _ternary_table(table.weight, scale, columns, f"{name}.weight").values()
            table.weight = nn.Parameter(values.to(model.dtype), requires_grad=False)
            del table.weight_scale
        if rotation and f"{name}.weight" not in model.all_tied_weights_keys:
            of_table: Any = module
            if (module is embedding and rotation.embedding) or (module is head and rotation.head):
                values = rotation.rows(of_table.weight.detach())
                of_table.weight = nn.Parameter(values.to(model.dtype), requires_grad=False)
    model.tie_weights()
    for name, layer in layers.items():
        _check_scales(layer.weight_scale, f"{name}.weight_scale")
        layer.decode_()


def packed_layers(model: "nn.Module") -> "dict[str, PackedSparseBitLinear]":
    """Return every `PackedSparseBitLinear` by full name."""
    from sparse_bitnet.nn.packed_linear import PackedSparseBitLinear

    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, PackedSparseBitLinear)
    }
