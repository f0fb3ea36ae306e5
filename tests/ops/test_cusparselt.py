# SPDX-License-Identifier: Apache-2.0
"""The sparse product's reference: windows, 2:4 check, exact sums; and refusals without the hardware."""

import pytest
import torch

from sparse_bitnet.errors import UserError
from sparse_bitnet.ops import backends
from sparse_bitnet.ops import sparse_int8_linear as sparse_int8_linear_module
from sparse_bitnet.ops.int8_linear import int8_linear
from sparse_bitnet.ops.quantize_int8 import quantize_int8
from sparse_bitnet.ops.quantize_windows import quantize_windows
from sparse_bitnet.ops.select_ternary import select_ternary_reference
from sparse_bitnet.ops.sparse_int8_linear import compress_windows, sparse_int8_linear
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
def test_every_form_of_the_weight_gives_the_same_bits(text, dtype):
    pattern, codes, weight_scale, bias = layer(text)
    x = torch.randn(3, 5, codes.shape[1])
    dense = int8_linear(*quantize_int8(x), codes, weight_scale, bias, dtype)
    expanded = window_expand(codes, pattern)
    compressed = compress_windows(expanded)
    assert compressed.shape[0] % 32 == 0
    arguments = (*quantize_windows(x, pattern), compressed, 20, weight_scale, bias, dtype)
    assert torch.equal(sparse_int8_linear(*arguments), dense)


def test_opcheck():
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


def library_of(monkeypatch):
    """The library on the CPU: what was searched, and with what it multiplied."""
    searched, used = [], []

    class Library:
        @staticmethod
        def mm_search(compressed, x, bias, alpha, dtype, transposed):
            searched.append((x.shape[1], bias, dtype, transposed))
            return 2, 4, 1, 99

    def product(compressed, x, bias, alpha, dtype, transposed, alg_id, split_k, split_k_mode):
        assert x.shape[1] % 16 == 0
        used.append((alg_id, split_k, split_k_mode))
        sums = (compressed.long() @ x.long()).t()
        return (sums if alpha is None else sums * alpha).to(dtype).contiguous()

    monkeypatch.setattr(torch._C, "_cusparselt", Library, raising=False)
    monkeypatch.setattr(torch, "_cslt_sparse_mm", product)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(sparse_int8_linear_module, "_ALGORITHMS", {})
    return searched, used


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [0, 1, 16, 40])
@pytest.mark.parametrize("rows", [20, 64])
def test_the_library_is_given_what_it_takes(monkeypatch, rows, tokens, dtype):
    library_of(monkeypatch)
    pattern, codes, weight_scale, bias = layer("6:8", rows)
    x = torch.randn(tokens, codes.shape[1])
    compressed = compress_windows(window_expand(codes, pattern))
    for scale, b in ((weight_scale, bias), (weight_scale[:1], None)):
        expected = int8_linear(*quantize_int8(x), codes, scale, b, dtype)
        y = sparse_int8_linear_module.sparse_tensor_cores(
            *quantize_windows(x, pattern), compressed, rows, scale, b, dtype
        )
        assert (y.shape, y.dtype) == (expected.shape, dtype)
        # In bfloat16 the library scales rows and rounds, then tokens are scaled, then the bias is added.
        bound = 2.0**-7 if dtype == torch.bfloat16 else 0
        largest = expected.float().abs().max() if tokens else 0
        torch.testing.assert_close(y, expected, rtol=bound, atol=float(bound * largest))


def test_the_fastest_algorithm_is_searched_once_a_shape_and_type(monkeypatch):
    searched, used = library_of(monkeypatch)
    compressed, scale = torch.ones(32, 64, dtype=torch.int8), torch.ones(1)

    def product(tokens, dtype=torch.float32):
        x, activation_scale = torch.ones(tokens, 64, dtype=torch.int8), torch.ones(tokens, 1)
        return sparse_int8_linear_module.sparse_tensor_cores(
            x, activation_scale, compressed, 32, scale, None, dtype
        )

    for tokens in (3, 16, 17):
        assert (product(tokens) == 64).all()
    product(3, torch.bfloat16)
    assert searched == [
        (16, None, torch.int32, True),
        (32, None, torch.int32, True),
        (16, None, torch.bfloat16, True),
    ]
    assert used == [(2, 4, 1)] * 4
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    product(50)
    assert used[-1] == (0, 1, -1)


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
