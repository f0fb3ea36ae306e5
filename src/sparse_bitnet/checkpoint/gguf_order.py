# SPDX-License-Identifier: Apache-2.0
"""Differences between tensors of GGUF files and transformers': order of heads, signs, offsets, shapes.

llama.cpp's llama rotates neighbouring rows of q and k, transformers rows half a head apart. In Qwen3.5,
value heads that share a key head follow one another in transformers; in a file, their first ones come
before all second ones ("tiled").
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from sparse_bitnet.checkpoint.gguf_architectures import GgufArchitecture
from sparse_bitnet.errors import UserError

Config = Mapping[str, Any]
_ROTATED = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}


class Order(NamedTuple):
    """Another order of rows or columns: their indices; None: unchanged."""

    rows: np.ndarray | None
    columns: np.ndarray | None = None
    run: int = 1
    """Number of columns that stay together."""

    def inverse(self) -> "Order":
        """Return the order that undoes this one."""
        rows, columns = (None if each is None else np.argsort(each) for each in self[:2])
        return Order(rows, columns, self.run)

    def of_values(self, values: np.ndarray) -> np.ndarray:
        """Return a tensor in this order."""
        return values[self.rows] if self.columns is None else values[:, self.columns]

    def of_scales(self, scales: np.ndarray, columns: int) -> np.ndarray:
        """Return the scales of a matrix with `columns`, [rows or 1, groups] or a scalar, in this order;
        groups become as small as the runs that stay together."""
        if self.columns is None:
            return scales[self.rows] if scales.ndim and len(scales) > 1 else scales
        if scales.ndim == 0 or scales.shape[1] == 1:
            return scales
        group = math.gcd(self.run, columns // scales.shape[1])
        scales = scales.repeat(columns // group // scales.shape[1], 1)
        return scales[:, self.columns[::group] // group]


def stored_order(row: GgufArchitecture, config: Config, name: str) -> Order | None:
    """Return the order in the file of a tensor, by transformers' name with or without its end; None if it
    is the same."""
    part = name.removesuffix(".bias").removesuffix(".weight").rpartition(".")[2]
    if row.rotates_neighbours and (field := _ROTATED.get(part)):
        count = config.get(field) or config["num_attention_heads"]
        size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        return Order(np.arange(count * size).reshape(count, 2, -1).swapaxes(1, 2).reshape(-1))
    if ".linear_attn." not in name or part == "norm":
        return None
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    head, is_behind_keys = config["linear_value_head_dim"], part in ("in_proj_qkv", "conv1d")
    size = head if is_behind_keys or part in ("out_proj", "in_proj_z") else 1
    tiled = np.arange(heads * size).reshape(keys, -1, size).swapaxes(0, 1).reshape(-1)
    if part == "out_proj":
        return Order(None, tiled, head) if row.tiles_columns else None
    first = 2 * keys * config["linear_key_head_dim"] if is_behind_keys else 0
    return Order(np.concatenate([np.arange(first), first + tiled]))


def stored_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a tensor's shape in the file: transformers' but for convolutions, [channels, 1, kernel]."""
    return shape[::2] if name.endswith("conv1d.weight") else shape


def to_file(row: GgufArchitecture, config: Config, name: str, values: np.ndarray) -> np.ndarray:
    """Return a whole float32 tensor of transformers' as the file stores it."""
    if name.endswith("A_log"):
        values = -np.exp(values.astype(np.float64)).astype(np.float32)
    values = values.reshape(stored_shape(name, values.shape)) + np.float32(row.offset_of(name))
    order = stored_order(row, config, name)
    return values if order is None else order.of_values(values)


def from_file(row: GgufArchitecture, config: Config, name: str, values: np.ndarray) -> np.ndarray:
    """Return a whole float32 tensor of a file as transformers stores it: the inverse of `to_file`.

    Raises `UserError`, naming the tensor, for a decay that is not negative.
    """
    if (order := stored_order(row, config, name)) is not None:
        values = order.inverse().of_values(values)
    if name.endswith("A_log"):
        if not (values < 0).all():
            raise UserError(f"tensor for {name}: a decay is not a negative number")
        return np.log(-values.astype(np.float64)).astype(np.float32)
    values = values[:, None] if name.endswith("conv1d.weight") else values
    return values - np.float32(row.offset_of(name))
