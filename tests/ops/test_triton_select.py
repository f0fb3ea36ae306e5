# SPDX-License-Identifier: Apache-2.0
"""The Triton selection kernel equals the references bit for bit, interpreted or on a GPU."""

import math

import pytest
import torch
from torch import Tensor

from sparse_bitnet.ops.absmean import absmean_reference
from sparse_bitnet.ops.nm_mask import nm_mask_reference
from sparse_bitnet.ops.operands import unpack_mask
from sparse_bitnet.ops.select_ternary import select_ternary_bits_reference, select_ternary_reference

pytest.importorskip("triton", reason="triton is not installed")
from sparse_bitnet.ops.triton import select

# Interpreted, NumPy warns of the NaN and infinities that are put in on purpose.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PATTERNS = [
    (6, 8),
    (2, 4),
    (2, 8),
    (7, 8),
    (4, 8),
    (8, 8),
    (1, 1),
    (3, 7),
    (1, 5),
    (9, 16),
    (31, 32),
]
CANONICAL_NAN = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32).item()
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1e-40, -1e-40, 6e4, math.inf, -math.inf, math.nan]


def weights(rows: int, columns: int, dtype: torch.dtype, special: float) -> Tensor:
    weight = torch.randint(-6, 7, (rows, columns)) * 0.25
    chosen = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), weight.shape)]
    return torch.where(torch.rand(weight.shape) < special, chosen, weight).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "m"), PATTERNS)
def test_codes_mask_bits_and_flips(n: int, m: int, dtype: torch.dtype) -> None:
    scale = torch.tensor(0.9)
    # The tile is 1024 weights: one that is not full, and some whole ones.
    for rows, groups, special in ((3, 5, 0.0), (2, 1100 // m + 2, 0.3)):
        weight = weights(rows, groups * m, dtype, special)
        expected_codes, expected_mask = select_ternary_reference(weight, scale, n, m)
        on_device, device_scale = weight.to(DEVICE), scale.to(DEVICE)
        codes, mask = select.select_ternary(on_device, device_scale, n, m)
        assert torch.equal(codes.cpu(), expected_codes)
        assert torch.equal(mask.cpu(), expected_mask)
        assert torch.equal(select.nm_mask(on_device, n, m).cpu(), nm_mask_reference(weight, n, m))
        codes, words, flips = select.select_ternary_bits(on_device, device_scale, n, m, None)
        assert torch.equal(codes.cpu(), expected_codes)
        assert torch.equal(unpack_mask(words, m).cpu(), expected_mask)
        assert flips.item() == 0
        moved = weights(rows, groups * m, dtype, special)
        found = select.select_ternary_bits(moved.to(DEVICE), device_scale, n, m, words)
        expected = select_ternary_bits_reference(moved, scale, n, m, words.cpu())
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours.cpu(), theirs)
        after = unpack_mask(expected[1], m)
        assert expected[2].item() == (expected_mask ^ after).sum().item()


def test_words_of_eight_lanes_are_the_little_endian_bitmap() -> None:
    weight = torch.randn(3, 48)
    scale = torch.tensor(1.0, device=DEVICE)
    _, words, _ = select.select_ternary_bits(weight.to(DEVICE), scale, 6, 8, None)
    assert words.dtype == torch.uint8
    mask = nm_mask_reference(weight, 6, 8)
    powers = 1 << torch.arange(8)
    assert torch.equal(words.cpu().long(), (mask.unflatten(-1, (-1, 8)) * powers).sum(-1))


def test_groups_of_nan_keep_exactly_n() -> None:
    """The largest key of all, in every lane: nothing may look like a lane already taken."""
    for n, m in ((6, 8), (2, 8), (3, 5)):
        weight = torch.full((2, 4 * m), CANONICAL_NAN)
        assert weight.view(torch.int32)[0, 0] & 0x7FFFFFFF >= 0x7F800001
        mask = select.nm_mask(weight.to(DEVICE), n, m).cpu()
        assert torch.equal(mask, nm_mask_reference(weight, n, m))


@pytest.mark.parametrize("scale", [2.0**-126, 3 * 2.0**-149, -0.7, 0.0, math.nan, math.inf, 2.5e38])
def test_unusual_scales(scale: float) -> None:
    weight = torch.tensor([[1e-38, 2.0**-127, 2.0**-149, -(2.0**-148), 0.0, 1.0, -0.4, 0.35]])
    weight_scale = torch.tensor(scale)
    codes, _ = select.select_ternary(weight.to(DEVICE), weight_scale.to(DEVICE), 1, 1)
    assert torch.equal(codes.cpu(), select_ternary_reference(weight, weight_scale, 1, 1)[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_around_the_rounding_boundary(dtype: torch.dtype) -> None:
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    for scale in torch.logspace(-4, 2, 12):
        near = (scale / 2).to(dtype).view(bits) + torch.arange(-4, 4, dtype=bits)
        weight = torch.cat([near.view(dtype), -near.view(dtype)])
        codes, _ = select.select_ternary(weight.to(DEVICE), scale.to(DEVICE), 1, 1)
        assert torch.equal(codes.cpu(), select_ternary_reference(weight, scale, 1, 1)[0])


@pytest.mark.parametrize("size", [1, 8191, 8192, 20_001])
def test_absmean(size: int) -> None:
    weight = torch.randn(size).bfloat16()
    assert select.absmean(weight.to(DEVICE)).cpu() == absmean_reference(weight)
    assert select.absmean(0 * weight.to(DEVICE)).item() == torch.tensor(1e-5).item()


def test_strided_weights() -> None:
    weight, scale = torch.randn(48, 16).t(), torch.tensor(0.8)
    codes, mask = select.select_ternary(weight.to(DEVICE), scale.to(DEVICE), 6, 8)
    for ours, theirs in zip(
        (codes, mask), select_ternary_reference(weight, scale, 6, 8), strict=True
    ):
        assert torch.equal(ours.cpu(), theirs)
