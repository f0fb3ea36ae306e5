# SPDX-License-Identifier: Apache-2.0
"""The Triton product of codes equals the reference, interpreted or on a GPU."""

import pytest
import torch
from torch import Tensor

from sparse_bitnet.ops.int8_linear import int8_linear_reference
from sparse_bitnet.ops.select_ternary import select_ternary_reference
from sparse_bitnet.pattern import NMPattern

pytest.importorskip("triton", reason="triton is not installed")
from sparse_bitnet.ops.triton import int8_dot

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


def on_device(*given):
    return [t.to(DEVICE) if isinstance(t, Tensor) else t for t in given]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_reference(case) -> None:
    _, codes, x_codes = problem(*case)
    tokens, rows = len(x_codes), len(codes)
    activation_scale, row_scale, bias = torch.rand(tokens, 1), torch.rand(rows), torch.randn(rows)
    for scale, b, dtype in (
        (torch.ones(1), None, torch.float32),
        (row_scale, bias, torch.bfloat16),
    ):
        expected = int8_linear_reference(x_codes, activation_scale, codes, scale, b, dtype)
        y = int8_dot.int8_linear(*on_device(x_codes, activation_scale, codes, scale, b), dtype)
        # Interpreted, bfloat16 is not rounded to even.
        ulp = 2.0**-7 if dtype == torch.bfloat16 and DEVICE == "cpu" else 0
        torch.testing.assert_close(y.cpu(), expected, rtol=ulp, atol=0)


def test_no_tokens_and_any_int8_codes() -> None:
    codes, x = torch.randint(-128, 128, (2, 9, 300), dtype=torch.int8)
    arguments = (torch.rand(9, 1), codes, torch.rand(9), None, torch.float32)
    empty = int8_dot.int8_linear(*on_device(x[:0], arguments[0][:0], *arguments[1:]))
    assert empty.shape == (0, 9)
    y = int8_dot.int8_linear(*on_device(x, *arguments), False).cpu()
    assert torch.equal(y, int8_linear_reference(x, *arguments, ternary=False))
