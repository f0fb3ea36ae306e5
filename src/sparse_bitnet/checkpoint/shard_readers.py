# SPDX-License-Identifier: Apache-2.0
"""Readers of sharded checkpoints, whose `.metadata` is a pickle: torch's own run whatever it names."""

import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.metadata as stored
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.serialization import _get_layout


def _path(*parts: str) -> str:
    return "/".join(parts)


def _member(of: Any, name: str) -> Any:
    """In the place of `getattr`, which the first releases of Python 3.11 pickle enums by."""
    return stored._MEM_FORMAT_ENCODING[name] if of is stored._MEM_FORMAT_ENCODING else None


_HELD: dict[str, Any] = {
    f"{held.__module__}.{held.__qualname__}": held
    for held in (
        *(stored.Metadata, stored.MetadataIndex, stored.StorageMeta, stored._MEM_FORMAT_ENCODING),
        *(stored.TensorStorageMetadata, stored.TensorProperties, stored.ChunkStorageMetadata),
        *(_StorageInfo, _get_layout, torch.Size),
    )
}
"""Without `BytesStorageMetadata`, whose values torch unpickles in their turn."""

_HELD["builtins.getattr"] = _member
for _module in ("pathlib", "pathlib._local"):
    _HELD |= {f"{_module}.PosixPath": _path, f"{_module}.WindowsPath": _path}


class _Unpickler(pickle._Unpickler):
    """In Python: that in C makes a table as long as an index in the file says."""

    def find_class(self, module: str, name: str) -> Any:
        found = _HELD.get(f"{module}.{name}")
        if found is None and module == "torch":
            found = getattr(torch, name, None)
            found = found if isinstance(found, torch.dtype) else None
        if found is None:
            raise ValueError(f"it names {module}.{name}, which no checkpoint holds")
        return found


class ShardReader(dcp.FileSystemReader):
    """Reads the shards of a checkpoint's folder."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """As torch's. Raises `OSError`, and `ValueError` for what is no metadata of tensors."""
        reader: Any = self
        path = reader._get_metadata_path(kwargs.get("rank"))
        try:
            with reader.fs.create_stream(path, "rb") as file:
                metadata = _Unpickler(file).load()
            for entry in metadata.state_dict_metadata.values():
                are_sizes = isinstance(entry.size, torch.Size) and min(entry.size, default=0) >= 0
                if not (are_sizes and isinstance(entry.properties.dtype, torch.dtype)):
                    raise ValueError("an entry is no tensor")
            for place in metadata.storage_data.values():
                if place.relative_path != Path(place.relative_path).name:
                    raise ValueError(
                        f"it names {place.relative_path!r}, which is not in its folder"
                    )
            metadata.storage_meta = metadata.storage_meta or stored.StorageMeta()
            metadata.storage_meta.load_id = reader.load_id
        except OSError:
            raise
        except Exception as error:  # of bytes that anyone made, anything
            raise ValueError(f".metadata is damaged: {error}") from error
        return metadata
