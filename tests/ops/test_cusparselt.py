# SPDX-License-Identifier: Apache-2.0
"""The sparse product's reference: windows, 2:4 check, exact sums; and refusals without the hardware."""

import pytest
import torch

from sparse_bitnet.errors import UserError
from sparse_bitnet.ops import backends
from sparse_bitnet.ops.int8_linear import compress_windows, int8_linear, sparse_int8_linear
from sparse_bitnet.ops.quantize_int8 import quantize_int8, quantize_windows
from sparse_bitnet.ops.select_ternary import select_ternary_reference
from sparse_bitnet.ops.windows import window_expand
from sparse_bitnet.pattern import NMPattern

ops = torch.ops.sparse_bitnet
PATTERNS = ["6:8", "2:4", "2:8", "5:8", "4:6"]


def layer(text: str, out_features: int = 20, groups: int = 13):
    pattern = NMPattern.parse(text)
    weight = torch.randn(out_features, groups * pattern.m)
    codes, _ = select_ternary_reference(weight, torch.tensor(0.5), pattern.n, pattern.m)
    return pattern, codes, torch.rand(out_features), torch.randn(out_features)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("text", PATTERNS)
def test_every_layout_of_the_weight_gives_the_same_bits(text, dtype):
    pattern, codes, weight_scale, bias = layer(text)
    x = torch.randn(3, 5, codes.shape[1])
    dense = int8_linear(*quantize_int8(x), codes, weight_scale, bias, dtype)
    expanded = window_expand(codes, pattern)
    compressed = compress_windows(expanded)
    assert compressed.shape[0] % 32 == 0
    arguments = (*quantize_windows(x, pattern), compressed, 20, weight_scale, bias, dtype)
    assert torch.equal(sparse_int8_linear(*arguments), dense)


def test_sparse_int8_linear_passes_opcheck():
    pattern, codes, weight_scale, bias = layer("6:8")
    x = torch.randn(4, codes.shape[1])
    windows = quantize_windows(x, pattern)
    compressed = compress_windows(window_expand(codes, pattern))
    tail = (weight_scale, bias, torch.bfloat16)
    tests = (
        (ops.quantize_windows, (x, 6, 8)),
        (ops.sparse_int8_linear, (*windows, compressed, 20, *tail)),
    )
    for op, arguments in tests:
        torch.library.opcheck(op.default, arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_choice_without_the_hardware_is_an_error_that_says_why(monkeypatch):
    monkeypatch.setenv("SPARSE_BITNET_KERNEL", "triton")
    with pytest.raises(UserError, match=r"SPARSE_BITNET_KERNEL=triton: .*CUDA"):
        backends.check_choice()


def test_status_gives_a_reason():
    rows = {row.name: row for row in backends.status()}
    assert rows["triton"].reason
    assert (
        rows["cusparselt"].reason == backends.cusparselt_unavailable() or rows["cusparselt"].in_use
    )
