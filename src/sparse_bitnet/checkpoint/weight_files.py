# SPDX-License-Identifier: Apache-2.0
"""The safetensors files of a model folder: names and shapes at once, tensors one at a time."""

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_bitnet.checkpoint.model_folder import INDEX_FILE, check_file, file_inside, read_json
from sparse_bitnet.errors import UserError, os_errors_as

if TYPE_CHECKING:
    from torch import Tensor

_WRAPPED = re.compile(r"(^|(?<=\.))_orig_mod\.|^module\.|^base_model\.model\.|^model\.model\.")
"""Prefixes that wrappers of models put before the names of tensors."""
_COMPARED_ROWS = 4096
"""At a time."""
_Place = tuple[Path, str, tuple[int, int, int]]
"""File, name in it, and its inode, size and time of change."""


class WeightFiles:
    """The tensors of some safetensors files by name. Nothing stays open or in memory between two reads.

    Attributes:
        folder: of the files.
        shapes: name -> shape.
        dtypes: name -> the format's name of the type, such as "BF16".
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        """Of at least one file. Raises `UserError`, naming it, for one that cannot be read."""
        self.folder = paths[0].parent
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self._paths: dict[str, Path] = {}
        self._stored: dict[str, str] = {}
        for path in paths:
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118  (not a mapping)
                    if name in self._paths:
                        raise UserError(
                            f"{self.folder}: tensor {name} is in {self._paths[name].name} and {path.name}"
                        )
                    part = file.get_slice(name)
                    self.shapes[name] = tuple(part.get_shape())
                    self.dtypes[name] = part.get_dtype()
                    self._paths[name] = path
        # A doubled "model." alone is no obstacle to transformers.
        names = (name for name in self.shapes if not name.startswith("model.model."))
        refuse_wrapped(names, self.folder)

    @classmethod
    def in_folder(cls, folder: Path) -> "WeightFiles":
        """The files that the folder's index names; without an index, every model*.safetensors.

        Raises `UserError` for a folder without such files, a damaged one, or one that the index names
        but that is not there.
        """
        return cls(_paths(folder))

    @classmethod
    def if_any(cls, folder: Path) -> "WeightFiles | None":
        """The same; None for a folder that holds no model*.safetensors."""
        return cls.in_folder(folder) if any(folder.glob("model*.safetensors")) else None

    def renamed(self, new: Callable[[str], str]) -> "WeightFiles":
        """The same tensors under other names."""
        found = copy.copy(self)
        found._stored = {new(name): name for name in self.shapes}
        for field in ("shapes", "dtypes", "_paths"):
            setattr(found, field, {new(name): each for name, each in getattr(self, field).items()})
        return found

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def read(self, name: str, part: slice | None = None) -> "Tensor":
        """A tensor in its stored dtype, or some of its rows. Raises `UserError` where it is missing."""
        if name not in self._paths:
            raise UserError(f"{self.folder} lacks {name}: the files are incomplete")
        return _read(self._paths[name], self._stored.get(name, name), part)

    def equal(self, first: str, second: str) -> bool:
        """Whether two names are matrices of the same bytes. Files that have not changed since are not
        compared again."""
        shape = self.shapes[first]
        if len(shape) != 2 or shape != self.shapes[second]:
            return False
        return _equal(self._place(first), self._place(second), shape[0])

    def _place(self, name: str) -> _Place:
        path = self._paths[name].absolute()
        state = path.stat()
        version = (state.st_ino, state.st_size, state.st_mtime_ns)
        return path, self._stored.get(name, name), version


def refuse_wrapped(names: Iterable[str], where: object) -> None:
    """Raise `UserError` for names of tensors as a model in a wrapper has them."""
    for name in names:
        if found := _WRAPPED.search(name):
            raise UserError(
                f"{where}: tensor {name} is that of a wrapped model ({found[0]}: torch.compile, data "
                "parallelism, peft or another): save the model inside, without the wrapper"
            )


def _read(path: Path, stored: str, part: slice | None) -> "Tensor":
    # Opened anew each time: the pages of a mapping that stays open would count as our memory.
    with _opened(path) as file:
        return file.get_tensor(stored) if part is None else file.get_slice(stored)[part]


@cache
def _equal(first: _Place, second: _Place, rows: int) -> bool:
    import torch

    for start in range(0, rows, _COMPARED_ROWS):
        a, b = (_read(*at[:2], slice(start, start + _COMPARED_ROWS)) for at in (first, second))
        if not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
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


def _paths(folder: Path) -> list[Path]:
    index, whole = folder / INDEX_FILE, folder / "model.safetensors"
    if index.is_file() and whole.is_file():
        paths = [whole]  # as transformers has it, which may leave an index of earlier parts
    elif index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise UserError(f"{index} is damaged: no weight_map")
        paths = [file_inside(folder, name) for name in sorted(set(map(str, weight_map.values())))]
    else:
        paths = sorted(folder.glob("model*.safetensors"))
    if not paths:
        raise UserError(f"{folder} holds no model*.safetensors")
    return paths
