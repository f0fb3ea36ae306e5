"""The Triton activation kernels equal the references bit for bit, interpreted or on a GPU."""

import math

import pytest
import torch

from sparse_bitnet.ops.int8_linear import int8_linear
from sparse_bitnet.ops.quantize_int8 import quantize_int8_reference
from sparse_bitnet.ops.quantize_windows import quantize_windows_reference
from sparse_bitnet.pattern import NMPattern

pytest.importorskip("triton", reason="triton is not installed")
from sparse_bitnet.ops.triton import epilogue, quantize_gather

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
        quantize_gather.quantize_int8(x.to(DEVICE)), quantize_int8_reference(x), strict=True
    ):
        assert_same(ours, theirs)


@pytest.mark.parametrize("text", ["6:8", "2:4", "4:6", "2:8", "8:10"])
@pytest.mark.parametrize("groups", [1, 9, 300])
def test_gathered_codes(text: str, groups: int) -> None:
    pattern = NMPattern.parse(text)
    x = rows(groups * pattern.m, torch.bfloat16).reshape(7, 1, -1)
    ours = quantize_gather.quantize_windows(x.to(DEVICE), pattern.n, pattern.m)
    for got, want in zip(ours, quantize_windows_reference(x, pattern.n, pattern.m), strict=True):
        assert got.shape == want.shape
        assert_same(got, want)


def test_no_tokens() -> None:
    codes, scale = quantize_gather.quantize_int8(torch.empty(0, 3, 16, device=DEVICE))
    assert (codes.shape, scale.shape) == ((0, 3, 16), (0, 3, 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_features", [1, 37, 1025])
def test_epilogue(out_features: int, dtype: torch.dtype) -> None:
    """On sums with more rows and columns than are used."""
    sums = torch.randint(-200_000, 200_000, (6, out_features + 3), dtype=torch.int32)
    activation_scale, row_scale, bias = (
        torch.rand(5, 1),
        torch.rand(out_features),
        torch.randn(out_features),
    )
    for scale, b in ((row_scale, bias.to(dtype)), (row_scale[:1], None), (row_scale[0], bias)):
        arguments = [t if t is None else t.to(DEVICE) for t in (activation_scale, scale, b)]
        y = epilogue.scale_rows(sums.to(DEVICE), out_features, *arguments, dtype)
        expected = sums[:5, :out_features] * (activation_scale * scale)
        expected = (expected if b is None else expected + b).to(dtype)
        # Interpreted, bfloat16 is not rounded to even.
        ulp = 2.0**-7 if dtype == torch.bfloat16 and DEVICE == "cpu" else 0
        torch.testing.assert_close(y.cpu(), expected, rtol=ulp, atol=0)


def test_epilogue_is_that_of_the_reference() -> None:
    x_codes = torch.randint(-128, 128, (4, 16), dtype=torch.int8)
    codes = torch.randint(-1, 2, (6, 16), dtype=torch.int8)
    activation_scale, scale, bias = torch.rand(4, 1), torch.rand(6), torch.randn(6)
    sums = (x_codes.int() @ codes.int().t()).to(DEVICE)
    arguments = [t.to(DEVICE) for t in (activation_scale, scale, bias)]
    y = epilogue.scale_rows(sums, 6, *arguments, torch.float32)
    assert_same(y, int8_linear(x_codes, activation_scale, codes, scale, bias, torch.float32))
