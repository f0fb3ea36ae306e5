# SPDX-License-Identifier: Apache-2.0
"""The int8 forward of training: the integers of the fake-quantised product, rounded once."""

import pytest
import torch
from torch import Tensor

from factories import make_layer, tiny_model
from sparse_bitnet.errors import UserError
from sparse_bitnet.nn.convert import convert_, set_integer_forward_
from sparse_bitnet.nn.layer import SparseBitLinear
from sparse_bitnet.ops.int8_linear import int8_linear, integer_product
from sparse_bitnet.ops.quantize_int8 import quantize_int8

FORMATS = (
    "ternary-6:8",
    "ternary-8:8",
    "ternary-2:4,mask_gradient=masked",
    "ternary-6:8,ste=clipped",
    "ternary-6:8,score=wanda,quantizer=twn",
    "ternary-6:8,score=random,quantizer=binary",
    "ternary-2:4,score=s-ste,quantizer=absmax",
    "ternary-6:8,score=sr-ste,schedule=gradual",
)


def integer_twin(text: str, **options) -> tuple[SparseBitLinear, SparseBitLinear]:
    fake, integer = make_layer(text, **options), make_layer(text, **options)
    set_integer_forward_(integer, True)
    return fake, integer


def results(layer: SparseBitLinear, forward, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = forward(x)
    torch.manual_seed(1)
    y.backward(torch.randn(y.shape).to(y.dtype))
    gradients = [x.grad, layer.weight.grad, layer.bias.grad]
    layer.zero_grad()
    return [y.detach(), *gradients]


@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize("shape", [(48,), (7, 48), (2, 3, 48), (0, 48)], ids=str)
def test_in_float32_both_forwards_are_the_same_bits(text: str, shape: tuple[int, ...]) -> None:
    fake, integer = integer_twin(text)
    x = torch.randn(shape)
    for ours, theirs in zip(results(integer, integer, x), results(fake, fake, x), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_the_exact_sums_are_rounded_once(dtype: torch.dtype) -> None:
    fake, integer = integer_twin("ternary-6:8", in_features=4096, out_features=24)
    x = 3 * torch.randn(32, 4096)
    with torch.autocast("cpu", dtype):
        ours, theirs = results(integer, integer, x), results(fake, fake, x)
    chosen = integer.select()
    codes, scale = quantize_int8(x)
    sums = (codes.long() @ chosen.codes.long().t()).float()
    assert torch.equal(ours[0], (sums * (scale * chosen.weight_scale) + integer.bias).to(dtype))
    unit = torch.finfo(dtype).eps
    assert (ours[0] - theirs[0]).abs().max() <= 2 * unit * theirs[0].abs().max()
    # The backward pass does not depend on how the forward multiplied.
    assert all(torch.equal(a, b) for a, b in zip(ours[1:], theirs[1:], strict=True))


def test_scales_may_differ_by_row() -> None:
    x_codes = torch.randint(-128, 128, (2, 5, 33), dtype=torch.int8)
    codes = torch.randint(-1, 2, (7, 33), dtype=torch.int8)
    activation_scale, row_scale, bias = torch.rand(2, 5, 1), torch.rand(7), torch.randn(7)
    sums = (x_codes.long() @ codes.long().t()).float()
    for weight_scale, b in ((row_scale, bias), (row_scale[:1], None), (row_scale[0], bias)):
        y = int8_linear(x_codes, activation_scale, codes, weight_scale, b, torch.float32)
        expected = sums * (activation_scale * weight_scale)
        assert torch.equal(y, expected if b is None else expected + b)


def test_sums_are_exact_at_the_end_of_float32() -> None:
    for columns in (1 << 17, (1 << 17) + 1):
        x_codes = torch.full((1, columns), -128, dtype=torch.int8)
        x_codes[0, 0] = 127
        codes = torch.ones(1, columns, dtype=torch.int8)
        expected = float(x_codes.long().sum())
        assert integer_product(x_codes, codes).item() == expected


def test_int8_activations_are_what_is_saved() -> None:
    _, layer = integer_twin("ternary-6:8", in_features=4096)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(torch.randn(64, 4096))
    activations = [tensor for tensor in saved if tensor.shape == (64, 4096)]
    assert [tensor.dtype for tensor in activations] == [torch.int8]


@pytest.mark.parametrize("end", ["activation=none", "quantizer=per-channel", "schedule=lambda", ""])
def test_layers_without_int8_operands_refuse(end: str) -> None:
    model = convert_(tiny_model(), f"ternary-6:8,{end}" if end else "full-6:8")
    with pytest.raises(
        UserError, match=r"layer model\.layers\.0\.self_attn\.q_proj: --forward int8 needs"
    ):
        set_integer_forward_(model, True)
    assert not any(getattr(module, "integer_forward", False) for module in model.modules())
    set_integer_forward_(model, False)
