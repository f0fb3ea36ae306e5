"""N:M semi-structured sparsity: which n of every m consecutive weights are kept.

Groups are contiguous along `in_features` (the last dimension). A weight is kept when fewer than n
weights of its group come before it in the order "larger magnitude first, lower index first", so every
group keeps exactly n and the result does not depend on a sorting routine (paper, section 2.2).
"""

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_bitnet.errors import UserError

MAX_GROUP = 32


@dataclass(frozen=True)
class NMPattern:
    """Keep `n` of every `m` consecutive weights along `in_features`; n == m is dense.

    Raises `UserError` unless 1 <= n <= m <= 32.
    """

    n: int
    m: int

    def __post_init__(self) -> None:
        if not 1 <= self.n <= self.m <= MAX_GROUP:
            raise UserError(f"pattern {self.n}:{self.m}: needs 1 <= n <= m <= {MAX_GROUP}")

    @classmethod
    def parse(cls, text: str) -> "NMPattern":
        """Read "n:m", for example "6:8". Raises `UserError` for anything else."""
        match = re.fullmatch(r"\s*(\d{1,3})\s*:\s*(\d{1,3})\s*", text)
        if match is None:
            raise UserError(f"pattern {text!r}: write it as n:m, for example 6:8 or 2:4")
        return cls(int(match[1]), int(match[2]))

    @property
    def is_dense(self) -> bool:
        return self.n == self.m

    @property
    def density(self) -> float:
        """Share of the weights that are kept, n / m."""
        return self.n / self.m

    def check_divides(self, in_features: int, name: str) -> None:
        """Raise `UserError`, naming the layer and the sizes, when groups of m do not fill a row."""
        if not self.is_dense and in_features % self.m:
            raise UserError(
                f"layer {name}: in_features {in_features} is not a multiple of {self.m}, so the "
                f"pattern {self} does not fit; choose another m or leave the layer dense"
            )

    def __str__(self) -> str:
        return f"{self.n}:{self.m}"


def nm_mask(weight: Tensor, pattern: NMPattern) -> Tensor:
    """The n largest |weight| of every group of m, ties to the lower index.

    Args:
        weight: float tensor [..., in_features], in_features a multiple of m.
        pattern: which n of m.

    Returns a bool tensor of the same shape with exactly n ones in every group. No gradient flows.

    Raises `UserError` when m does not divide in_features.
    """
    pattern.check_divides(weight.shape[-1], "(nm_mask)")
    return torch.ops.sparse_bitnet.nm_mask(weight.detach(), pattern.n, pattern.m)


def mask_flip_rate(previous: Tensor, current: Tensor) -> Tensor:
    """Share of positions where two masks differ, in [0, 1] (paper, eq. 6).

    Args:
        previous, current: bool tensors of one shape.

    Returns a float64 scalar tensor.
    """
    assert previous.shape == current.shape, (previous.shape, current.shape)
    return (previous ^ current).sum(dtype=torch.float64) / current.numel()


def magnitude_keys(weight: Tensor) -> Tensor:
    """Integers that order like |weight|: the bits of the absolute value.

    Comparing integers gives a total order (NaN above infinity), the same one in every kernel, and it
    is exact: no comparison depends on flush-to-zero modes.
    """
    if weight.dtype == torch.float64:
        return weight.abs().view(torch.int64)
    return weight.float().abs().view(torch.int32)


def nm_mask_reference(weight: Tensor, n: int, m: int) -> Tensor:
    """Compare and count: m passes over the weights, no sorting. Defines what every kernel returns."""
    if n == m:
        return torch.ones(weight.shape, dtype=torch.bool, device=weight.device)
    keys = magnitude_keys(weight.contiguous()).unflatten(-1, (-1, m))
    lane = torch.arange(m, device=weight.device)
    ahead = torch.zeros(keys.shape, dtype=torch.int8, device=weight.device)
    for j in range(m):
        other = keys[..., j : j + 1]
        ahead += (other > keys) | ((other == keys) & (lane > j))
    return (ahead < n).flatten(-2)


# Registered by hand rather than through @custom_op, whose call costs three times as much.
_LIBRARY = torch.library.Library("sparse_bitnet", "FRAGMENT")
_LIBRARY.define("nm_mask(Tensor weight, int n, int m) -> Tensor")
_LIBRARY.impl("nm_mask", nm_mask_reference, "CompositeExplicitAutograd")


@torch.library.register_fake("sparse_bitnet::nm_mask", lib=_LIBRARY)
def _(weight: Tensor, n: int, m: int) -> Tensor:
    return torch.empty(weight.shape, dtype=torch.bool, device=weight.device)
