# SPDX-License-Identifier: Apache-2.0
"""Ternary weights and int8 activations against the float64 reference and by their properties."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

import reference
from sparse_bitnet.ops.quantize_int8 import quantize_int8
from sparse_bitnet.ops.select_ternary import absmean, quantize_ternary

FLOATS = st.floats(min_value=-1e6, max_value=1e6, width=32, allow_nan=False)


@st.composite
def matrices(draw: st.DrawFn, columns: int | None = None) -> Tensor:
    """float32 [1..4, columns or 1..40]: any moderate numbers, or few distinct ones."""
    shape = (draw(st.integers(1, 4)), columns or draw(st.integers(1, 40)))
    elements = draw(st.sampled_from([FLOATS, st.sampled_from([0.0, 0.5, -0.5, 1.0, -1.5, 3.0])]))
    return torch.from_numpy(draw(hnp.arrays(np.float32, shape, elements=elements)))


def doubles(x: Tensor) -> reference.Array:
    return x.double().numpy()


class TestTernary:
    @given(matrices())
    def test_equals_the_float64_reference(self, weight: Tensor) -> None:
        codes, scale = quantize_ternary(weight)
        assert scale.item() == reference.weight_scale(doubles(weight))
        assert np.array_equal(codes.numpy(), reference.ternary(doubles(weight), scale.item()))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_equals_the_float64_reference_on_a_layer(self, dtype: torch.dtype) -> None:
        weight = (torch.randn(320, 896) * 0.02).to(dtype)
        codes, scale = quantize_ternary(weight)
        assert scale.item() == reference.weight_scale(doubles(weight))
        assert np.array_equal(codes.numpy(), reference.ternary(doubles(weight), scale.item()))

    @pytest.mark.parametrize("exponent", [-9, 0, 7])
    def test_codes_around_the_rounding_boundary_are_those_of_exact_arithmetic(self, exponent: int):
        scales = (1 + torch.rand(2000, dtype=torch.float32)) * 2.0**exponent
        half = scales / 2
        above, below = half.nextafter(scales), half.nextafter(torch.zeros(()))
        for scale, *values in zip(scales, below, half, above, strict=True):
            codes, _ = quantize_ternary(torch.stack(values), scale)
            assert codes.tolist() == [0, 0, 1]

    def test_halves_round_to_even_and_ends_clip(self) -> None:
        weight = torch.tensor([0.5, -0.5, 1.5, -1.5, 2.5, 0.75, -0.25, 100.0])
        codes, _ = quantize_ternary(weight, torch.tensor(1.0))
        assert codes.tolist() == [0, 0, 1, -1, 1, 1, 0, 1]

    @pytest.mark.parametrize("rows", [0, 4])
    def test_a_zero_or_empty_weight_has_zero_codes_and_the_floor_as_scale(self, rows: int) -> None:
        codes, scale = quantize_ternary(torch.zeros(rows, 8))
        assert torch.equal(codes, torch.zeros(rows, 8, dtype=torch.int8))
        assert scale.item() == np.float32(1e-5)

    def test_codes_are_int8_and_have_no_gradient(self) -> None:
        codes, scale = quantize_ternary(torch.randn(4, 8, requires_grad=True))
        assert (codes.dtype, scale.dtype, scale.dim()) == (torch.int8, torch.float32, 0)
        assert not codes.requires_grad
        assert not scale.requires_grad

    def test_mean_of_many_small_beside_one_large_is_exact(self) -> None:
        # A float32 running sum would lose every one of the small ones.
        weight = torch.full((1025, 1024), 2.0**-24)
        weight[0, 0] = 1.0
        exact = (1.0 + (weight.numel() - 1) * 2.0**-24) / weight.numel()
        floor_free = weight * 2.0**20
        assert absmean(floor_free).item() == np.float32(exact * 2.0**20)


class TestInt8:
    @given(matrices())
    def test_equals_numpy_in_float32_bit_for_bit(self, x: Tensor) -> None:
        values = x.numpy()
        absmax = np.maximum(np.abs(values).max(-1, keepdims=True), np.float32(1e-5))
        codes = np.rint(values * (np.float32(127) / absmax)).clip(-128, 127)
        got_codes, got_scale = quantize_int8(x)
        assert np.array_equal(got_codes.numpy(), codes)
        assert np.array_equal(got_scale.numpy(), absmax / np.float32(127))

    def test_halves_round_to_even(self) -> None:
        x = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5])
        assert quantize_int8(x)[0].tolist() == [127, 0, 2, 2, 0, -2, -2, 126]

    def test_zero_token_has_zero_codes_and_the_floor_as_scale(self) -> None:
        codes, scale = quantize_int8(torch.zeros(2, 8))
        assert not codes.any()
        assert (scale == np.float32(1e-5) / np.float32(127)).all()

    @pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 3, 8), (0, 8), (2, 0, 8)])
    def test_leading_dimensions_are_kept(self, shape: tuple[int, ...]) -> None:
        codes, scale = quantize_int8(torch.randn(shape))
        assert codes.shape == shape
        assert scale.shape == (*shape[:-1], 1)
        assert (codes.dtype, scale.dtype) == (torch.int8, torch.float32)

    def test_nan_reaches_the_scale_of_its_own_token_only(self) -> None:
        _, scale = quantize_int8(torch.tensor([[1.0, float("nan")], [1.0, 2.0]]))
        assert scale.isnan().tolist() == [[True], [False]]
