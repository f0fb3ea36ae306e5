"""Folders that `sparse-bitnet pack` wrote. Opening one imports no torch."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_bitnet.checkpoint.checkpoint import Checkpoint
from sparse_bitnet.checkpoint.model_folder import check_folder, quantization_entry
from sparse_bitnet.packing.metadata import PackedMetadata
from sparse_bitnet.packing.tensor_file import TensorFile
from sparse_bitnet.packing.ternary import TernaryWeight

if TYPE_CHECKING:
    from torch import Tensor, nn

MODEL_FILE = "model.safetensors"


def open_packed(folder: Path, config: dict[str, Any]) -> Checkpoint:
    """Open a packed folder; a tensor is compared with its checksum when it is read.

    Raises `UserError` for a file that is damaged, truncated, of another version, or not of this config.
    """
    check_folder(folder)
    file = TensorFile(folder / MODEL_FILE)
    metadata = PackedMetadata.from_json(file.metadata, str(file.path))
    metadata.check_config_entry(quantization_entry(config), str(file.path))
    int8 = {
        name
        for name, stored in file.entries.items()
        if stored.dtype == "I8" and f"{name}_scale" in file.entries
    }
    internal = {f"{name}.weight_packed" for name in metadata.layers}
    internal |= {f"{name}.weight_scale" for name in metadata.layers}
    internal |= {f"{name}_scale" for name in int8}
    others = {name: entry for name, entry in file.entries.items() if name not in internal}

    def ternary(layer: str) -> TernaryWeight:
        from sparse_bitnet.packing.codec import unpack

        name = f"{layer}.weight_packed"
        packed, scale = file.checked(name), file.checked(f"{layer}.weight_scale")
        shape = metadata.layers[layer]
        codes = unpack(packed, metadata.packed_format, metadata.pattern, shape, name=name)
        return TernaryWeight(codes, scale.clone().view(()))

    def read(name: str, part: slice = slice(None)) -> "Tensor":
        tensor = file.checked(name)[part] if others[name].shape else file.checked(name)
        return tensor * file.checked(f"{name}_scale")[part] if name in int8 else tensor.clone()

    def model() -> "nn.Module":
        from sparse_bitnet.checkpoint.models import skeleton

        return skeleton(config, folder)

    return Checkpoint(
        folder=folder,
        kind="packed",
        config=config,
        format=metadata.format,
        layers=metadata.layers,
        others={name: entry.shape for name, entry in others.items()},
        dtypes={name: entry.dtype for name, entry in others.items()},
        read=read,
        master=None,
        ternary=ternary,
        model=model,
        file=file,
        metadata=metadata,
    )
