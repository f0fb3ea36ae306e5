# SPDX-License-Identifier: Apache-2.0
"""SparseBitLinear forward, backward and under autocast, with stated bounds of precision."""

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import reference
from factories import VARIANTS, make_layer
from sparse_bitnet.errors import UserError
from sparse_bitnet.nn.layer import SparseBitConfig, SparseBitLinear
from sparse_bitnet.ops.quantize_int8 import quantize_int8

U32 = 2.0**-24
"""Unit roundoff of float32."""
U16 = 2.0**-8
"""Unit roundoff of bfloat16."""


def doubles(x: Tensor) -> reference.Array:
    return x.detach().double().numpy()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", [(48,), (7, 48), (2, 3, 48)], ids=str)
def test_forward_and_backward_equal_the_float64_reference(variant: str, shape: tuple[int, ...]):
    layer, x = make_layer(VARIANTS[variant]), torch.randn(shape, requires_grad=True)
    y, grad_y = layer(x), torch.randn(*shape[:-1], 20)
    y.backward(grad_y)
    weight, inputs = doubles(layer.weight), doubles(x)
    expected = reference.forward(inputs, weight, doubles(layer.bias), 6, 8, variant)
    # Ternary: x scale, product of the scales, scaling, adding the bias. Full: 48 sums and the bias.
    effective, _ = reference.effective_weight(weight, 6, 8, variant)
    magnitude = np.abs(inputs) @ np.abs(effective).T
    roundings = 49 if variant == "full" else 4
    bound = roundings * 1.01 * U32 * (magnitude + np.abs(expected) + 1)
    assert (np.abs(doubles(y) - expected) <= bound).all()
    wanted = reference.gradients(inputs, weight, doubles(grad_y), 6, 8, variant)
    parts = zip((x, layer.weight, layer.bias), wanted, (20, 7, 7), strict=True)
    for part, want, terms in parts:
        bound = (terms + 3) * U32 * (np.abs(want).max() + 1) * 4
        assert (np.abs(doubles(part.grad) - want) <= bound).all()


class TestForward:
    @pytest.mark.parametrize("in_features", [48, 896, 11008])
    def test_float32_is_the_integer_product_scaled_once_bit_for_bit(self, in_features: int) -> None:
        layer, x = make_layer("ternary-6:8", in_features), 3 * torch.randn(5, in_features)
        codes, scale = quantize_int8(x)
        chosen = layer.select()
        integers = codes.long() @ chosen.codes.long().t()
        assert integers.abs().max() < 2**24
        once = integers.numpy().astype(np.float32) * (scale * chosen.weight_scale).numpy()
        assert np.array_equal(layer(x).detach().numpy(), once + layer.bias.detach().numpy())
        exact = integers.double() * scale.double() * chosen.weight_scale.double()
        layer.bias = None
        assert ((layer(x).double() - exact).abs() <= 2.01 * U32 * exact.abs()).all()

    @pytest.mark.parametrize("in_features", [48, 896, 4864])
    def test_bfloat16_rounds_the_integer_product_and_the_result_only(self, in_features: int):
        layer = make_layer("ternary-6:8", in_features, dtype=torch.bfloat16)
        x = torch.randn(5, in_features, dtype=torch.bfloat16)
        codes, scale = quantize_int8(x)
        chosen = layer.select()
        product = (codes.long() @ chosen.codes.long().t()).double()
        product = product * scale.double() * chosen.weight_scale.double()
        exact = product + layer.bias.double()
        y = layer(x)
        assert y.dtype == torch.bfloat16
        bound = 1.01 * U16 * (product.abs() + y.double().abs())
        assert ((y.double() - exact).abs() <= bound).all()

    def test_float16_sums_of_codes_do_not_overflow(self) -> None:
        layer = make_layer("ternary-6:8", 2048, dtype=torch.float16)
        with torch.no_grad():
            layer.weight.fill_(0.02)
            layer.bias.zero_()
        x = torch.ones(2, 2048, dtype=torch.float16)
        exact = 1536 * layer.select().weight_scale.item()
        assert (layer(x).double() - exact).abs().max() <= 2 * 2.0**-11 * exact

    def test_full_dense_is_nn_linear_bit_for_bit(self) -> None:
        layer, x = make_layer("full-8:8"), torch.randn(4, 48, requires_grad=True)
        plain = nn.Linear(48, 20)
        plain.load_state_dict(layer.state_dict())
        other = x.detach().clone().requires_grad_()
        y, expected = layer(x), plain(other)
        assert torch.equal(y, expected)
        y.square().sum().backward()
        expected.square().sum().backward()
        for ours, theirs in ((x, other), (layer.weight, plain.weight), (layer.bias, plain.bias)):
            assert torch.equal(ours.grad, theirs.grad)

    @pytest.mark.parametrize("text", VARIANTS.values())
    def test_dense_phase_is_the_dense_format(self, text: str) -> None:
        layer, x = make_layer(text), torch.randn(4, 48)
        layer.kept = layer.config.pattern.m
        dense = make_layer("full-8:8" if text.startswith("full") else "ternary-8:8")
        assert torch.equal(layer(x), dense(x))
        chosen = layer.select()
        assert chosen.mask.all()
        layer.kept = None
        assert not torch.equal(layer(x), dense(x))

    def test_activation_none_keeps_the_activations(self) -> None:
        layer, x = make_layer("ternary-6:8,activation=none"), torch.randn(4, 48)
        chosen = layer.select()
        assert torch.equal(layer(x), F.linear(x, chosen.codes * chosen.weight_scale, layer.bias))

    @pytest.mark.parametrize("text", VARIANTS.values())
    def test_empty_batches_give_empty_outputs(self, text: str) -> None:
        layer = make_layer(text)
        for shape in ((0, 48), (2, 0, 48)):
            x = torch.randn(shape, requires_grad=True)
            y = layer(x)
            assert y.shape == (*shape[:-1], 20)
            y.sum().backward()
            assert x.grad.shape == shape
        assert not layer.weight.grad.any()

    def test_nan_input_and_nan_weight_show_in_the_output(self) -> None:
        layer, x = make_layer("ternary-6:8"), torch.randn(2, 48)
        x[0, 3] = float("nan")
        y = layer(x)
        assert y[0].isnan().all()
        assert not y[1].isnan().any()
        with torch.no_grad():
            layer.weight[0, 0] = float("nan")
        assert layer(torch.randn(2, 48)).isnan().all()

    def test_a_size_that_does_not_divide_is_refused_by_name(self) -> None:
        with pytest.raises(UserError, match=r"layer mlp\.up: in_features 12 .* multiple of 8"):
            SparseBitLinear(12, 4, config=SparseBitConfig(), name="mlp.up")

    def test_norms_of_the_inputs_stay_float32(self) -> None:
        layer = make_layer("full-6:8,score=wanda")
        norm = layer.input_norm.uniform_().clone()
        assert torch.equal(layer.half().input_norm, norm)
        assert all(buffer.dtype == torch.float32 for buffer in layer.buffers())
        empty = layer.to("meta").bfloat16().to_empty(device="cpu")
        assert empty.weight.dtype == torch.bfloat16
        assert all(buffer.dtype == torch.float32 for buffer in empty.buffers())


