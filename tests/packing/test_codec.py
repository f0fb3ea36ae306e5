# SPDX-License-Identifier: Apache-2.0
"""Every packed format: exact both ways, one encoding of every matrix, everything else refused."""

import hashlib

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor

from sparse_bitnet.errors import UserError
from sparse_bitnet.ops.nm_mask import nm_mask
from sparse_bitnet.ops.select_ternary import quantize_ternary
from sparse_bitnet.packing.codec import pack, unpack
from sparse_bitnet.packing.formats import FORMATS, needs_exact, row_bytes
from sparse_bitnet.pattern import NMPattern


def make_codes(
    rows: int, in_features: int, pattern: NMPattern, density: float, seed: int
) -> Tensor:
    """Random codes within the pattern; `density` of the kept ones are not zero."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, in_features, generator=generator)
    codes = weight.sign().to(torch.int8) * nm_mask(weight, pattern)
    return codes * (torch.rand(rows, in_features, generator=generator) < density)


def held(format: str, codes: Tensor, pattern: NMPattern) -> Tensor:
    """The codes, or for a format of full groups others whose groups have n non-zeros."""
    if not needs_exact(format):
        return codes
    signs = 2 * (codes >= 0).to(torch.int8) - 1
    if pattern.is_dense:
        return signs
    order = torch.arange(codes.numel()).view(codes.shape) * 2654435761 % 1009
    return signs * nm_mask(order.float(), pattern).to(torch.int8)


patterns = st.integers(1, 32).flatmap(
    lambda m: st.integers(1, m).map(lambda n: NMPattern(n, m))
) | st.sampled_from([NMPattern(8, 8), NMPattern(6, 8), NMPattern(2, 4), NMPattern(2, 8)])


@st.composite
def matrices(draw: st.DrawFn) -> tuple[Tensor, NMPattern]:
    pattern = draw(patterns)
    largest = 700 // pattern.m
    in_features = draw(st.integers(1, largest)) * (1 if pattern.is_dense else pattern.m)
    density = draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
    rows, seed = draw(st.integers(1, 9)), draw(st.integers(0, 1000))
    codes = make_codes(rows, in_features, pattern, density, seed)
    if draw(st.booleans()):
        codes[draw(st.integers(0, rows - 1))] = 0
    return codes, pattern


@pytest.mark.parametrize("format", FORMATS)
@given(matrix=matrices())
def test_packing_is_exact(format: str, matrix: tuple[Tensor, NMPattern]) -> None:
    codes, pattern = held(format, *matrix), matrix[1]
    packed = pack(codes, format, pattern)
    assert packed.dtype == torch.uint8
    assert packed.shape == (len(codes), row_bytes(format, pattern, codes.shape[1]))
    assert torch.equal(unpack(packed, format, pattern, tuple(codes.shape)), codes)


@pytest.mark.parametrize("format", FORMATS)
def test_large_and_strided_matrices_round_trip(format: str) -> None:
    """More weights than are coded at a time, on several threads."""
    pattern = NMPattern(2, 4)
    weight = torch.randn(1100, 1096)
    codes = (quantize_ternary(weight)[0] * nm_mask(weight, pattern)).t().contiguous().t()
    codes = held(format, codes, pattern)
    packed = pack(codes, format, pattern)
    assert torch.equal(packed[700:701], pack(codes[700:701], format, pattern))
    assert torch.equal(unpack(packed, format, pattern, (1100, 1096)), codes)


# The layout itself: these digests may change only together with the version.
GOLDEN = {
    ("i2", "8:8"): "14701793d7dfa6ac",
    ("i2", "6:8"): "31da8ee77aa1577e",
    ("b3", "8:8"): "5cad39ec751df145",
    ("b3", "6:8"): "24e5b7cb0f9edb19",
    ("nm-enum", "8:8"): "681498092302cf20",
    ("nm-enum", "6:8"): "366484d5d7010ef0",
    ("nm-enum", "2:4"): "0f36ef2effa01383",
    ("nm-enum", "2:8"): "27a2a3289014a0d5",
    ("nm-enum", "5:16"): "e5d6ff1a34d77bc1",
    ("nm-enum", "7:24"): "9db262a23301d6d8",
    ("nm-sign", "8:8"): "42d48db5cd5feeff",
    ("nm-sign", "3:4"): "dcc7e9f77a9c7a99",
    ("nm-sign", "6:8"): "1281b6a4cec4db0b",
    ("nm-sign", "7:24"): "fcfefd838a67b32b",
}


@pytest.mark.parametrize(("format", "pattern"), GOLDEN)
def test_bytes_are_those_of_version_1(format: str, pattern: str) -> None:
    parsed = NMPattern.parse(pattern)
    packed = pack(held(format, golden_codes(pattern), parsed), format, parsed)
    assert hashlib.sha256(packed.numpy()).hexdigest()[:16] == GOLDEN[format, pattern]


@pytest.mark.parametrize("pattern", ["3:4", "8:8", "2:8"])
def test_a_group_with_fewer_non_zeros_has_no_signs_to_name_it(pattern: str) -> None:
    n_of_m = NMPattern.parse(pattern)
    codes = held("nm-sign", make_codes(3, 64, n_of_m, 1.0, 0), n_of_m)
    codes[2, int(codes[2].nonzero()[-1])] = 0
    with pytest.raises(UserError, match=r"layer up: nm-sign needs exactly .* use nm-enum"):
        pack(codes, "nm-sign", n_of_m, name="up")


def golden_codes(pattern: str) -> Tensor:
    """Codes without a random generator, whose output may differ between versions."""
    m = NMPattern.parse(pattern)
    lanes = (np.arange(3 * 336).reshape(3, 336) * 2654435761 >> 7) % 1009
    weight = torch.from_numpy(lanes.astype(np.float32) - 504)
    return (weight.sign() * (weight.abs() > 150) * nm_mask(weight, m)).to(torch.int8)


@pytest.mark.parametrize("format", FORMATS)
@given(data=st.data(), matrix=matrices())
def test_changed_bytes_are_refused_or_the_encoding_of_their_codes(
    format: str, data: st.DataObject, matrix: tuple[Tensor, NMPattern]
) -> None:
    codes, pattern = held(format, *matrix), matrix[1]
    packed = pack(codes, format, pattern)
    changes = st.tuples(st.integers(0, packed.numel() - 1), st.integers(0, 255))
    for position, byte in data.draw(st.lists(changes, min_size=1, max_size=3)):
        packed.view(-1)[position] = byte
    try:
        changed = unpack(packed, format, pattern, tuple(codes.shape))
    except UserError:
        return
    assert torch.equal(pack(changed, format, pattern), packed)


@pytest.mark.parametrize("m", [3, 4, 5, 8, 16, 24, 32])
def test_a_group_with_more_non_zeros_than_its_pattern_is_refused(m: int) -> None:
    pattern = NMPattern(2, m)
    codes = torch.zeros(2, 4 * m, dtype=torch.int8)
    codes[1, 3 * m : 3 * m + 2] = 1
    pack(codes, "i2", pattern)
    codes[1, -1] = -1
    with pytest.raises(UserError, match=rf"layer mlp\.up: a group of {m} has more than 2"):
        pack(codes, "i2", pattern, name="mlp.up")
    for format in ("i2", "b3"):
        packed = pack(codes, format, NMPattern(3, m))
        with pytest.raises(UserError, match=rf"tensor mlp.up.*more non-zeros than the .* 2:{m}"):
            unpack(packed, format, pattern, (2, 4 * m), name="mlp.up")


@pytest.mark.parametrize(
    ("codes", "format", "pattern", "message"),
    [
        (torch.full((2, 8), 2, dtype=torch.int8), "i2", "8:8", "other than -1, 0 and 1"),
        (torch.full((2, 8), -128, dtype=torch.int8), "b3", "8:8", "other than -1, 0 and 1"),
        (torch.zeros(2, 8), "i2", "8:8", "needs an int8 matrix, not torch.float32"),
        (torch.zeros(8, dtype=torch.int8), "i2", "8:8", "needs an int8 matrix"),
        (torch.zeros(0, 8, dtype=torch.int8), "i2", "8:8", "needs an int8 matrix"),
        (torch.zeros(2, 12, dtype=torch.int8), "i2", "6:8", "not a multiple of 8"),
        (torch.zeros(2, 12, dtype=torch.int8), "q4", "2:4", "'q4' is unknown"),
    ],
)
def test_codes_that_do_not_fit_are_refused(codes: Tensor, format: str, pattern: str, message: str):
    with pytest.raises(UserError, match=message):
        pack(codes, format, NMPattern.parse(pattern), name="layer")


def test_sizes_that_do_not_match_are_refused() -> None:
    pattern = NMPattern(6, 8)
    packed = pack(make_codes(4, 64, pattern, 1.0, 0), "i2", pattern)
    for shape in ((4, 320), (5, 64), (0, 64), (4, 0), (4, 2**24)):
        with pytest.raises(UserError, match="layer q"):
            unpack(packed, "i2", pattern, shape, name="layer q")
    with pytest.raises(UserError, match=r"not torch\.int8"):
        unpack(packed.view(torch.int8), "i2", pattern, (4, 64))
