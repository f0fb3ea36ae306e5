# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels equal the references bit for bit, interpreted or on a GPU."""

import math

import pytest
import torch
from torch import Tensor

from sparse_bitnet.ops.int8_linear import int8_linear_reference
from sparse_bitnet.ops.nm_mask import nm_mask_reference
from sparse_bitnet.ops.quantize_int8 import quantize_int8_reference, quantize_windows_reference
from sparse_bitnet.ops.select_ternary import select_ternary_reference
from sparse_bitnet.pattern import NMPattern

pytest.importorskip("triton", reason="triton is not installed")
from sparse_bitnet.ops import triton as kernels

# Interpreted, NumPy warns of the NaN and infinities that are put in on purpose.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PATTERNS = ["6:8", "2:4", "2:8", "7:8", "4:8", "8:8", "1:1", "3:7", "1:5", "9:16", "31:32"]
CANONICAL_NAN = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32).item()
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1e-40, -1e-40, 6e4, math.inf, -math.inf, math.nan]


def weights(rows: int, columns: int, dtype: torch.dtype, special: float) -> Tensor:
    weight = torch.randint(-6, 7, (rows, columns)) * 0.25
    chosen = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), weight.shape)]
    return torch.where(torch.rand(weight.shape) < special, chosen, weight).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", PATTERNS)