class TestBackward:
    @pytest.mark.parametrize("masked", [False, True])
    def test_clipped_ste_stops_outside_one_scale(self, masked: bool) -> None:
        x, grad_y = torch.randn(16, 48), torch.randn(16, 20)
        plain, clipped = make_layer("ternary-6:8"), make_layer("ternary-6:8,ste=clipped")
        if masked:
            clipped = make_layer("ternary-6:8,ste=clipped,mask_gradient=masked")
        outputs = [plain(x), clipped(x)]
        for y in outputs:
            y.backward(grad_y)
        assert torch.equal(*outputs)
        chosen = clipped.select()
        learns = clipped.weight.abs() <= chosen.weight_scale
        assert 0.3 < learns.double().mean() < 0.9
        learns = learns & chosen.mask if masked else learns
        assert torch.equal(clipped.weight.grad, plain.weight.grad * learns)

    @pytest.mark.parametrize("frozen", ["weight", "bias", "input"])
    def test_frozen_parts_get_no_gradient(self, frozen: str) -> None:
        layer, x = make_layer("ternary-6:8"), torch.randn(4, 48, requires_grad=frozen != "input")
        if frozen != "input":
            getattr(layer, frozen).requires_grad_(False)
        layer(x).sum().backward()
        gradients = {"weight": layer.weight.grad, "bias": layer.bias.grad, "input": x.grad}
        assert [name for name, grad in gradients.items() if grad is None] == [frozen]

    def test_a_second_derivative_is_refused(self) -> None:
        layer, x = make_layer("ternary-6:8"), torch.randn(4, 48, requires_grad=True)
        (grad_x,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            grad_x.sum().backward()


class TestAutocast:
    @pytest.mark.parametrize("text", [*VARIANTS.values(), "ternary-6:8,activation=none"])
    def test_output_is_bfloat16_and_gradients_have_their_parameters_type(self, text: str) -> None:
        layer, x = make_layer(text), torch.randn(4, 48, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
        assert y.dtype == torch.bfloat16
        y.float().square().sum().backward()
        assert layer.weight.grad.dtype == layer.bias.grad.dtype == x.grad.dtype == torch.float32
        exact = layer(x)
        assert (y.float() - exact).abs().max() <= 4 * U16 * exact.abs().max()

    def test_input_is_quantised_before_it_is_rounded(self) -> None:
        layer, x = make_layer("ternary-6:8"), torch.randn(64, 48)
        codes, scale = quantize_int8(x)
        chosen = layer.select()
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
        integers = (codes.long() @ chosen.codes.long().t()).float().bfloat16()
        expected = integers * (scale * chosen.weight_scale) + layer.bias
        assert torch.equal(y, expected.bfloat16())


class TestMergedAdapter:
    """Merging writes to the frozen weight through `.data`, which leaves no trace but its values."""

    def test_merging_into_a_frozen_ternary_weight_warns_once(self) -> None:
        layer, x = make_layer("ternary-6:8").requires_grad_(False), torch.randn(4, 48)
        adapter = 0.3 * torch.randn(20, 48)
        layer(x)
        layer.eval()
        with warnings.catch_warnings(action="error"):
            layer(x)
        layer.weight.data += adapter
        with pytest.warns(UserWarning, match="quantised to ternary codes again"):
            layer(x)
        with warnings.catch_warnings(action="error"):
            layer(x)
            layer.load_state_dict(make_layer("ternary-6:8").state_dict())
            layer(x)

    @pytest.mark.parametrize("text", ["ternary-6:8", "ternary-6:8,quantizer=per-channel"])
    def test_changing_the_type_of_a_weight_does_not_warn(self, text: str) -> None:
        layer, x = make_layer(text).requires_grad_(False).eval(), torch.randn(4, 48)
        with warnings.catch_warnings(action="error"):
            for _ in range(2):
                layer(x)
            layer.bfloat16()
            for _ in range(2):
                layer(x.bfloat16())
