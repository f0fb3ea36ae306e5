# SPDX-License-Identifier: Apache-2.0
"""The compiled kernels return what the references return, on every instruction set of this machine."""

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from one_process import run_in_fork
from sparse_bitnet.ops.quantize_int8 import quantize_int8_reference
from sparse_bitnet.ops.select_ternary import absmean_reference, select_ternary_reference
from sparse_bitnet.variants.built_in import hadamard

_cpu = pytest.importorskip("sparse_bitnet._cpu", reason="the extension is not built")
cpu = pytest.importorskip("sparse_bitnet.ops.cpu")

DTYPES = [torch.float32, torch.bfloat16]
# Ties, both zeros, denormals of either dtype, the largest finite numbers, infinities, NaN.
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, 2.5, -2.5, 1e-40, -1e-40, 9.2e-41, 3e38, -3e38]
NOT_FINITE = [math.inf, -math.inf, math.nan]


@pytest.fixture(params=_cpu.supported_isas())
def isa(request) -> str:
    return request.param


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    if ours.dtype == torch.bool:
        assert ours.view(torch.uint8).max() <= 1


@st.composite
def weights_and_patterns(draw):
    m = draw(st.integers(1, 32))
    n = draw(st.integers(1, m))
    rows, groups = draw(st.integers(1, 4)), draw(st.integers(1, 80))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    weight = torch.randn(rows, groups * m, generator=generator)
    palette = torch.tensor(draw(st.sampled_from([SPECIAL, SPECIAL + NOT_FINITE])))
    chosen = palette[torch.randint(len(palette), weight.shape, generator=generator)]
    special = torch.rand(weight.shape, generator=generator) < draw(st.sampled_from([0.0, 0.3, 1.0]))
    return torch.where(special, chosen, weight).to(draw(st.sampled_from(DTYPES))), n, m


@settings(max_examples=150, deadline=None)
@given(
    weights_and_patterns(),
    st.floats(2.0**-16, 4.0, width=32),
    st.sampled_from(_cpu.supported_isas()),
)
def test_mask_and_codes_equal_the_reference(case, scale, isa):
    weight, n, m = case
    kernels = cpu.Kernels(isa)
    weight_scale = torch.tensor(scale)
    codes, mask = kernels.select_ternary(weight, weight_scale, n, m)
    expected_codes, expected_mask = select_ternary_reference(weight, weight_scale, n, m)
    assert_same(mask, expected_mask)
    assert_same(codes, expected_codes)
    assert_same(kernels.nm_mask(weight, n, m), expected_mask)


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_around_the_rounding_boundary_are_exact(isa, dtype):
    """|w| a few representable steps below, at and above scale / 2."""
    scales = torch.logspace(-5, 2, 400, dtype=torch.float32).clamp_min(1e-5)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    for scale in scales:
        near = (scale / 2).to(dtype).view(bits) + torch.arange(-4, 4, dtype=bits)
        weight = torch.cat([near.view(dtype), -near.view(dtype)])
        codes, _ = cpu.Kernels(isa).select_ternary(weight, scale, 1, 1)
        assert_same(codes, select_ternary_reference(weight, scale, 1, 1)[0])


@functools.cache
def large_case(dtype: torch.dtype) -> dict:
    """A weight large enough for three threads in either dtype, and what the references make of it."""
    weight = torch.randn(1540, 24 * 56, generator=torch.Generator().manual_seed(0)).to(dtype)
    scale = absmean_reference(weight)
    patterns = [(6, 8), (3, 7), (8, 8)]
    return {
        "weight": weight,
        "scale": scale,
        "selections": {(n, m): select_ternary_reference(weight, scale, n, m) for n, m in patterns},
        "int8": quantize_int8_reference(weight),
        "groups": torch.ops.sparse_bitnet.quantize_groups(weight.double(), 64),  # the reference
    }


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_matrices_on_several_threads_equal_the_reference(isa, dtype, threads):
    expected = large_case(dtype)
    weight, scale = expected["weight"], expected["scale"]
    kernels = cpu.Kernels(isa, threads)
    assert_same(kernels.absmean(weight), scale)
    for (n, m), selection in expected["selections"].items():
        for pair in zip(kernels.select_ternary(weight, scale, n, m), selection, strict=True):
            assert_same(*pair)
        assert_same(kernels.nm_mask(weight, n, m), selection[1])
    ours = *kernels.quantize_int8(weight), *kernels.quantize_groups(weight, 64)
    for pair in zip(ours, (*expected["int8"], *expected["groups"]), strict=True):
        assert_same(*pair)


