# SPDX-License-Identifier: Apache-2.0
"""Ternary weights with their scales: the fewest scales that say the same, and those of plain floats.

Many models are published as floats in which each run of a row holds only 0 and +s and -s. What is read
from them is exact or nothing. Importing this module imports no torch.
"""

from typing import TYPE_CHECKING, NamedTuple, Optional

from sparse_bitnet.errors import UserError
from sparse_bitnet.packing.formats import SCALE_GROUPS

if TYPE_CHECKING:
    from torch import Tensor


class TernaryWeight(NamedTuple):
    """value = codes * weight_scale, each scale for a run of its row."""

    codes: "Tensor"
    """int8 [out_features, in_features] in {-1, 0, 1}, masked."""
    weight_scale: "Tensor"
    """float32 scalar; or float32, float16 or bfloat16 [out_features, 1] or [out_features, groups]."""

    def values(self) -> "Tensor":
        """The weights, float32 [out_features, in_features]."""
        if self.weight_scale.numel() == 1:
            return self.codes * self.weight_scale
        runs = self.codes.unflatten(1, (self.weight_scale.shape[1], -1))
        return (runs * self.weight_scale.float()[..., None]).flatten(1)


def with_fewest_scales(codes: "Tensor", scales: "Tensor", layer: str) -> TernaryWeight:
    """Codes with scales [out_features or 1, runs of a row], as few of them as give the same weights:
    one, one a row, or one for a count of `SCALE_GROUPS`.

    The scale of codes that are all zero does not matter; it comes back as 0, as 1 for a whole matrix.

    Raises `UserError`, naming the layer, for codes above 1, scales that are not finite, and runs that are
    no such count.
    """
    import torch

    low, high = codes.aminmax()
    if low < -1 or high > 1:
        raise UserError(f"layer {layer} is not ternary: it has codes from {low} to {high}")
    if not scales.isfinite().all():
        raise UserError(f"layer {layer}: its weight scale is not finite")
    rows, columns = codes.shape
    scales = scales.expand(rows, -1)
    run = columns // scales.shape[1]
    matters = codes.view(rows, -1, run).any(-1)
    if not matters.any():
        return TernaryWeight(codes, torch.tensor(1.0))
    if (scales.masked_fill(~matters, 1) == 0).any():
        raise UserError(f"layer {layer}: its weight scale is zero where codes are not")
    if (scales.masked_fill(~matters, 1) < 0).any():
        codes = (codes.view(rows, -1, run) * scales.sign()[..., None].to(torch.int8)).view(rows, -1)
        scales = scales.abs()
    if (scale := _common(scales.reshape(1, -1), matters.reshape(1, -1))) is not None:
        return TernaryWeight(codes, scale.float().view(()))
    for wider in (columns, *sorted(SCALE_GROUPS, reverse=True)):
        if wider % run or columns % wider:
            continue
        parts = (rows * columns // wider, wider // run)
        scale = _common(scales.reshape(parts), matters.reshape(parts))
        if scale is not None:
            return TernaryWeight(codes, scale.view(rows, -1))
    raise UserError(
        f"layer {layer}: a scale for every {run} weights of its rows of {columns} is not covered; "
        f"{', '.join(map(str, SCALE_GROUPS))} are"
    )


def ternary_of_floats(weight: "Tensor", layer: str) -> TernaryWeight | None:
    """Codes and scales of a float matrix, exact; None where some run of a row has more than three values,
    0 and +s and -s. Raises `UserError`, naming the layer, for values that are not finite."""
    import torch

    rows, columns = weight.shape
    run = next((g for g in SCALE_GROUPS if columns % g == 0), columns)
    magnitudes = weight.abs()
    if not magnitudes.max().isfinite():
        raise UserError(f"layer {layer}: its weights are not finite")
    runs = magnitudes.view(rows, -1, run)
    scales = runs.amax(-1)
    if not ((runs == 0) | (runs == scales[..., None])).all():
        return None
    codes = weight.sign().to(torch.int8)
    return with_fewest_scales(codes, scales, layer)


def _common(scales: "Tensor", matters: "Tensor") -> Optional["Tensor"]:
    """[parts, runs] -> the scale that all runs of a part share, [parts]; None where some differ."""
    highest = scales.masked_fill(~matters, 0).amax(1)
    same = (scales == highest[:, None]) | ~matters
    return highest if same.all() else None
