# SPDX-License-Identifier: Apache-2.0
"""Every CUDA kernel, compiled, against its reference on the CPU: odd shapes, poisoned memory."""

import pytest
import torch
from torch import Tensor

from factories import make_layer
from sparse_bitnet.nn.convert import set_integer_forward_
from sparse_bitnet.ops.backends import cusparselt_unavailable, triton_unavailable
from sparse_bitnet.ops.int8_linear import (
    compress_windows,
    int8_linear_reference,
    sparse_int8_linear,
)
from sparse_bitnet.ops.nm_mask import nm_mask_reference
from sparse_bitnet.ops.quantize_int8 import (
    quantize_int8_reference,
    quantize_windows,
    quantize_windows_reference,
)
from sparse_bitnet.ops.select_ternary import absmean_reference, select_ternary_reference
from sparse_bitnet.ops.windows import window_expand
from sparse_bitnet.pattern import NMPattern

pytestmark = pytest.mark.skipif(bool(triton_unavailable()), reason=triton_unavailable() or "none")
needs_sparse = pytest.mark.skipif(bool(cusparselt_unavailable()), reason=cusparselt_unavailable())

ops = torch.ops.sparse_bitnet
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PATTERNS = ["6:8", "2:4", "2:8", "7:8", "8:8", "3:7", "9:16"]
# out_features, groups of the pattern, tokens
SHAPES = [(1, 1, 1), (33, 5, 3), (257, 41, 17), (96, 32, 64), (40, 344, 8), (1024, 130, 100)]


def same(ours: Tensor, theirs: Tensor) -> None:
    assert ours.is_cuda
    torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=0, equal_nan=True)


def problem(text: str, out_features: int, groups: int, tokens: int):
    pattern = NMPattern.parse(text)
    weight = torch.randn(out_features, groups * pattern.m)
    codes, _ = select_ternary_reference(weight, torch.tensor(0.6), pattern.n, pattern.m)
    x = torch.randn(tokens, groups * pattern.m)
    return pattern, codes, x, torch.rand(out_features), torch.randn(out_features)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", PATTERNS)
def test_selection_equals_the_reference(text: str, dtype: torch.dtype) -> None:
    pattern, scale = NMPattern.parse(text), torch.tensor(0.9)
    n, m = pattern.n, pattern.m
    for rows, groups in ((1, 1), (7, 123), (300, 71)):
        weight = (torch.randint(-6, 7, (rows, groups * m)) * 0.3).to(dtype)
        on_gpu = weight.cuda()
        expected = select_ternary_reference(weight, scale, n, m)
        selected = ops.select_ternary(on_gpu, scale.cuda(), n, m)
        for ours, theirs in zip(selected, expected, strict=True):
            same(ours, theirs)
        same(ops.nm_mask(on_gpu, n, m), nm_mask_reference(weight, n, m))
        same(ops.absmean(on_gpu), absmean_reference(weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("features", [1, 7, 64, 1000, 11008])
def test_quantisation_equals_the_reference(features: int, dtype: torch.dtype) -> None:
    x = torch.randn(5, features)
    x[1, 0], x[2] = float("nan"), 0
    x[3] = torch.arange(features) % 255 - 127 + 0.5
    x = x.to(dtype)
    for ours, theirs in zip(ops.quantize_int8(x.cuda()), quantize_int8_reference(x), strict=True):
        same(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("text", PATTERNS)
def test_products_equal_the_reference(text: str, shape: tuple[int, int, int], dtype: torch.dtype):
    _, codes, x, scale, bias = problem(text, *shape)
    x_codes, activation_scale = quantize_int8_reference(x)
    expected = int8_linear_reference(x_codes, activation_scale, codes, scale, bias, dtype)
    head, tail = (x_codes.cuda(), activation_scale.cuda()), (scale.cuda(), bias.cuda(), dtype)
    same(ops.int8_linear(*head, codes.cuda(), *tail), expected)


@needs_sparse
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("text", ["6:8", "2:4", "2:8", "9:16"])
def test_sparse_products_equal_the_reference(text: str, shape: tuple[int, int, int]) -> None:
    pattern, codes, x, scale, bias = problem(text, *shape)
    windows = quantize_windows(x.cuda(), pattern)
    for ours, theirs in zip(
        windows, quantize_windows_reference(x, pattern.n, pattern.m), strict=True
    ):
        same(ours, theirs)
    expanded = window_expand(codes, pattern)
    compressed = compress_windows(expanded.cuda())
    for dtype in DTYPES:
        tail = (scale.cuda(), bias.cuda(), dtype)
        y = sparse_int8_linear(*windows, compressed, len(codes), *tail)
        expected = int8_linear_reference(*quantize_int8_reference(x), codes, scale, bias, dtype)
        # In bfloat16 the library scales rows and rounds before tokens are scaled.
        bound = 2.0**-7 if dtype == torch.bfloat16 else 0
        largest = float(bound * expected.float().abs().max())
        torch.testing.assert_close(y.cpu(), expected, rtol=bound, atol=largest)


@pytest.mark.parametrize("integer", [False, True])
def test_a_training_layer_equals_the_cpu(integer: bool) -> None:
    """Forward and gradients as on the CPU, under autocast too."""
    layer = make_layer("ternary-6:8", in_features=96, out_features=40)
    set_integer_forward_(layer, integer)
    x, grad_y = torch.randn(2, 33, 96), torch.randn(2, 33, 40)

    def results(device: str, dtype: torch.dtype) -> list[Tensor]:
        moved, input = layer.to(device), x.to(device).detach().requires_grad_()
        moved.zero_grad()
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            y = moved(input)
        y.backward(grad_y.to(y))
        return [t.detach().cpu() for t in (y, input.grad, moved.weight.grad, moved.bias.grad)]

    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        for ours, theirs in zip(results("cuda", dtype), results("cpu", dtype), strict=True):
            assert (ours - theirs).abs().max() <= bound * theirs.abs().max()


def test_compiles_without_graph_breaks() -> None:
    torch._dynamo.reset()
    layer = make_layer("ternary-6:8").cuda()
    set_integer_forward_(layer, True)
    x = torch.randn(4, 48, device="cuda")
    assert torch.equal(torch.compile(layer, fullgraph=True)(x), layer(x))
    torch._dynamo.reset()
