# SPDX-License-Identifier: Apache-2.0
"""Codes to packed bytes and back, exactly: the plain reference of every packed format.

Takes arrays and torch's tensors, and returns what it was given. Importing this module imports no torch.
"""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar, Union

import numpy as np

from sparse_bitnet.errors import UserError
from sparse_bitnet.host import available_cores
from sparse_bitnet.packing.formats import check_layout, coded_pattern, needs_exact, row_bytes
from sparse_bitnet.packing.rows import ROWS, DamagedBytes
from sparse_bitnet.pattern import NMPattern

if TYPE_CHECKING:
    from torch import Tensor

Matrix = TypeVar("Matrix", bound=Union["Tensor", np.ndarray])

SLICE_WEIGHTS = 1 << 19
"""Weights coded at a time: intermediate results stay in the cache, and memory stays bounded."""


def pack(codes: Matrix, format: str, pattern: NMPattern, *, name: str = "(unnamed)") -> Matrix:
    """Pack ternary codes.

    Args:
        codes: int8 [rows, in_features] of -1, 0 and 1, at most n non-zeros in every group of m.
        format: a name in `formats.FORMATS`.
        pattern: n:m.
        name: of the layer, for error messages.

    Returns uint8 [rows, row_bytes] on the CPU.

    Raises `UserError` for codes outside the pattern, for shapes that the format does not hold and, of
    nm-sign, for groups with fewer non-zeros than the pattern allows.
    """
    array = _array(codes)
    if array.dtype != np.int8 or array.ndim != 2 or not array.size:
        raise UserError(
            f"layer {name}: pack takes an int8 matrix, not {codes.dtype} {list(codes.shape)}"
        )
    rows, in_features = array.shape
    packed = np.empty((rows, row_bytes(format, pattern, in_features, layer=name)), np.uint8)
    coded = coded_pattern(pattern)

    def pack_part(part: slice) -> None:
        codes = array[part]
        if (codes + 1).view(np.uint8).max() > 2:
            raise UserError(f"layer {name}: there are codes other than -1, 0 and 1")
        if not _fits(codes, pattern):
            raise UserError(
                f"layer {name}: a group of {pattern.m} has more than {pattern.n} non-zero codes; mask "
                "the codes first or pack them with the pattern they were trained with"
            )
        if needs_exact(format) and np.count_nonzero(codes) != codes.size // coded.m * coded.n:
            raise UserError(
                f"layer {name}: {format} holds groups with {pattern.n} of {pattern.m} weights not "
                "zero, and one has fewer; use nm-enum, or train with quantizer=binary"
            )
        packed[part] = ROWS[format][0](codes, pattern)

    _by_slices(rows, in_features, pack_part)
    return _like(codes, packed)


def unpack(
    packed: Matrix,
    format: str,
    pattern: NMPattern,
    shape: tuple[int, int],
    *,
    name: str = "(unnamed)",
) -> Matrix:
    """The codes of packed bytes: int8 `shape` = [rows, in_features], on the CPU.

    Args:
        packed: what `pack` returned.
        format, pattern: as given to `pack`.
        shape: of the codes.
        name: of the tensor, for error messages.

    Raises `UserError`, naming the tensor, where the bytes have another size than the shape asks for
    or are not what `pack` writes for any codes within the pattern.
    """
    rows, in_features = shape
    check_layout(format, pattern, in_features, name)
    expected = [rows, row_bytes(format, pattern, in_features)]
    array = _array(packed)
    if array.dtype != np.uint8 or expected != list(array.shape):
        raise UserError(
            f"tensor {name}: {format} of a {pattern} matrix {list(shape)} is uint8 {expected}, "
            f"not {packed.dtype} {list(packed.shape)}"
        )
    codes = np.empty((rows, in_features), np.int8)

    def unpack_part(part: slice) -> None:
        codes[part] = ROWS[format][1](array[part], pattern, in_features)
        if not _fits(codes[part], pattern):
            raise DamagedBytes(f"a group has more non-zeros than the pattern {pattern} allows")

    try:
        _by_slices(rows, in_features, unpack_part)
    except DamagedBytes as error:
        raise UserError(f"tensor {name} is damaged or not {format}: {error}") from error
    return _like(packed, codes)


def _array(given: Union["Tensor", np.ndarray]) -> np.ndarray:
    return np.ascontiguousarray(given if isinstance(given, np.ndarray) else given.cpu().numpy())


def _like(given: Any, made: np.ndarray) -> Any:
    if isinstance(given, np.ndarray):
        return made
    import torch

    return torch.from_numpy(made)


def _by_slices(rows: int, in_features: int, work: Callable[[slice], None]) -> None:
    """Call `work` for consecutive rows, `SLICE_WEIGHTS` at a time, on as many threads as torch has,
    without it as there are processors."""
    torch = sys.modules.get("torch")
    step = max(1, SLICE_WEIGHTS // in_features)
    slices = [slice(first, min(first + step, rows)) for first in range(0, rows, step)]
    # numpy releases the interpreter's lock in all that takes time here.
    with ThreadPoolExecutor(torch.get_num_threads() if torch else available_cores()) as pool:
        list(pool.map(work, slices))


def _fits(codes: np.ndarray, pattern: NMPattern) -> bool:
    """Whether every group of m of ternary codes [rows, in_features] has at most n that are not zero."""
    if pattern.is_dense:
        return True
    nonzero = codes.view(np.uint8) & 1
    counts = nonzero[:, 0 :: pattern.m].copy()
    for i in range(1, pattern.m):
        counts += nonzero[:, i :: pattern.m]
    return bool((counts <= pattern.n).all())