def test_codes_and_masks_equal_the_reference(text: str, dtype: torch.dtype) -> None:
    pattern, scale = NMPattern.parse(text), torch.tensor(0.9)
    n, m = pattern.n, pattern.m
    # The tile is 1024 weights: one that is not full, and some whole ones.
    for rows, groups, special in ((3, 5, 0.0), (2, 1100 // m + 2, 0.3)):
        weight = weights(rows, groups * m, dtype, special)
        expected_codes, expected_mask = select_ternary_reference(weight, scale, n, m)
        on_device, device_scale = weight.to(DEVICE), scale.to(DEVICE)
        codes, mask = kernels.select_ternary(on_device, device_scale, n, m)
        assert torch.equal(codes.cpu(), expected_codes)
        assert torch.equal(mask.cpu(), expected_mask)
        assert torch.equal(kernels.nm_mask(on_device, n, m).cpu(), nm_mask_reference(weight, n, m))


def test_groups_of_nan_keep_exactly_n() -> None:
    """The largest key of all, in every lane: nothing may look like a lane already taken."""
    for n, m in ((6, 8), (2, 8), (3, 5)):
        weight = torch.full((2, 4 * m), CANONICAL_NAN)
        assert weight.view(torch.int32)[0, 0] & 0x7FFFFFFF >= 0x7F800001
        mask = kernels.nm_mask(weight.to(DEVICE), n, m).cpu()
        assert torch.equal(mask, nm_mask_reference(weight, n, m))


@pytest.mark.parametrize("scale", [0.0, math.nan, math.inf, 2.5e38])
def test_unusual_scales_equal_the_reference(scale: float) -> None:
    weight = torch.tensor([[1e-38, 2.0**-127, 2.0**-149, -(2.0**-148), 0.0, 1.0, -0.4, 0.35]])
    weight_scale = torch.tensor(scale)
    codes, _ = kernels.select_ternary(weight.to(DEVICE), weight_scale.to(DEVICE), 1, 1)
    assert torch.equal(codes.cpu(), select_ternary_reference(weight, weight_scale, 1, 1)[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_around_the_rounding_boundary_are_exact(dtype: torch.dtype) -> None:
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    for scale in torch.logspace(-4, 2, 12):
        near = (scale / 2).to(dtype).view(bits) + torch.arange(-4, 4, dtype=bits)
        weight = torch.cat([near.view(dtype), -near.view(dtype)])
        codes, _ = kernels.select_ternary(weight.to(DEVICE), scale.to(DEVICE), 1, 1)
        assert torch.equal(codes.cpu(), select_ternary_reference(weight, scale, 1, 1)[0])


def test_strided_weights_equal_the_reference() -> None:
    weight, scale = torch.randn(48, 16).t(), torch.tensor(0.8)
    results = kernels.select_ternary(weight.to(DEVICE), scale.to(DEVICE), 6, 8)
    for ours, theirs in zip(results, select_ternary_reference(weight, scale, 6, 8), strict=True):
        assert_same(ours, theirs)


def rows(features: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(7, features)
    x[1] = 0
    x[2] *= 1e-7
    x[3, features // 2] = math.inf
    x[4, 0] = math.nan
    # Products that end on one half exactly: rounded to even.
    x[5] = torch.arange(features) % 255 - 127 + 0.5
    x[5, 0] = 127
    x[6] *= 1e4
    return x.to(dtype)


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("features", [1, 5, 64, 200, 4104])
def test_int8_codes_and_scales_equal_the_reference(features: int, dtype: torch.dtype) -> None:
    x = rows(features, dtype)
    results = kernels.quantize_int8(x.to(DEVICE))
    for ours, theirs in zip(results, quantize_int8_reference(x), strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize("text", ["6:8", "2:4", "4:6", "2:8", "8:10"])
@pytest.mark.parametrize("groups", [1, 9, 300])
def test_codes_in_window_order_equal_the_reference(text: str, groups: int) -> None:
    pattern = NMPattern.parse(text)
    x = rows(groups * pattern.m, torch.bfloat16).reshape(7, 1, -1)
    ours = kernels.quantize_windows(x.to(DEVICE), pattern.n, pattern.m)
    for got, want in zip(ours, quantize_windows_reference(x, pattern.n, pattern.m), strict=True):
        assert got.shape == want.shape
        assert_same(got, want)


def test_no_tokens_give_empty_results() -> None:
    codes, scale = kernels.quantize_int8(torch.empty(0, 3, 16, device=DEVICE))
    assert (codes.shape, scale.shape) == ((0, 3, 16), (0, 3, 1))


# Pattern, in_features (blocks of 256 with and without tails, less than one), out_features, tokens.
CASES = [
    *(("6:8", 256, 8, 1), ("6:8", 40, 7, 3), ("2:4", 600, 9, 2), ("8:8", 64, 5, 17)),
    *(("6:8", 328, 33, 9), ("2:8", 512, 5, 8), ("8:8", 315, 3, 4), ("3:7", 294, 6, 5)),
    *(("7:8", 1096, 2, 1), ("9:16", 784, 1, 33)),
]


def problem(text: str, in_features: int, out_features: int, tokens: int):
    pattern = NMPattern.parse(text)
    weight = torch.randn(out_features, in_features)
    codes, _ = select_ternary_reference(weight, torch.tensor(0.6), pattern.n, pattern.m)
    x_codes = torch.randint(-128, 128, (tokens, in_features), dtype=torch.int8)
    # The largest sums there are, of either sign.
    x_codes[0] = torch.where(codes[0] < 0, 127, -128)
    return codes, x_codes


def on_device(*given):
    return [t.to(DEVICE) if isinstance(t, Tensor) else t for t in given]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_products_equal_the_reference(case) -> None:
    codes, x_codes = problem(*case)
    tokens, rows = len(x_codes), len(codes)
    activation_scale, row_scale, bias = torch.rand(tokens, 1), torch.rand(rows), torch.randn(rows)
    cases = (torch.ones(1), None, torch.float32), (row_scale, bias, torch.bfloat16)
    for scale, b, dtype in cases:
        expected = int8_linear_reference(x_codes, activation_scale, codes, scale, b, dtype)
        y = kernels.int8_linear(*on_device(x_codes, activation_scale, codes, scale, b), dtype)
        # Interpreted, bfloat16 is not rounded to even.
        ulp = 2.0**-7 if dtype == torch.bfloat16 and DEVICE == "cpu" else 0
        torch.testing.assert_close(y.cpu(), expected, rtol=ulp, atol=0)
    none = on_device(x_codes[:0], activation_scale[:0], codes, row_scale, None)
    assert kernels.int8_linear(*none, torch.float32).shape == (0, rows)
