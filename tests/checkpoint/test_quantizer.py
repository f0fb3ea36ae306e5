# SPDX-License-Identifier: Apache-2.0
"""Ternary weights and int8 activations against the float64 reference and by their properties."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

import reference
from sparse_bitnet.nn.straight_through import fake_quantize_int8, fake_quantize_ternary
from sparse_bitnet.ops.nm_mask import nm_mask
from sparse_bitnet.ops.quantize_int8 import quantize_int8, quantize_int8_reference
from sparse_bitnet.ops.select_ternary import (
    absmean,
    absmean_reference,
    quantize_ternary,
    select_ternary_reference,
)
from sparse_bitnet.packing.formats import SCALE_FLOOR
from sparse_bitnet.pattern import NMPattern

FLOATS = st.floats(min_value=-1e6, max_value=1e6, width=32, allow_nan=False)
UNIT_ROUNDOFF = 2.0**-24


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
    def test_codes_around_the_rounding_boundary_are_those_of_exact_arithmetic(
        self, exponent: int
    ) -> None:
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

    @given(matrices(), st.integers(-6, 6))
    def test_powers_of_two_change_the_scale_only(self, weight: Tensor, exponent: int) -> None:
        codes, scale = quantize_ternary(weight)
        assume(scale.item() * 2.0**exponent > SCALE_FLOOR and scale.item() > SCALE_FLOOR)
        nonzero = weight[weight != 0].abs()
        assume(nonzero.numel() == 0 or nonzero.min() > 1e-30)
        scaled_codes, scaled = quantize_ternary(weight * 2.0**exponent)
        assert torch.equal(scaled_codes, codes)
        assert scaled.item() == scale.item() * 2.0**exponent

    @given(st.integers(1, 255), st.integers(0, 2**32 - 1))
    def test_exact_multiples_change_the_scale_only(self, factor: int, seed: int) -> None:
        # 8-bit integers, 64 of them: mean and multiples are exact in float32.
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randint(-255, 256, (4, 16), generator=generator).float()
        codes, scale = quantize_ternary(weight)
        scaled_codes, scaled = quantize_ternary(weight * factor)
        assert torch.equal(scaled_codes, codes)
        assert scaled.item() == scale.item() * factor

    @given(matrices())
    def test_is_idempotent_at_its_own_scale(self, weight: Tensor) -> None:
        codes, scale = quantize_ternary(weight)
        again, _ = quantize_ternary(codes * scale, scale)
        assert torch.equal(again, codes)

    @given(matrices(columns=24), st.sampled_from(["6:8", "2:4", "1:3", "8:8"]))
    def test_mask_then_round_equals_round_then_mask(self, weight: Tensor, text: str) -> None:
        mask = nm_mask(weight, NMPattern.parse(text))
        codes, scale = quantize_ternary(weight)
        masked_first, _ = quantize_ternary(weight * mask, scale)
        assert torch.equal(masked_first, codes * mask)

    @given(matrices())
    def test_bfloat16_master_gives_the_codes_of_its_float32_copy(self, weight: Tensor) -> None:
        weight = weight.bfloat16()
        for narrow, wide in zip(
            quantize_ternary(weight), quantize_ternary(weight.float()), strict=True
        ):
            assert torch.equal(narrow, wide)

    def test_zero_weight_has_zero_codes_and_the_floor_as_scale(self) -> None:
        codes, scale = quantize_ternary(torch.zeros(4, 8))
        assert not codes.any()
        assert scale.item() == np.float32(1e-5)

    def test_empty_weight(self) -> None:
        codes, scale = quantize_ternary(torch.zeros(0, 8))
        assert codes.shape == (0, 8)
        assert scale.item() == np.float32(1e-5)

    def test_types_and_no_gradient(self) -> None:
        codes, scale = quantize_ternary(torch.randn(4, 8, requires_grad=True))
        assert (codes.dtype, scale.dtype, scale.dim()) == (torch.int8, torch.float32, 0)
        assert not codes.requires_grad
        assert not scale.requires_grad

    def test_nan_reaches_the_scale(self) -> None:
        assert absmean(torch.tensor([1.0, float("nan")])).isnan()

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

    @given(matrices())
    def test_is_within_two_roundings_of_the_float64_reference(self, x: Tensor) -> None:
        codes, scale = quantize_int8(x)
        inverse = reference.inverse_activation_scale(doubles(x))
        # |x| inverse <= 127, and float32 computes it with two roundings.
        exact = doubles(x) * inverse
        assert (np.abs(codes.numpy() - exact) <= 0.5 + 127 * 2 * UNIT_ROUNDOFF).all()
        assert (np.abs(doubles(scale) * inverse - 1) <= 1.01 * UNIT_ROUNDOFF).all()

    def test_equals_the_float64_reference_on_activations(self) -> None:
        x = torch.randn(512, 896)
        codes, _ = quantize_int8(x)
        exact = doubles(x) * reference.inverse_activation_scale(doubles(x))
        clear = np.abs(np.abs(exact % 1) - 0.5) > 127 * 2 * UNIT_ROUNDOFF
        assert clear.mean() > 0.9999
        assert np.array_equal(codes.numpy()[clear], reference.int8(doubles(x))[clear])

    def test_halves_round_to_even(self) -> None:
        x = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5])
        assert quantize_int8(x)[0].tolist() == [127, 0, 2, 2, 0, -2, -2, 126]

    @given(matrices())
    def test_uses_the_whole_range_symmetrically(self, x: Tensor) -> None:
        codes, _ = quantize_int8(x)
        largest = x.abs().amax(-1)
        assume((largest > SCALE_FLOOR).all())
        assert (codes.short().abs().amax(-1) == 127).all()
        assert torch.equal(quantize_int8(-x)[0], -codes)

    @given(matrices(), st.integers(-6, 6))
    def test_powers_of_two_change_the_scale_only(self, x: Tensor, exponent: int) -> None:
        nonzero = x[x != 0].abs()
        assume((x.abs().amax(-1) * 2.0 ** min(exponent, 0) > SCALE_FLOOR).all())
        assume(nonzero.min() > 1e-30)
        codes, scale = quantize_int8(x)
        scaled_codes, scaled = quantize_int8(x * 2.0**exponent)
        assert torch.equal(scaled_codes, codes)
        assert torch.equal(scaled, scale * 2.0**exponent)

    @given(matrices())
    def test_is_idempotent(self, x: Tensor) -> None:
        codes, scale = quantize_int8(x)
        again, _ = quantize_int8(codes * scale)
        assert torch.equal(again, codes)

    @given(matrices())
    def test_tokens_do_not_see_each_other(self, x: Tensor) -> None:
        together = quantize_int8(x)
        alone = [quantize_int8(row) for row in x]
        assert torch.equal(together[0], torch.stack([codes for codes, _ in alone]))
        assert torch.equal(together[1], torch.stack([scale for _, scale in alone]))

    def test_zero_token(self) -> None:
        codes, scale = quantize_int8(torch.zeros(2, 8))
        assert not codes.any()
        assert (scale == np.float32(1e-5) / np.float32(127)).all()

    @pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 3, 8), (0, 8), (2, 0, 8)])
    def test_any_number_of_leading_dimensions(self, shape: tuple[int, ...]) -> None:
        codes, scale = quantize_int8(torch.randn(shape))
        assert codes.shape == shape
        assert scale.shape == (*shape[:-1], 1)
        assert (codes.dtype, scale.dtype) == (torch.int8, torch.float32)

    @given(matrices())
    def test_bfloat16_gives_the_codes_of_its_float32_copy(self, x: Tensor) -> None:
        x = x.bfloat16()
        for narrow, wide in zip(quantize_int8(x), quantize_int8(x.float()), strict=True):
            assert torch.equal(narrow, wide)

    def test_nan_reaches_the_scale_of_its_own_token_only(self) -> None:
        _, scale = quantize_int8(torch.tensor([[1.0, float("nan")], [1.0, 2.0]]))
        assert scale.isnan().tolist() == [[True], [False]]


class TestFakeQuantization:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
    @pytest.mark.parametrize("fake", [fake_quantize_ternary, fake_quantize_int8])
    def test_value_is_codes_times_scale_and_gradient_is_the_identity(
        self, fake, dtype: torch.dtype
    ) -> None:
        latent = torch.randn(6, 16).to(dtype).requires_grad_()
        codes, scale = (quantize_ternary if fake is fake_quantize_ternary else quantize_int8)(
            latent
        )
        value = fake(latent)
        assert value.dtype == dtype
        assert torch.equal(value, (codes * scale).to(dtype))
        gradient = torch.randn(6, 16).to(dtype)
        value.backward(gradient)
        assert torch.equal(latent.grad, gradient)

    def test_int8_error_is_at_most_half_a_step(self) -> None:
        x = torch.randn(64, 256)
        step = x.abs().amax(-1, keepdim=True) / 127
        assert ((fake_quantize_int8(x) - x).abs() <= step * (0.5 + 127 * 4 * UNIT_ROUNDOFF)).all()


CONTIGUOUS = torch.randn(6, 24)
STRIDED = torch.randn(24, 6).t()


@pytest.mark.parametrize(
    "x", [CONTIGUOUS, STRIDED, CONTIGUOUS[:0]], ids=["2-D", "strided", "empty"]
)
class TestOperators:
    def test_contracts(self, x: Tensor) -> None:
        ops, scale = torch.ops.sparse_bitnet, torch.tensor(0.5)
        torch.library.opcheck(ops.absmean.default, (x,))
        torch.library.opcheck(ops.select_ternary.default, (x, scale, 6, 8))
        torch.library.opcheck(ops.select_ternary.default, (x, scale, 8, 8))
        torch.library.opcheck(ops.quantize_int8.default, (x,))

    def test_dispatch_equals_the_plain_reference(self, x: Tensor) -> None:
        ops, scale = torch.ops.sparse_bitnet, torch.tensor(0.5)
        assert torch.equal(ops.absmean(x), absmean_reference(x))
        for got, expected in (
            (ops.select_ternary(x, scale, 6, 8), select_ternary_reference(x, scale, 6, 8)),
            (ops.quantize_int8(x), quantize_int8_reference(x)),
        ):
            assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))
