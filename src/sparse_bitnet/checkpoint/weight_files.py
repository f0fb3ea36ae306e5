# SPDX-License-Identifier: Apache-2.0
"""Tensors of an untrusted model folder's safetensors files, read one at a time. Imports no torch until a
tensor is read."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_bitnet.checkpoint.config_fields import QWEN35_TYPES
from sparse_bitnet.checkpoint.model_folder import (
    CONFIG_FILE,
    INDEX_FILE,
    check_file,
    file_inside,
    read_json,
    read_json_if_there,
)
from sparse_bitnet.errors import UserError, os_errors_as

if TYPE_CHECKING:
    from torch import Tensor


def is_qwen35(folder: Path) -> bool:
    """Whether config.json is Qwen3.5's, whose tensors may be named as with an image encoder."""
    return read_json_if_there(folder / CONFIG_FILE).get("model_type") in QWEN35_TYPES


def text_model_name(name: str) -> str:
    """Return the name in Qwen3.5's language model of a tensor of the published model; empty for those of
    an image encoder and of multi-token prediction layers."""
    name = name.replace("model.language_model.", "model.", 1)
    name = name.removeprefix("language_model.")  # in front, in MLX's folders
    return "" if name.startswith(("mtp.", "model.visual.", "vision_tower.")) else name


class WeightFiles:
    """The tensors of some safetensors files by name. Nothing stays open or in memory between two reads.

    Attributes:
        folder: folder of the files.
        shapes: name -> shape.
        dtypes: name -> the format's name of the type, such as "BF16".
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        """Read the headers of at least one file. Raises `UserError`, naming it, for a damaged one."""
        self.folder = paths[0].parent
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self._places: dict[str, tuple[Path, str]] = {}
        for path in paths:
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118  (not a mapping)
                    if name in self._places:
                        both = f"{self._places[name][0].name} and {path.name}"
                        raise UserError(f"{self.folder}: tensor {name} is in {both}")
                    part = file.get_slice(name)
                    self.shapes[name] = tuple(part.get_shape())
                    self.dtypes[name] = part.get_dtype()
                    self._places[name] = (path, name)

    @classmethod
    def in_folder(cls, folder: Path) -> "WeightFiles":
        """Open the files that the folder's index names; without an index, every model*.safetensors.

        Raises `UserError` for a folder without such files, a damaged one, or one that the index names
        but that does not exist.
        """
        index, whole = folder / INDEX_FILE, folder / "model.safetensors"
        # transformers prefers the whole file too, and may leave an index of earlier parts.
        paths = [whole] if index.is_file() else sorted(folder.glob("model*.safetensors"))
        if index.is_file() and not whole.is_file():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise UserError(f"{index} is damaged: no weight_map")
            paths = [file_inside(folder, name) for name in sorted({*map(str, weight_map.values())})]
        if not paths:
            raise UserError(f"{folder} holds no model*.safetensors")
        # The tensors of a Qwen3.5 language model get their names without an image encoder.
        return cls(paths).renamed(text_model_name) if is_qwen35(folder) else cls(paths)

    def renamed(self, new: Callable[[str], str]) -> "WeightFiles":
        """Return the same tensors under other names, without those whose new name is empty. Raises
        `UserError` if two get the same name."""
        names = [name for name in map(new, self.shapes) if name]
        if len({*names}) < len(names):
            raise UserError(f"{self.folder}: two tensors are {max(names, key=names.count)}")
        files = copy.copy(self)
        for field in ("shapes", "dtypes", "_places"):
            named = {new(name): each for name, each in getattr(self, field).items() if new(name)}
            setattr(files, field, named)
        return files

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def read(self, name: str, part: slice = slice(None)) -> "Tensor":
        """Return a tensor, or rows of it, in its stored dtype. Raises `UserError` if it is missing."""
        if name not in self._places:
            raise UserError(f"{self.folder} lacks {name}: the files are incomplete")
        path, stored = self._places[name]
        # Opened again each time: the pages of a mapping that stays open would count as our memory.
        with _opened(path) as file:
            is_whole = part == slice(None)
            return file.get_tensor(stored) if is_whole else file.get_slice(stored)[part]

    def equal(self, first: str, second: str) -> bool:
        """Whether two matrices have the same bytes."""
        import torch

        shape = self.shapes[first]
        if len(shape) != 2 or shape != self.shapes[second]:
            return False
        for part in (slice(start, start + 4096) for start in range(0, shape[0], 4096)):
            one, other = (self.read(name, part).view(torch.uint8) for name in (first, second))
            if not torch.equal(one, other):
                return False
        return True


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with os_errors_as(f"cannot read {path}"):
            check_file(path)
            with safe_open(path, framework="pt") as file:
                yield file
    except SafetensorError as error:
        raise UserError(f"{path} is damaged: {error}") from error