@pytest.mark.parametrize("size", [1, 31, 32, 33, 65535, 65536, 65537, 200_001])
@pytest.mark.parametrize("dtype", DTYPES)
def test_absmean_is_the_rounded_mean_everywhere(isa, dtype, size):
    weight = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    exact = math.fsum(weight.double().abs().tolist()) / size
    for threads in (1, 2, 3):
        mean = cpu.Kernels(isa, threads).absmean(weight)
        assert mean.shape == ()
        assert mean.item() == torch.tensor(exact, dtype=torch.float64).float().item()


def test_absmean_has_a_floor_and_keeps_nan(isa):
    kernels = cpu.Kernels(isa)
    assert kernels.absmean(torch.zeros(4, 8)).item() == torch.tensor(1e-5).item()
    assert kernels.absmean(torch.tensor([1.0, math.nan])).isnan()
    assert kernels.absmean(torch.tensor([1.0, -math.inf])).item() == math.inf


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 300),
    st.integers(1, 5),
    st.sampled_from(DTYPES),
    st.sampled_from([SPECIAL, SPECIAL + NOT_FINITE, [k + 0.5 for k in range(-127, 127)] + [127.0]]),
    st.integers(0, 2**32),
    st.sampled_from(_cpu.supported_isas()),
)
def test_int8_codes_equal_the_reference(features, tokens, dtype, palette, seed, isa):
    generator = torch.Generator().manual_seed(seed)
    values = torch.tensor(palette)
    x = values[torch.randint(len(palette), (2, tokens, features), generator=generator)]
    x[0] = torch.randn(tokens, features, generator=generator) * 10.0 ** (seed % 20 - 10)
    x = x.to(dtype)
    for ours, theirs in zip(
        cpu.Kernels(isa).quantize_int8(x), quantize_int8_reference(x), strict=True
    ):
        assert_same(ours, theirs)


@pytest.mark.parametrize("m", [2, 4, 7, 8, 9, 16, 21, 32])
def test_nothing_is_written_outside_the_outputs(isa, m):
    guard = 64
    for groups in (1, 5, 33, 150):
        count = groups * m
        weight = torch.randn(count)
        codes = torch.full((count + 2 * guard,), 99, dtype=torch.int8)
        mask = torch.full((count + 2 * guard,), 99, dtype=torch.uint8)
        _cpu.Kernels.choose(isa).select_ternary(
            weight=weight.data_ptr(),
            dtype=_cpu.Dtype.float32,
            weight_scale=1.0,
            groups=groups,
            n=m // 2,
            m=m,
            codes=codes.data_ptr() + guard,
            mask=mask.data_ptr() + guard,
            threads=1,
        )
        for output in (codes, mask):
            assert (output[:guard] == 99).all()
            assert (output[-guard:] == 99).all()
            assert (output[guard:-guard] != 99).all()


@pytest.mark.parametrize("isa", _cpu.supported_isas(for_tests=True))
@pytest.mark.parametrize("block", [1, 2, 4, 8, 16, 32, 1024, 2048])
def test_hadamard_matrices_give_the_bits_of_the_reference(block, isa):
    for n in (block, 3 * block, 37 * block):
        x, one, signs = torch.randn(n), torch.ones(n), torch.randn(n).sign()
        for before, after in ((signs, one), (one, signs), (one, one)):
            memory = torch.full((n + 65,), math.nan)
            memory[1 : n + 1] = x
            signs_of = [0 if each is one else each.data_ptr() for each in (before, after)]
            _cpu.Kernels.choose(isa).hadamard(memory.data_ptr() + 4, *signs_of, n, block)
            assert_same(memory[1 : n + 1], hadamard(x * before, block) * after)
            by_op = torch.ops.sparse_bitnet.hadamard(x * before, block)
            assert_same(memory[1 : n + 1], by_op * after)
            assert memory[[0, *range(n + 1, n + 65)]].isnan().all()


def test_the_child_of_a_fork_does_not_wait_for_the_threads_of_its_parent():
    weight, kernels = torch.randn(1024, 1024), cpu.Kernels(threads=2)
    expected = kernels.nm_mask(weight, 2, 4).numpy()

    def check() -> None:
        assert not (kernels.nm_mask(weight, 2, 4).numpy() != expected).any()

    run_in_fork(check)
