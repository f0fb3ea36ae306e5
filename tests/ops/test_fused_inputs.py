# SPDX-License-Identifier: Apache-2.0
"""RMSNorm and SwiGLU with quantisation: the references are the unfused operators, the kernels agree."""

import pytest
import torch
import torch.nn.functional as F

from sparse_bitnet.ops.norm_quantize import norm_quantize
from sparse_bitnet.ops.quantize_int8 import quantize_int8
from sparse_bitnet.ops.swiglu_quantize import swiglu_quantize
from sparse_bitnet.pattern import NMPattern

ops = torch.ops.sparse_bitnet
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WINDOWS = [None, NMPattern(6, 8), NMPattern(2, 4)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_references_are_the_unfused_operators(dtype):
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

    norm = Qwen2RMSNorm(40, eps=1e-6).to(dtype)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
        x, gate_up = torch.randn(2, 3, 40).to(dtype), torch.randn(2, 3, 80).to(dtype)
        pairs = (
            (norm_quantize(x, norm.weight, 1e-6, None), quantize_int8(norm(x))),
            (
                swiglu_quantize(gate_up, None),
                quantize_int8(F.silu(gate_up[..., :40]) * gate_up[..., 40:]),
            ),
        )
    for ours, theirs in pairs:
        assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize("features", [8, 200, 4104])
def test_kernels_agree_with_the_references(features, windows):
    pytest.importorskip("triton", reason="triton is not installed")
    from sparse_bitnet.ops.triton import quantize

    order = (0, 0) if windows is None else (windows.n, windows.m)
    x, gate_up = torch.randn(5, features), 3 * torch.randn(2, 2, 2 * features)
    x[1], gate_up[0, 1] = 0, 0
    weight = torch.rand(features) + 0.5
    found = (
        quantize.norm_quantize(x.to(DEVICE), weight.to(DEVICE), 1e-6, *order),
        quantize.swiglu_quantize(gate_up.to(DEVICE), *order),
    )
    expected = (norm_quantize(x, weight, 1e-6, windows), swiglu_quantize(gate_up, windows))
    for (codes, scale), (expected_codes, expected_scale) in zip(found, expected, strict=True):
        assert codes.shape == expected_codes.shape
        torch.testing.assert_close(scale.cpu(), expected_scale, rtol=1e-5, atol=0)
        # Sums in another order move a value across a rounding boundary now and then, by one code.
        difference = (codes.cpu().int() - expected_codes.int()).abs()
        assert difference.max() <= 1
        assert difference.count_nonzero() <= max(1, difference.numel() // 500)


def test_opcheck():
    x, weight = torch.randn(2, 3, 16), torch.rand(16)
    for arguments in ((x, weight, 1e-6, 0, 0), (x, weight, 1e-6, 6, 8)):
        torch.library.opcheck(ops.norm_quantize.default, arguments)
    torch.library.opcheck(ops.swiglu_quantize.default, (torch.randn(2, 32), 6, 8))
