# SPDX-License-Identifier: Apache-2.0
"""The Triton activation kernels equal the references bit for bit, interpreted or on a GPU."""

import math

import pytest
import torch

from sparse_bitnet.ops.quantize_int8 import quantize_int8_reference
from sparse_bitnet.ops.quantize_windows import quantize_windows_reference
from sparse_bitnet.pattern import NMPattern

pytest.importorskip("triton", reason="triton is not installed")
from sparse_bitnet.ops.triton import quantize

# Interpreted, NumPy warns of the NaN and infinities that are put in on purpose.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


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
def test_codes_and_scales(features: int, dtype: torch.dtype) -> None:
    x = rows(features, dtype)
    for ours, theirs in zip(
        quantize.quantize_int8(x.to(DEVICE)), quantize_int8_reference(x), strict=True
    ):
        assert_same(ours, theirs)


@pytest.mark.parametrize("text", ["6:8", "2:4", "4:6", "2:8", "8:10"])
@pytest.mark.parametrize("groups", [1, 9, 300])
def test_gathered_codes(text: str, groups: int) -> None:
    pattern = NMPattern.parse(text)
    x = rows(groups * pattern.m, torch.bfloat16).reshape(7, 1, -1)
    ours = quantize.quantize_windows(x.to(DEVICE), pattern.n, pattern.m)
    for got, want in zip(ours, quantize_windows_reference(x, pattern.n, pattern.m), strict=True):
        assert got.shape == want.shape
        assert_same(got, want)


def test_no_tokens() -> None:
    codes, scale = quantize.quantize_int8(torch.empty(0, 3, 16, device=DEVICE))
    assert (codes.shape, scale.shape) == ((0, 3, 16), (0, 3, 1))
