# SPDX-License-Identifier: Apache-2.0
"""N:M masks against the float64 reference and by their properties."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

import reference
from sparse_bitnet.errors import UserError
from sparse_bitnet.ops.mask_words import (
    byte_flips,
    mask_flip_rate,
    pack_mask,
    unpack_mask,
    word_dtype,
)
from sparse_bitnet.ops.nm_mask import nm_mask, nm_mask_reference
from sparse_bitnet.pattern import NMPattern

PATTERNS = [NMPattern.parse(text) for text in ("6:8", "2:4", "1:2", "2:8", "7:8", "3:7", "30:32")]


@st.composite
def patterns(draw: st.DrawFn) -> NMPattern:
    m = draw(st.integers(1, 32))
    return NMPattern(draw(st.integers(1, m)), m)


@st.composite
def weights(draw: st.DrawFn, pattern: NMPattern) -> Tensor:
    """float32 [rows, groups * m]: any finite numbers, or few distinct ones and hence many ties."""
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 3)) * pattern.m)
    elements = draw(
        st.sampled_from(
            [
                st.floats(width=32, allow_nan=False, allow_infinity=False),
                st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -2.0]),
            ]
        )
    )
    return torch.from_numpy(draw(hnp.arrays(np.float32, shape, elements=elements)))


@st.composite
def weights_and_pattern(draw: st.DrawFn) -> tuple[Tensor, NMPattern]:
    pattern = draw(patterns())
    return draw(weights(pattern)), pattern


class TestPattern:
    @given(patterns())
    def test_text_form_round_trips(self, pattern: NMPattern) -> None:
        assert NMPattern.parse(str(pattern)) == pattern

    @pytest.mark.parametrize("text", ["8:6", "0:4", "33:33", "1:33", "0:0"])
    def test_out_of_range_is_refused(self, text: str) -> None:
        with pytest.raises(UserError, match=r"needs 1 <= n <= m <= 32"):
            NMPattern.parse(text)

    @pytest.mark.parametrize("text", ["", "6", "6/8", "6:8:9", "-2:4", "a:b", "2.5:4", "6:8x"])
    def test_unreadable_text_is_refused_with_an_example(self, text: str) -> None:
        with pytest.raises(UserError, match="write it as n:m, for example 6:8"):
            NMPattern.parse(text)

    def test_not_dividing_names_layer_and_sizes(self) -> None:
        with pytest.raises(UserError, match=r"layer q_proj: in_features 12 .* 8, .* pattern 6:8"):
            NMPattern(6, 8).check_divides(12, "q_proj")
        NMPattern(8, 8).check_divides(12, "q_proj")


class TestMask:
    @given(weights_and_pattern())
    def test_equals_the_float64_reference(self, drawn: tuple[Tensor, NMPattern]) -> None:
        weight, pattern = drawn
        expected = reference.top_n(np.abs(weight.double().numpy()), pattern.n, pattern.m)
        assert np.array_equal(nm_mask(weight, pattern).numpy(), expected)
        assert np.array_equal(nm_mask_reference(weight, pattern.n, pattern.m).numpy(), expected)

    def test_ties_keep_the_lower_index(self) -> None:
        weight = torch.tensor([1.0, -1, 1, -1, 1, -1, 1, -1])
        assert nm_mask(weight, NMPattern(6, 8)).tolist() == [True] * 6 + [False] * 2
        weight = torch.tensor([0.0, 2, 1, 1, -0.0, 1, 1, 1])
        assert nm_mask(weight, NMPattern(3, 8)).tolist() == [
            bool(kept) for kept in (0, 1, 1, 1, 0, 0, 0, 0)
        ]

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    @pytest.mark.parametrize("pattern", PATTERNS, ids=str)
    def test_every_float_type_gives_the_reference(self, pattern: NMPattern, dtype: torch.dtype):
        """It sees exact values, so a bfloat16 master and its float32 copy get the same mask."""
        weight = (torch.randn(64, 28 * pattern.m) * 0.02).to(dtype)
        groups = weight.abs().unflatten(-1, (-1, pattern.m)).sort(descending=True).values
        tied = groups[..., pattern.n - 1] == groups[..., pattern.n]
        assert tied.any() or dtype != torch.bfloat16
        expected = reference.top_n(np.abs(weight.double().numpy()), pattern.n, pattern.m)
        assert np.array_equal(nm_mask(weight, pattern).numpy(), expected)

    def test_float64_is_not_rounded_first(self) -> None:
        weight = torch.tensor([1.0, 1.0 + 1e-12], dtype=torch.float64)
        assert nm_mask(weight, NMPattern(1, 2)).tolist() == [False, True]

    def test_infinity_and_nan_rank_highest_and_keep_n(self) -> None:
        weight = torch.tensor([1.0, float("nan"), float("-inf"), 2.0])
        assert nm_mask(weight, NMPattern(2, 4)).tolist() == [False, True, True, False]
        assert nm_mask(torch.full((1, 8), float("nan")), NMPattern(6, 8)).sum() == 6

    @pytest.mark.parametrize("shape", [(16,), (3, 16), (2, 3, 16), (0, 16), (3, 0), (2, 0, 16)])
    def test_leading_dimensions_are_kept(self, shape: tuple[int, ...]) -> None:
        weight = torch.randn(shape)
        mask = nm_mask(weight, NMPattern(6, 8))
        assert mask.shape == weight.shape
        assert mask.dtype == torch.bool
        rows = weight.reshape(-1, 8) if weight.numel() else torch.empty(0, 8)
        assert torch.equal(mask.reshape(-1, 8), nm_mask(rows, NMPattern(6, 8)))

    @pytest.mark.parametrize("text", ["8:8", "1:1", "7:7"])
    def test_dense_keeps_everything_whatever_the_size(self, text: str) -> None:
        assert nm_mask(torch.zeros(3, 13), NMPattern.parse(text)).all()

    def test_a_size_that_does_not_divide_is_refused(self) -> None:
        with pytest.raises(UserError, match="in_features 12 is not a multiple of 8"):
            nm_mask(torch.zeros(2, 12), NMPattern(6, 8))


class TestFlipRate:
    @given(patterns(), st.integers(0, 2**32 - 1))
    def test_equals_the_reference_and_is_bounded(self, pattern: NMPattern, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        first, second = (
            nm_mask(torch.randn(4, 3 * pattern.m, generator=generator), pattern) for _ in range(2)
        )
        rate = mask_flip_rate(first, second)
        assert rate.dtype == torch.float64
        assert rate.item() == reference.flip_rate(first.numpy(), second.numpy())
        # Every weight that leaves lets another in: at most 2 min(n, m - n) of m.
        assert rate <= 2 * min(pattern.n, pattern.m - pattern.n) / pattern.m
        assert mask_flip_rate(first, first) == 0
        assert mask_flip_rate(second, first) == rate


class TestMaskWords:
    @pytest.mark.parametrize("m", [1, 2, 7, 8, 9, 16, 17, 31, 32])
    def test_packed_masks_round_trip_and_byte_flips(self, m: int) -> None:
        masks = torch.rand(2, 5, 3 * m) < torch.tensor([0.5, 0.8]).view(2, 1, 1)
        words = pack_mask(masks, m)
        assert words.dtype == word_dtype(m)
        assert words.shape == (2, 5, 3)
        assert torch.equal(unpack_mask(words, m), masks)
        assert byte_flips(words[0], words[1]).sum() == (masks[0] ^ masks[1]).sum()
        assert byte_flips(words[:, ::2], words[:, ::2]).sum() == 0

    def test_every_byte_counts_its_ones(self) -> None:
        every = torch.arange(256, dtype=torch.uint8)
        ones = [value.bit_count() for value in range(256)]
        assert byte_flips(every, torch.zeros_like(every)).tolist() == ones

    def test_groups_of_eight_are_the_little_endian_bitmap(self) -> None:
        mask = torch.rand(3, 48) < 0.5
        expected = np.packbits(mask.numpy(), axis=-1, bitorder="little")
        assert np.array_equal(pack_mask(mask, 8).numpy(), expected)
        every = unpack_mask(torch.arange(256, dtype=torch.uint8).view(4, 64), 8)
        assert torch.equal(pack_mask(every, 8).flatten(), torch.arange(256, dtype=torch.uint8))
        assert torch.equal(pack_mask(every[:, 8:], 8), pack_mask(every, 8)[:, 1:])
        assert torch.equal(
            pack_mask(every.flatten()[3:27], 8), pack_mask(every.flatten()[3:27].clone(), 8)
        )
