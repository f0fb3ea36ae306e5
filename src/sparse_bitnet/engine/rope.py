# SPDX-License-Identifier: Apache-2.0
"""Inverse frequencies of rotary position embeddings, as transformers computes them. Free of torch."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparse_bitnet.checkpoint.config_fields import Fields, rope_of
from sparse_bitnet.errors import EngineLacks, UserError

KNOWN = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary embedding of one model."""

    inverse_frequencies: np.ndarray
    """float32 [head_dim / 2]."""

    scaling: float
    """Multiplies cosine and sine."""


def read_rope(config: dict[str, Any], head_dim: int, where: str, *, local: bool = False) -> Rope:
    """Rope of a config.json; `local`: of its layers with a window.

    Raises `UserError`, beginning with `where`, for kinds not in `KNOWN` and for missing numbers.
    """
    fields = rope_of(config, where, local=local)
    kind = fields["rope_type"]
    if kind not in KNOWN:
        raise EngineLacks(
            f"{where}: the CPU engine does not know rope type {kind!r}; use --engine transformers"
        )
    numbers = Fields(fields, f"{where}: rope parameter ")
    if numbers.optional("partial_rotary_factor", 1.0) != 1:
        raise EngineLacks(
            f"{where}: the CPU engine rotates whole heads only; use --engine transformers"
        )
    try:
        with np.errstate(all="ignore"):
            rope = _frequencies(kind, head_dim, numbers, config)
            is_sound = bool(
                np.isfinite([*rope.inverse_frequencies, np.float32(rope.scaling)]).all()
            )
    except UserError:
        raise
    except (ArithmeticError, ValueError):
        is_sound = False
    if not is_sound:
        raise UserError(
            f"{where}: its rope parameters give frequencies that are not finite; correct them"
        )
    return rope


def _frequencies(kind: str, head_dim: int, numbers: Fields, config: dict[str, Any]) -> Rope:
    # torch's float32 power is correctly rounded nearly always, like this one.
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    powers = np.power(numbers["rope_theta"], exponents.astype(np.float64)).astype(np.float32)
    plain = np.float32(1) / powers
    if kind == "linear":
        return Rope(inverse_frequencies=plain / np.float32(numbers["factor"]), scaling=1.0)
    if kind == "llama3":
        return Rope(inverse_frequencies=_llama3(plain, numbers), scaling=1.0)
    if kind == "yarn":
        return _yarn(powers, head_dim, numbers, config)
    return Rope(inverse_frequencies=plain, scaling=1.0)


def _llama3(plain: np.ndarray, numbers: Fields) -> np.ndarray:
    """Long wavelengths are stretched by `factor`, those in between partly (Llama 3.1)."""
    factor, low, high = numbers["factor"], numbers["low_freq_factor"], numbers["high_freq_factor"]
    context = numbers["original_max_position_embeddings"]
    wavelength = np.float32(2 * math.pi) / plain
    is_long, is_short = wavelength > context / low, wavelength < context / high
    stretched = np.where(is_long, plain / np.float32(factor), plain)
    smooth = (np.float32(context) / wavelength - np.float32(low)) / np.float32(high - low)
    between = (1 - smooth) * stretched / np.float32(factor) + smooth * stretched
    return np.where(~is_short & ~is_long, between, stretched).astype(np.float32)


def _yarn(powers: np.ndarray, head_dim: int, numbers: Fields, config: dict[str, Any]) -> Rope:
    """YaRN (arXiv 2309.00071): slow dimensions are interpolated, quick ones left, a ramp between."""
    context = numbers["original_max_position_embeddings"]
    longest = config.get("max_position_embeddings")
    if numbers.is_set("factor") or not isinstance(longest, int):
        factor = numbers["factor"]
    else:
        factor = longest / context

    def magnitude(multiplier: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0

    if numbers.is_set("attention_factor"):
        scaling = numbers["attention_factor"]
    elif numbers.is_set("mscale") and numbers.is_set("mscale_all_dim"):
        scaling = magnitude(numbers["mscale"]) / magnitude(numbers["mscale_all_dim"])
    else:
        scaling = magnitude(1.0)

    def dimension(rotations: float) -> float:
        ratio = context / (rotations * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(numbers["rope_theta"]))

    low = dimension(numbers.optional("beta_fast", 32.0))
    high = dimension(numbers.optional("beta_slow", 1.0))
    if numbers.is_set("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    steps = np.arange(head_dim // 2, dtype=np.float32)
    ramp = np.clip((steps - np.float32(low)) / np.float32(high - low), 0, 1).astype(np.float32)
    kept = 1 - ramp
    plain, stretched = np.float32(1) / powers, np.float32(1) / (np.float32(factor) * powers)
    return Rope(inverse_frequencies=stretched * (1 - kept) + plain * kept, scaling=scaling)
