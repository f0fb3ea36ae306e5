"""The sparse product's reference: windows, 2:4 check, exact sums; and refusals without the hardware."""

import pytest
import torch

from sparse_bitnet.errors import UserError
from sparse_bitnet.ops import backends
from sparse_bitnet.ops import sparse_int8_linear as sparse_int8_linear_module
from sparse_bitnet.ops.int8_linear import dense_product, int8_linear, int8_tensor_cores
from sparse_bitnet.ops.packed_int8_linear import packed_int8_linear
from sparse_bitnet.ops.quantize_int8 import quantize_int8
from sparse_bitnet.ops.quantize_windows import quantize_windows
from sparse_bitnet.ops.select_ternary import select_ternary_reference
from sparse_bitnet.ops.sparse_int8_linear import compress_windows, sparse_int8_linear
from sparse_bitnet.ops.windows import window_expand
from sparse_bitnet.packing.codec import pack
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
    expanded, _ = window_expand(codes, pattern, padded=True)
    compressed = compress_windows(expanded)
    assert compressed.shape[0] % 32 == 0
    arguments = (*quantize_windows(x, pattern), compressed, 20, weight_scale, bias, dtype)
    assert torch.equal(sparse_int8_linear(*arguments), dense)
    for format in ("i2", "nm-bitmap") if 64 % pattern.m == 0 else ("i2",):
        packed = pack(codes, format, pattern)
        more = (packed, format, pattern, weight_scale, bias, dtype)
        assert torch.equal(packed_int8_linear(*quantize_int8(x), *more), dense)


def test_weights_that_compression_would_damage_are_refused():
    expanded = torch.zeros(32, 32, dtype=torch.int8)
    expanded[3, 4:7] = 1
    with pytest.raises(UserError, match=r"row 3: columns 4\.\.7 are not 2:4 sparse"):
        compress_windows(expanded)


def test_opcheck():
    pattern, codes, weight_scale, bias = layer("6:8")
    x = torch.randn(4, codes.shape[1])
    windows = quantize_windows(x, pattern)
    compressed = compress_windows(window_expand(codes, pattern, padded=True)[0])
    tail = (weight_scale, bias, torch.bfloat16)
    tests = (
        (ops.quantize_windows, (x, 6, 8)),
        (ops.sparse_int8_linear, (*windows, compressed, 20, *tail)),
        (
            ops.packed_int8_linear,
            (*quantize_int8(x), pack(codes, "i2", pattern), "i2", 6, 8, *tail),
        ),
    )
    for op, arguments in tests:
        torch.library.opcheck(op.default, arguments)


@pytest.mark.parametrize(
    ("tokens", "in_features", "out_features"), [(1, 8, 8), (16, 13, 7), (40, 24, 9)]
)
def test_the_dense_product_fills_up_what_the_library_refuses(tokens, in_features, out_features):
    x_codes = torch.randint(-128, 128, (tokens, in_features), dtype=torch.int8)
    codes = torch.randint(-1, 2, (out_features, in_features), dtype=torch.int8)
    sums = dense_product(x_codes, codes)
    assert sums.shape[0] >= max(tokens, 17)
    assert sums.shape[1] % 8 == 0
    assert torch.equal(sums[:tokens, :out_features].long(), x_codes.long() @ codes.long().t())
    activation_scale, weight_scale, bias = (
        torch.rand(tokens, 1),
        torch.rand(1),
        torch.randn(out_features),
    )
    arguments = (x_codes, activation_scale, codes, weight_scale, bias, torch.float32)
    assert torch.equal(int8_tensor_cores(*arguments), int8_linear(*arguments))
    empty = (x_codes[:0], activation_scale[:0], *arguments[2:])
    assert int8_tensor_cores(*empty).shape == (0, out_features)


def test_the_fastest_algorithm_is_searched_once_a_shape(monkeypatch):
    searched, used = [], []

    class Library:
        @staticmethod
        def mm_search(compressed, x, bias, alpha, dtype, transposed):
            searched.append((x.shape, bias, alpha, dtype, transposed))
            return 2, 4, 1, 99

    def product(compressed, x, bias, alpha, dtype, transposed, alg_id, split_k, split_k_mode):
        used.append((alg_id, split_k, split_k_mode))
        return (compressed.int() @ x.int()).t()

    monkeypatch.setattr(torch._C, "_cusparselt", Library, raising=False)
    monkeypatch.setattr(torch, "_cslt_sparse_mm", product)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(sparse_int8_linear_module, "_ALGORITHMS", {})
    compressed = torch.ones(32, 64, dtype=torch.int8)
    for tokens in (3, 16, 17):
        sums = sparse_int8_linear_module.sparse_product(
            torch.ones(tokens, 64, dtype=torch.int8), compressed
        )
        assert (sums[:tokens] == 64).all()
    assert [entry[0][1] for entry in searched] == [16, 32]
    assert {entry[1:] for entry in searched} == {(None, None, torch.int32, True)}
    assert used == [(2, 4, 1)] * 3
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    sparse_int8_linear_module.sparse_product(torch.ones(50, 64, dtype=torch.int8), compressed)
    assert used[-1] == (0, 1, -1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("choice", ["triton", "cusparselt"])
def test_a_choice_without_the_hardware_is_an_error_that_says_why(monkeypatch, choice):
    monkeypatch.setenv("SPARSE_BITNET_KERNEL", choice)
    with pytest.raises(UserError, match=f"SPARSE_BITNET_KERNEL={choice}: .*CUDA"):
        backends.check_choice()


def test_status_gives_a_reason():
    rows = {row.name: row for row in backends.status()}
    assert rows["triton"].reason
    assert (
        rows["cusparselt"].reason == backends.cusparselt_unavailable() or rows["cusparselt"].in_use
    )
