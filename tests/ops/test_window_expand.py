# SPDX-License-Identifier: Apache-2.0
"""The 2:4 layout of N:M codes: complete over all patterns of a group, exact, refused where impossible;
and its sparse product."""

import itertools

import pytest
import torch

from sparse_bitnet.errors import UserError
from sparse_bitnet.ops.int8_linear import compress_windows, int8_linear, sparse_int8_linear
from sparse_bitnet.ops.quantize_int8 import quantize_int8, quantize_windows
from sparse_bitnet.ops.select_ternary import select_ternary_reference
from sparse_bitnet.ops.windows import gather_index, window_expand, window_layout
from sparse_bitnet.pattern import NMPattern

MAPPED = [
    *("2:4", "4:6", "6:8", "5:8", "4:8", "3:8", "8:10"),
    *("2:8", "1:2", "1:4", "1:3", "2:12", "1:5"),
]


def every_group(pattern: NMPattern) -> torch.Tensor:
    """int8 [groups, m]: all placements of exactly n non-zeros, with three assignments of signs."""
    chosen = list(itertools.combinations(range(pattern.m), pattern.n))
    rows = torch.zeros(3 * len(chosen), pattern.m, dtype=torch.int8)
    for row, positions in enumerate(chosen):
        for lane, position in enumerate(positions):
            rows[3 * row, position] = 1
            rows[3 * row + 1, position] = -1
            rows[3 * row + 2, position] = 1 - 2 * (lane % 2)
    return rows


def expanded_with_index(codes, pattern):
    """In 2:4 form, with the sources of the columns."""
    expanded = window_expand(codes, pattern)
    assert (expanded.unflatten(-1, (-1, 4)) != 0).sum(-1).max() <= 2
    return expanded, gather_index(pattern, codes.shape[1])


@pytest.mark.parametrize("text", MAPPED)
def test_every_placement_of_a_group_fits_and_keeps_its_product(text):
    pattern = NMPattern.parse(text)
    # Twelve groups to a row: groups of passing patterns meet in one window at every offset.
    groups = every_group(pattern)
    shuffled = groups[torch.randint(len(groups), (len(groups) * 11,))].view(len(groups), -1)
    codes = torch.cat([groups, shuffled], 1)
    expanded, index = expanded_with_index(codes, pattern)
    x = torch.randint(-128, 128, (codes.shape[1],))
    gathered = torch.where(index < 0, 7, x[index.clamp_min(0)])
    assert torch.equal(expanded.long() @ gathered, codes.long() @ x)
    assert (expanded[:, index < 0] == 0).all()


@pytest.mark.parametrize("n", range(1, 7))
def test_every_ternary_group_of_eight_is_expanded_exactly(n):
    """All 3**8 groups of codes with at most n non-zeros, for every n:8 that has a 2:4 form."""
    pattern = NMPattern(n, 8)
    codes = torch.tensor(list(itertools.product((-1, 0, 1), repeat=8)), dtype=torch.int8)
    codes = codes[(codes != 0).sum(1) <= n]
    expanded, index = expanded_with_index(codes, pattern)
    back = torch.zeros_like(codes).index_add_(1, index.clamp_min(0), expanded)
    assert torch.equal(back, codes)


@pytest.mark.parametrize("text", ["7:8", "8:8", "1:1", "3:4", "5:6", "4:7", "2:5", "31:32"])
def test_patterns_without_2_4_layout_are_refused(text):
    pattern = NMPattern.parse(text)
    with pytest.raises(UserError, match=f"pattern {text} has no 2:4 form"):
        window_expand(torch.zeros(2, 32 * pattern.m, dtype=torch.int8), pattern)


def test_hardware_index_of_6_8_is_as_documented():
    index = gather_index(NMPattern(6, 8), 16)[:24]
    expected = [8 * g + 2 * w + lane for g in range(2) for w in range(3) for lane in range(4)]
    assert index.tolist() == expected
    assert gather_index(NMPattern(2, 4), 8).tolist() == [*range(8), *[-1] * 24]


def test_rows_are_padded_for_the_library():
    codes = torch.ones(3, 8, dtype=torch.int8)
    codes[:, 1:3] = 0
    expanded, index = expanded_with_index(codes, NMPattern(6, 8))
    assert expanded.shape == (3, 32)
    assert index.tolist()[12:] == [-1] * 20
    assert (expanded[:, 12:] == 0).all()
    assert window_layout(NMPattern(6, 8)).width(11008) == 16512


def test_codes_outside_the_pattern_are_refused():
    codes = torch.ones(2, 16, dtype=torch.int8)
    with pytest.raises(UserError, match="layer up: a group of 8 has more than 6"):
        window_expand(codes, NMPattern(6, 8), name="up")
    with pytest.raises(UserError, match="not a multiple of 8"):
        window_expand(codes[:, :12], NMPattern(6, 8))


def layer(text: str, out_features: int = 20, groups: int = 13):
    pattern = NMPattern.parse(text)
    weight = torch.randn(out_features, groups * pattern.m)
    codes, _ = select_ternary_reference(weight, torch.tensor(0.5), pattern.n, pattern.m)
    return pattern, codes, torch.rand(out_features), torch.randn(out_features)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("text", ["6:8", "2:4", "2:8", "5:8", "4:6"])
def test_every_layout_of_the_weight_gives_the_same_bits(text, dtype):
    pattern, codes, weight_scale, bias = layer(text)
    x = torch.randn(3, 5, codes.shape[1])
    dense = int8_linear(*quantize_int8(x), codes, weight_scale, bias, dtype)
    expanded = window_expand(codes, pattern)
    compressed = compress_windows(expanded)
    assert compressed.shape[0] % 32 == 0
    arguments = (*quantize_windows(x, pattern), compressed, 20, weight_scale, bias, dtype)
    assert torch.equal(sparse_int8_linear(*arguments), dense)


def test_products_and_their_operands_pass_opcheck():
    pattern, codes, *scale_and_bias = layer("6:8")
    x = torch.randn(3, 2, codes.shape[1])
    compressed = compress_windows(window_expand(codes, pattern))
    dense = (*quantize_int8(x), codes, *scale_and_bias, torch.bfloat16)
    sparse = (*quantize_windows(x, pattern), compressed, 20, *scale_and_bias, torch.bfloat16)
    ops = torch.ops.sparse_bitnet
    torch.library.opcheck(ops.quantize_windows.default, (x, 6, 8))
    torch.library.opcheck(ops.int8_linear.default, dense)
    torch.library.opcheck(ops.sparse_int8_linear.default, sparse)
