"""The Triton products with packed rows equal the integer product, interpreted or on a GPU."""

import pytest
import torch
from torch import Tensor

from sparse_bitnet.ops.int8_linear import int8_linear_reference
from sparse_bitnet.ops.select_ternary import select_ternary_reference
from sparse_bitnet.packing.codec import pack
from sparse_bitnet.packing.formats import holds_pattern
from sparse_bitnet.pattern import NMPattern

pytest.importorskip("triton", reason="triton is not installed")
from sparse_bitnet.ops.triton import packed_matvec

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Pattern, in_features (blocks of 256 with and without tails, less than one), out_features, tokens.
CASES = [
    ("6:8", 256, 8, 1),
    ("6:8", 40, 7, 3),
    ("2:4", 600, 9, 2),
    ("8:8", 64, 5, 17),
    ("6:8", 328, 33, 9),
    ("2:8", 512, 5, 8),
    ("5:8", 128, 3, 20),
    ("8:8", 315, 3, 4),
    ("3:7", 294, 6, 5),
    ("7:8", 1096, 2, 1),
    ("9:16", 784, 1, 33),
    ("6:8", 24, 1, 40),
]


def problem(text: str, in_features: int, out_features: int, tokens: int):
    pattern = NMPattern.parse(text)
    weight = torch.randn(out_features, in_features)
    codes, _ = select_ternary_reference(weight, torch.tensor(0.6), pattern.n, pattern.m)
    x_codes = torch.randint(-128, 128, (tokens, in_features), dtype=torch.int8)
    # The largest sums there are, of either sign.
    x_codes[0] = torch.where(codes[0] < 0, 127, -128)
    return pattern, codes, x_codes


def product(format: str, pattern: NMPattern, packed: Tensor, x_codes: Tensor, *more) -> Tensor:
    x_codes, packed = x_codes.to(DEVICE), packed.to(DEVICE)
    scales = [
        part if part is None or isinstance(part, torch.dtype) else part.to(DEVICE) for part in more
    ]
    if format == "i2":
        return packed_matvec.i2_linear(x_codes, scales[0], packed, *scales[1:]).cpu()
    return packed_matvec.nm_bitmap_linear(x_codes, scales[0], packed, pattern, *scales[1:]).cpu()


@pytest.mark.parametrize("format", ["i2", "nm-bitmap"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_reference(format: str, case) -> None:
    pattern, codes, x_codes = problem(*case)
    if not holds_pattern(format, pattern):
        pytest.skip(f"{format} does not hold {pattern}")
    packed = pack(codes, format, pattern)
    tokens, rows = len(x_codes), len(codes)
    activation_scale, row_scale, bias = torch.rand(tokens, 1), torch.rand(rows), torch.randn(rows)
    for scale, b, dtype in (
        (torch.ones(1), None, torch.float32),
        (row_scale, bias, torch.bfloat16),
    ):
        y = product(format, pattern, packed, x_codes, activation_scale, scale, b, dtype)
        expected = int8_linear_reference(x_codes, activation_scale, codes, scale, b, dtype)
        # Interpreted, bfloat16 is not rounded to even.
        ulp = 2.0**-7 if dtype == torch.bfloat16 and DEVICE == "cpu" else 0
        torch.testing.assert_close(y, expected, rtol=ulp, atol=0)


def test_the_table_of_codes() -> None:
    table = packed_matvec._signed_codes(torch.device("cpu")).view(torch.int8).view(16, 16, 4)
    for nibble in range(16):
        ones = [bit for bit in range(4) if nibble >> bit & 1]
        for signs in range(16):
            expected = [0] * 4
            for used, bit in enumerate(ones):
                expected[bit] = -1 if signs >> used & 1 else 1
            assert table[nibble, signs].tolist() == expected
