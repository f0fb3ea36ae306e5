# SPDX-License-Identifier: Apache-2.0
"""The safetensors files of a model folder: names and shapes at once, tensors one at a time."""

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_bitnet.checkpoint.model_folder import INDEX_FILE, check_file, file_inside, read_json
from sparse_bitnet.errors import UserError, os_errors_as

if TYPE_CHECKING:
    from torch import Tensor

_WRAPPED = re.compile(r"(^|(?<=\.))_orig_mod\.|^module\.|^base_model\.model\.|^model\.model\.")
"""Prefixes that wrappers of models put before the names of tensors."""


class WeightFiles:
    """The tensors of some safetensors files by name. Nothing stays open or in memory between two reads.

    Attributes:
        folder: of the files.
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
                        first = self._places[name][0].name
                        raise UserError(
                            f"{self.folder}: tensor {name} is in {first} and {path.name}"
                        )
                    part = file.get_slice(name)
                    self.shapes[name] = tuple(part.get_shape())
                    self.dtypes[name] = part.get_dtype()
                    self._places[name] = (path, name)
        # A doubled "model." alone is no obstacle to transformers.
        names = (name for name in self.shapes if not name.startswith("model.model."))
        refuse_wrapped(names, self.folder)

    @classmethod
    def in_folder(cls, folder: Path) -> "WeightFiles":
        """The files that the folder's index names; without an index, every model*.safetensors.

        Raises `UserError` for a folder without such files, a damaged one, or one that the index names
        but that is not there.
        """
        index, whole = folder / INDEX_FILE, folder / "model.safetensors"
        if index.is_file() and whole.is_file():
            return cls([whole])  # as transformers has it, which may leave an index of earlier parts
        if not index.is_file():
            if not (paths := sorted(folder.glob("model*.safetensors"))):
                raise UserError(f"{folder} holds no model*.safetensors")
            return cls(paths)
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError(f"{index} is damaged: no weight_map")
        return cls(
            [file_inside(folder, name) for name in sorted(set(map(str, weight_map.values())))]
        )

    @classmethod
    def if_any(cls, folder: Path) -> "WeightFiles | None":
        """The same; None for a folder that holds no model*.safetensors."""
        return cls.in_folder(folder) if any(folder.glob("model*.safetensors")) else None

    def renamed(self, new: Callable[[str], str]) -> "WeightFiles":
        """The same tensors under other names."""
        files = copy.copy(self)
        for field in ("shapes", "dtypes", "_places"):
            setattr(files, field, {new(name): each for name, each in getattr(self, field).items()})
        return files

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def read(self, name: str, part: slice = slice(None)) -> "Tensor":
        """A tensor in its stored dtype, or some of its rows. Raises `UserError` where it is missing."""
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
        for start in range(0, shape[0], 4096):
            part = slice(start, start + 4096)
            one, other = (self.read(name, part).view(torch.uint8) for name in (first, second))
            if not torch.equal(one, other):
                return False
        return True


def refuse_wrapped(names: Iterable[str], where: object) -> None:
    """Raise `UserError` for names of tensors as a model in a wrapper has them."""
    for name in names:
        if prefix := _WRAPPED.search(name):
            raise UserError(
                f"{where}: tensor {name} is that of a wrapped model ({prefix[0]}: torch.compile, data "
                "parallelism, peft or another): save the model inside, without the wrapper"
            )


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
