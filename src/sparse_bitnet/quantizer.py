"""Ternary weights (absmean) and int8 activations (absmax, per token), as BitNet b1.58 defines them.

`quantize_x` returns (codes, scale) with value = codes * scale; `fake_quantize_x` returns the values
as floats and passes the gradient straight through. Everything is computed in float32 whatever the
type of the input, so a bfloat16 master and its float32 copy give the same codes.
"""

import torch
from torch import Tensor

from sparse_bitnet.sparsity import count_flips, nm_mask_reference, pack_mask, word_dtype

SCALE_FLOOR = 1e-5
"""Smallest weight scale, and smallest absolute maximum of a token."""


def absmean(weight: Tensor) -> Tensor:
    """mean(|weight|) over the whole matrix, at least 1e-5: the ternary weight scale.

    The sum is accumulated in float64 and rounded to float32 once, so that another order of summation
    (threads, shards, kernels) gives another float32 only when the exact mean lies within about
    numel * 2**-53 of a rounding boundary, relatively. An empty weight has the floor as its scale.
    Returns a float32 scalar tensor without gradient.
    """
    return torch.ops.sparse_bitnet.absmean(weight.detach())


def quantize_ternary(weight: Tensor, weight_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """codes = clip(round_half_even(weight / weight_scale), -1, 1).

    Args:
        weight: float tensor of any shape.
        weight_scale: float32 scalar; `absmean(weight)` when not given.

    Returns (int8 codes of the shape of `weight`, float32 scalar scale).
    """
    scale = absmean(weight) if weight_scale is None else weight_scale
    codes, _ = torch.ops.sparse_bitnet.select_ternary(weight.detach(), scale, 1, 1)
    return codes, scale


def quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 per token: 127 / max(|x|) over the last dimension, maximum at least 1e-5.

    Args:
        x: float tensor [..., features].

    Returns (int8 codes [..., features], float32 activation_scale [..., 1]).
    """
    return torch.ops.sparse_bitnet.quantize_int8(x.detach())


def fake_quantize_ternary(weight: Tensor) -> Tensor:
    """The ternary weight as floats of the dtype of `weight`; the gradient is the identity."""
    codes, scale = quantize_ternary(weight)
    return straight_through(weight, (codes * scale).to(weight.dtype))


def fake_quantize_int8(x: Tensor) -> Tensor:
    """The int8 activation as floats of the dtype of `x`; the gradient is the identity."""
    codes, scale = quantize_int8(x)
    return straight_through(x, (codes * scale).to(x.dtype))


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, latent: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def straight_through(latent: Tensor, value: Tensor) -> Tensor:
    """`value` in the forward pass, the identity onto `latent` in the backward pass.

    Exact in both directions, unlike `latent + (value - latent).detach()`, which rounds twice.
    """
    return _StraightThrough.apply(latent, value)


def absmean_reference(weight: Tensor) -> Tensor:
    return mean_to_scale(abs_sum(weight), weight.numel())


def abs_sum(weight: Tensor) -> Tensor:
    """sum(|weight|), float64 scalar: what `absmean` is made of, for a matrix that lies in parts."""
    # Row sums first: a float64 copy of a whole matrix would be twice its size.
    magnitudes = weight.abs()
    if weight.dim() > 1:
        magnitudes = magnitudes.flatten(0, -2).sum(-1, dtype=torch.float64)
    return magnitudes.sum(dtype=torch.float64)


def mean_to_scale(total: Tensor, count: int | Tensor) -> Tensor:
    """The float32 weight scale of `count` weights whose magnitudes sum to `total` (float64)."""
    count = count.clamp_min(1) if isinstance(count, Tensor) else max(count, 1)
    return (total / count).float().clamp_min(SCALE_FLOOR)


def select_ternary_reference(
    weight: Tensor, weight_scale: Tensor, n: int, m: int
) -> tuple[Tensor, Tensor]:
    weight = weight.contiguous()
    mask = nm_mask_reference(weight, n, m)
    codes = (weight.float() / weight_scale).round().clamp(-1, 1).to(torch.int8)
    return codes * mask, mask


def select_ternary_bits_reference(
    weight: Tensor, weight_scale: Tensor, n: int, m: int, previous: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes as of `select_ternary`, the mask as of `pack_mask`, and its flips against `previous`."""
    codes, mask = torch.ops.sparse_bitnet.select_ternary(weight, weight_scale, n, m)
    words = pack_mask(mask, m)
    flips = count_flips(words if previous is None else previous, words)
    return codes, words, flips


def quantize_int8_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    values = x.float().contiguous()
    absmax = values.abs().amax(-1, keepdim=True).clamp_min(SCALE_FLOOR)
    codes = (values * (127.0 / absmax)).round().clamp(-128, 127).to(torch.int8)
    return codes, absmax / 127.0


def pack_codes(codes: Tensor) -> Tensor:
    """Four codes a byte, the first in the lowest bits, each stored as code + 1.

    Args:
        codes: int8 [rows, in_features] in {-1, 0, 1}.

    Returns uint8 [rows, ceil(in_features / 4)], for sending; files have `packing`'s formats.
    """
    rows, width = codes.shape
    padded = torch.nn.functional.pad(codes + 1, (0, -width % 4)).to(torch.uint8)
    lanes = padded.view(rows, -(-width // 4), 4)
    return lanes[..., 0] | lanes[..., 1] << 2 | lanes[..., 2] << 4 | lanes[..., 3] << 6


def unpack_codes(packed: Tensor, in_features: int) -> Tensor:
    """Inverse of `pack_codes`: int8 [rows, in_features]."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=packed.device)
    lanes = (packed.unsqueeze(-1) >> shifts) & 3
    return lanes.flatten(-2)[..., :in_features].to(torch.int8) - 1


_LIBRARY = torch.library.Library("sparse_bitnet", "FRAGMENT")
_LIBRARY.define("absmean(Tensor weight) -> Tensor")
_LIBRARY.define(
    "select_ternary(Tensor weight, Tensor weight_scale, int n, int m) -> (Tensor codes, Tensor mask)"
)
_LIBRARY.define(
    "select_ternary_bits(Tensor weight, Tensor weight_scale, int n, int m, Tensor? previous) -> "
    "(Tensor codes, Tensor mask_words, Tensor flips)"
)
_LIBRARY.define("quantize_int8(Tensor x) -> (Tensor codes, Tensor activation_scale)")
_LIBRARY.impl("absmean", absmean_reference, "CompositeExplicitAutograd")
_LIBRARY.impl("select_ternary", select_ternary_reference, "CompositeExplicitAutograd")
_LIBRARY.impl("select_ternary_bits", select_ternary_bits_reference, "CompositeExplicitAutograd")
_LIBRARY.impl("quantize_int8", quantize_int8_reference, "CompositeExplicitAutograd")


@torch.library.register_fake("sparse_bitnet::absmean", lib=_LIBRARY)
def _(weight: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.float32, device=weight.device)


@torch.library.register_fake("sparse_bitnet::select_ternary", lib=_LIBRARY)
def _(weight: Tensor, weight_scale: Tensor, n: int, m: int) -> tuple[Tensor, Tensor]:
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    return codes, torch.empty_like(codes, dtype=torch.bool)


@torch.library.register_fake("sparse_bitnet::select_ternary_bits", lib=_LIBRARY)
def _(
    weight: Tensor, weight_scale: Tensor, n: int, m: int, previous: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    shape = (*weight.shape[:-1], weight.shape[-1] // m)
    words = torch.empty(shape, dtype=word_dtype(m), device=weight.device)
    return codes, words, torch.empty((), dtype=torch.int64, device=weight.device)


@torch.library.register_fake("sparse_bitnet::quantize_int8", lib=_LIBRARY)
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scale = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    return codes, scale
