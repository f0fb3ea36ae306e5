# SPDX-License-Identifier: Apache-2.0
"""Matrix kernels: every format and instruction set returns the bits of the reference.

The reference is numpy on the codes: integer sums, then float32 operations in the order matmul.h states.
"""

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from sparse_bitnet.nn.straight_through import ternary_int8_linear
from sparse_bitnet.ops.quantize_int8 import quantize_int8_reference
from sparse_bitnet.packing import codec
from sparse_bitnet.pattern import NMPattern

_cpu = pytest.importorskip("sparse_bitnet._cpu", reason="the extension is not built")

FORMATS = {
    name: _cpu.WeightFormat[name.replace("-", "_")]
    for name in ("i2", "b3", "int8", "int4", "lookup")
}
PATTERNS = [NMPattern(6, 8), NMPattern(2, 4), NMPattern(2, 8), NMPattern(8, 8), NMPattern(5, 16)]
SHAPES = [(1, 64), (2300, 208), (3, 16), (17, 336), (33, 896), (5, 1072), (70, 2576), (19, 1392)]
TOKENS = [1, 2, 3, 5, 8, 17, 33, 64]
POISON = 0xA5


@pytest.fixture(params=_cpu.supported_isas(for_tests=True))
def kernels(request, record_property):
    record_property("isa", request.param)
    return _cpu.Kernels.choose(request.param)


def aligned(count: int, dtype: type, fill: int = POISON) -> np.ndarray:
    """`count` poisoned elements on a 64-byte boundary; the padding of a matrix is what it is."""
    size = np.dtype(dtype).itemsize
    memory = np.full(count * size + 64, fill, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + count * size].view(dtype)


@dataclass
class Weights:
    """A matrix; `product` lays it out for the engine, rows `stride` bytes apart."""

    format: str
    pattern: NMPattern
    codes: np.ndarray
    scale: float = 0.0371
    scales: np.ndarray = field(default_factory=lambda: np.zeros(1, np.float32))
    group_scales: torch.Tensor | None = None  # [rows, groups]; [rows, 1]: of rows
    exact: bool = False  # every group has n non-zeros

    def packed(self) -> np.ndarray:
        if self.format == "int8":
            return self.codes.view(np.uint8)
        if self.format == "int4":
            rows, columns = self.codes.shape
            padded = np.zeros((rows, -(-columns // 64) * 64), np.uint8)
            padded[:, :columns] = self.codes + 8
            halves = padded.reshape(rows, -1, 2, 32)
            return (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(rows, -1)
        return codec.pack(torch.from_numpy(self.codes), self.format, self.pattern).numpy()

    def product(self, y: np.ndarray, bias: np.ndarray | None):
        rows, columns = self.codes.shape
        address = 0 if bias is None else bias.ctypes.data
        n, m = self.pattern.n, self.pattern.m
        scales, group, scale_type = self.scales.ctypes.data, 0, "float32"
        if self.group_scales is None:
            scales = scales if self.format.startswith("int") else 0
        elif (groups := self.group_scales.shape[1]) == 1:
            self.arranged = self.group_scales.float().flatten()
            scales = self.arranged.data_ptr()
        else:
            padded = torch.nn.functional.pad(
                self.group_scales, (0, 0, 0, -rows % 64), value=torch.nan
            )
            strips = padded.view(-1, 64 if self.format == "b3" else 16, groups)
            self.arranged = strips.transpose(1, 2).contiguous()
            group, scale_type = columns // groups, str(padded.dtype).removeprefix("torch.")
            scales = self.arranged.data_ptr()
        is_tight = self.format in ("lookup", "b3")
        width = _cpu.bytes_per_row(FORMATS[self.format], n, m, columns, self.exact, group)
        self.stride = width if is_tight else -(-width // 64) * 64
        self.data = aligned(-(-rows // 64) * 64 * self.stride + 64, np.uint8)
        matrix = _cpu.Matrix(
            FORMATS[self.format],
            *(n, m, rows, columns, self.stride, self.data.ctypes.data, self.scale, scales, group),
            _cpu.ScaleType[scale_type],
            self.exact,
        )
        if is_tight or group:
            packed = codec.pack(self.codes, "i2", NMPattern(n, m))
            stored = (_cpu.StoredFormat.i2, n, m, rows, columns, packed.size)
            source = _cpu.StoredMatrix(*stored, address=packed.ctypes.data)
            assert _cpu.repack(_cpu.ThreadPool(1), source, matrix)[2] is None
        else:
            packed = self.packed()
            assert packed.shape == (rows, width)
            self.data[: rows * self.stride].reshape(rows, self.stride)[:, :width] = packed
        return _cpu.Product(matrix, address, y.ctypes.data, y.strides[0] // 4)


class Quantized:
    """Activations as the kernels quantise them, in poisoned memory."""

    def __init__(self, kernels, pool, x: np.ndarray, *, fine: bool, group: int = 0) -> None:
        tokens, columns = x.shape
        self.groups = columns // group if group else 1
        stride = (-(-columns // 64) | 1) * 64
        self.shape = (tokens, columns)
        slack = _cpu.ACTIVATION_SLACK
        self.codes = aligned(tokens * stride + slack, np.int8)
        self.fine = aligned(tokens * stride + slack, np.int8) if fine else None
        self.scales, self.sums, self.fine_sums = (
            aligned(tokens * self.groups, dtype) for dtype in (np.float32, np.int32, np.int32)
        )
        x = np.ascontiguousarray(x)
        self.activations = _cpu.Activations(tokens, columns, *self.addresses(), group)
        kernels.quantize(x.ctypes.data, self.activations)
        rows = self.codes[: tokens * stride].reshape(tokens, stride)
        self.code_rows, self.padding = rows[:, :columns], rows[:, columns:]
        if self.fine is not None:
            rows = self.fine[: tokens * stride].reshape(tokens, stride)
            self.fine_rows, self.fine_padding = rows[:, :columns], rows[:, columns:]

    def addresses(self) -> tuple[int, ...]:
        fine_sums = None if self.fine is None else self.fine_sums
        arrays = (self.codes, self.fine, self.scales, self.sums, fine_sums)
        return tuple(0 if array is None else array.ctypes.data for array in arrays)


def draw_codes(generator, format: str, pattern: NMPattern, rows: int, columns: int) -> np.ndarray:
    if format == "int8":
        return generator.integers(-128, 128, (rows, columns)).astype(np.int8)
    if format == "int4":
        return generator.integers(-8, 8, (rows, columns)).astype(np.int8)
    codes = generator.integers(-1, 2, (rows, columns)).astype(np.int8)
    codes[0] = 1 - 2 * (np.arange(columns) % 2)
    groups = codes.reshape(rows, -1, pattern.m)
    order = generator.random(groups.shape).argsort(-1).argsort(-1)
    return np.where(order < pattern.n, groups, 0).astype(np.int8).reshape(rows, columns)


def draw_weights(generator, format: str, pattern: NMPattern, rows: int, columns: int) -> Weights:
    count = {"int8": rows, "int4": rows * -(-columns // 64)}.get(format, 1)
    scales = generator.uniform(0.01, 0.02, count).astype(np.float32)
    codes = draw_codes(generator, format, pattern, rows, columns)
    return Weights(format=format, pattern=pattern, codes=codes, scales=scales)


def draw_x(generator, tokens: int, columns: int) -> np.ndarray:
    return (generator.standard_normal((tokens, columns)) * 3).astype(np.float32)


def dot(weights: np.ndarray, x: np.ndarray) -> np.ndarray:
    exact = x.astype(np.float64) @ weights.astype(np.float64).T
    return exact.astype(np.int32).astype(np.float32)


def expected(weights: Weights, x: Quantized, bias: np.ndarray | None) -> np.ndarray:
    fine_part = np.float32(1 / 128)
    activation_scale = x.scales[:, None]
    if weights.group_scales is not None:
        scales = weights.group_scales.float().numpy()
        width = x.shape[1] // scales.shape[1]
        y = np.zeros((x.shape[0], weights.codes.shape[0]), np.float32)
        for g in range(scales.shape[1]):
            part = slice(width * g, width * g + width)
            value = dot(weights.codes[:, part], x.code_rows[:, part])
            if scales.shape[1] == 1:
                y = value * (activation_scale * scales[:, 0])
            elif x.groups > 1:
                y = y + value * scales[:, g] * x.scales.reshape(-1, x.groups)[:, g : g + 1]
            else:
                y = y + value * scales[:, g]
        if scales.shape[1] > 1 and x.groups == 1:
            y = y * activation_scale
    elif weights.format == "int4":
        groups = -(-x.shape[1] // 64)
        scales = weights.scales.reshape(-1, groups)
        y = np.zeros((x.shape[0], weights.codes.shape[0]), np.float32)
        for g in range(groups):
            part = slice(64 * g, 64 * g + 64)
            value = dot(weights.codes[:, part], x.code_rows[:, part])
            if x.fine is not None:
                value = value + dot(weights.codes[:, part], x.fine_rows[:, part]) * fine_part
            y = y + value * scales[:, g]
        y = y * activation_scale
    elif weights.format == "int8":
        value = dot(weights.codes, x.code_rows)
        if x.fine is not None:
            both = x.code_rows.astype(np.float64) * 128 + x.fine_rows
            value = (both @ weights.codes.astype(np.float64).T).astype(np.float32) * fine_part
        y = value * (activation_scale * weights.scales)
    else:
        y = dot(weights.codes, x.code_rows) * (activation_scale * np.float32(weights.scale))
    return y if bias is None else y + bias


def run(
    kernels, pool, x: Quantized, group: list[Weights], biases, padding: int = 5
) -> list[np.ndarray]:
    """y of each weights, padded by poison that must stay as it is."""
    tokens = x.shape[0]
    outputs = []
    for weights in group:
        width = weights.codes.shape[0] + padding
        outputs.append(aligned(tokens * width, np.float32).reshape(tokens, width))
    products = [
        weights.product(y, bias) for weights, y, bias in zip(group, outputs, biases, strict=True)
    ]
    kernels.matmul(pool, x.activations, products)
    if not 2 < tokens < 24:  # what processors of another vendor do
        first = [y.copy() for y in outputs]
        _cpu.change_vendor()
        kernels.matmul(pool, x.activations, products)
        _cpu.change_vendor()
        assert all(map(np.array_equal, outputs, first))
    for weights, y in zip(group, outputs, strict=True):
        assert (y[:, weights.codes.shape[0] :].view(np.uint8) == POISON).all()
    return [y[:, : weights.codes.shape[0]] for weights, y in zip(group, outputs, strict=True)]


def assert_same(ours: np.ndarray, theirs: np.ndarray) -> None:
    np.testing.assert_array_equal(ours.view(np.int32), np.ascontiguousarray(theirs).view(np.int32))


def check(
    kernels, pool, weights: Weights, x: np.ndarray, bias=None, *, fine=False, group=0, padding=5
) -> None:
    """Require the bits of the reference for one product."""
    quantized = Quantized(kernels, pool, x, fine=fine, group=group)
    (y,) = run(kernels, pool, quantized, [weights], [bias], padding)
    assert_same(y, expected(weights, quantized, bias))


@pytest.mark.parametrize("format", list(FORMATS))
def test_products_equal_the_reference_bit_for_bit(kernels, format):
    generator = np.random.default_rng(0)
    pools = [_cpu.ThreadPool(threads) for threads in (1, 2, 3)]
    patterns = PATTERNS[: 2 if format == "lookup" else 1]
    cases = itertools.product(patterns, SHAPES)
    for index, (pattern, (rows, columns)) in enumerate(cases):
        weights = draw_weights(generator, format, pattern, rows, columns)
        for tokens in TOKENS[: 6 if rows > 99 else None]:
            fine = format in ("int8", "int4") and (index + tokens) % 3 != 0
            x = draw_x(generator, tokens, columns)
            bias = draw_x(generator, 1, rows)[0] if (index + tokens) % 2 else None
            check(kernels, pools[(index + tokens) % 3], weights, x, bias, fine=fine)


@pytest.mark.parametrize("text", ["3:4", "2:4", "1:4", "6:8", "4:4"])
def test_products_of_full_groups_equal_the_reference_bit_for_bit(kernels, text):
    generator = np.random.default_rng(7)
    pools = [_cpu.ThreadPool(threads) for threads in (1, 2)]
    pattern = NMPattern.parse(text)
    for index, (rows, columns) in enumerate([(1, 64), (9, 16), (17, 336), (333, 1072), (24, 2576)]):
        weight = generator.random((rows, columns // pattern.m, pattern.m))
        kept = weight.argsort(-1).argsort(-1) < pattern.n
        signs = generator.choice(np.array([-1, 1], np.int8), (rows, columns))
        codes = np.where(kept.reshape(rows, columns), signs, np.int8(0))
        weights = Weights(format="lookup", pattern=pattern, codes=codes, exact=True)
        for tokens in (1, 2, 3, 5, 16, 37):
            x = draw_x(generator, tokens, columns)
            bias = draw_x(generator, 1, rows)[0] if tokens % 2 else None
            check(kernels, pools[(index + tokens) % 2], weights, x, bias)
        if pattern.m == 4 and pattern.n < 4:
            assert weights.stride == -(-columns // 256) * 40  # 1.25 bits a weight


@pytest.mark.parametrize("group", [0, 32, 64, 128, 256])
@pytest.mark.parametrize("format", ["i2", "b3", "lookup"])
def test_scales_of_rows_and_groups_equal_the_reference_bit_for_bit(kernels, format, group):
    generator = np.random.default_rng(6)
    pool = _cpu.ThreadPool(2)
    dtypes = itertools.cycle([torch.float16, torch.bfloat16, torch.float32])
    pattern = NMPattern(6, 8) if format != "lookup" else NMPattern(1, 1)
    shapes = [(1, 256), (13, 1280), (4300, 384), (33, 2816), (9, 5 * 320 + 256 + 64), (18, 768)]
    for rows, columns in shapes:
        if columns <= group or (group and columns % group) or (format != "i2" and group == 32):
            continue
        for tokens in (1, 3, 5, 6, 20, 37)[:: 2 if rows > 99 else 1]:
            shape = (rows, columns // group if group else 1)
            weights = draw_weights(generator, format, pattern, rows, columns)
            scales = torch.from_numpy(generator.uniform(-0.02, 0.02, shape))
            scales[0, 0] = 2.0**-20  # subnormal in float16
            weights.group_scales = scales.to(next(dtypes))
            x = draw_x(generator, tokens, columns)
            bias = draw_x(generator, 1, rows)[0] if tokens % 2 else None
            check(kernels, pool, weights, x, bias, group=group if tokens != 5 else 0)


@pytest.mark.parametrize("tokens", [1, 6, 40, 515])
def test_a_group_of_products_shares_one_call(kernels, tokens):
    generator = np.random.default_rng(1)
    columns = 320
    group = [
        draw_weights(generator, format, NMPattern(6, 8), rows, columns)
        for format, rows in [("i2", 67), ("int8", 130), ("b3", 16)]
    ]
    biases = [draw_x(generator, 1, weights.codes.shape[0])[0] for weights in group]
    biases[2] = None
    pool = _cpu.ThreadPool(2)
    x = Quantized(kernels, pool, draw_x(generator, tokens, columns), fine=True)
    for weights, bias, y in zip(group, biases, run(kernels, pool, x, group, biases), strict=True):
        assert_same(y, expected(weights, x, bias))


@pytest.mark.parametrize(("format", "width"), [("lookup", 608), ("int8", 608), ("i2", 609)])
def test_long_rows_and_large_outputs_equal_the_reference_bit_for_bit(kernels, format, width):
    # A call has at most 512 tokens; on a matrix unit, whole lines of y go past the caches.
    generator = np.random.default_rng(8)
    weights = draw_weights(generator, format, NMPattern(6, 8), 530, 2304)
    x, fine = draw_x(generator, 513, 2304), format == "int8"
    check(kernels, _cpu.ThreadPool(1), weights, x, fine=fine, padding=width - 530)


def test_products_are_those_of_the_training_code(kernels):
    generator = np.random.default_rng(2)
    weights = draw_weights(generator, "i2", NMPattern(6, 8), 37, 1288)
    x = draw_x(generator, 9, 1288)
    bias = draw_x(generator, 1, 37)[0]
    pool = _cpu.ThreadPool(2)
    (y,) = run(kernels, pool, Quantized(kernels, pool, x, fine=False), [weights], [bias])
    codes, scale = torch.from_numpy(weights.codes), torch.tensor(weights.scale)
    theirs = ternary_int8_linear(
        torch.from_numpy(x), codes.float(), torch.from_numpy(bias), codes, scale
    )
    assert_same(y, theirs.numpy())


@pytest.mark.parametrize("columns", [1, 15, 64, 100, 1337])
def test_activations_equal_the_reference(kernels, columns):
    generator = np.random.default_rng(3)
    x = draw_x(generator, 12, columns)
    x[1] = 0
    x[2] *= 1e-8
    x[3] *= 1e37
    x[4, 0] = np.inf
    x[5, -1] = np.nan
    x[6] = np.round(x[6]) + 0.5
    ours = Quantized(kernels, _cpu.ThreadPool(3), x, fine=True)
    codes, scales = quantize_int8_reference(torch.from_numpy(x))
    np.testing.assert_array_equal(ours.code_rows, codes.numpy())
    np.testing.assert_array_equal(ours.scales, scales.numpy()[:, 0])
    np.testing.assert_array_equal(ours.sums, ours.code_rows.sum(1, dtype=np.int32))
    np.testing.assert_array_equal(ours.fine_sums, ours.fine_rows.sum(1, dtype=np.int32))
    assert not ours.padding.any()
    assert not ours.fine_padding.any()
    finite = np.isfinite(x).all(1)
    close = ours.code_rows + ours.fine_rows / 128
    error = np.abs(close[finite] * ours.scales[finite, None] - x[finite])
    assert (error <= ours.scales[finite, None] * (0.51 / 128)).all()


def test_largest_sums_of_groups_do_not_overflow(kernels):
    for columns, value, sign in itertools.product((64, 128, 256), (1, -1), (1, -1)):
        codes = np.full((67, 2 * columns), value, np.int8)
        weights = Weights("b3", NMPattern(1, 1), codes, group_scales=torch.ones(67, 2))
        check(kernels, _cpu.ThreadPool(1), weights, np.full((2, 2 * columns), sign, np.float32))


def test_largest_sums_do_not_overflow(kernels):
    columns = 8960
    x = np.float32([[1], [-1], [1]]).repeat(columns, 1)
    pool = _cpu.ThreadPool(1)
    for format, value in [("i2", 1), ("i2", -1), ("int8", -128), ("int4", -8)]:
        codes = np.full((18, columns), value, np.int8)
        count = {"int8": 18, "int4": 18 * columns // 64}.get(format, 1)
        weights = Weights(format, NMPattern(8, 8), codes, scales=np.ones(count, np.float32))
        for tokens in (x[:1], x, np.tile(x, (22, 1))):
            check(kernels, pool, weights, tokens, fine=True)


@pytest.mark.parametrize("format", ["i2", "b3"])
def test_rows_longer_than_any_partial_sum_are_exact(kernels, format):
    generator = np.random.default_rng(5)
    columns = 330_000
    codes = np.ones((5, columns), np.int8)
    codes[1] = -1
    codes[2:] = draw_codes(generator, format, NMPattern(8, 8), 3, columns)
    weights = Weights(format=format, pattern=NMPattern(8, 8), codes=codes)
    for x in (np.ones((1, columns), np.float32), draw_x(generator, 2, columns)):
        check(kernels, _cpu.ThreadPool(1), weights, x)


def test_instruction_sets_are_chosen_by_name_and_by_variable(monkeypatch):
    monkeypatch.delenv("SPARSE_BITNET_ISA", raising=False)
    best = _cpu.Kernels.choose("").isa
    assert best == _cpu.supported_isas()[0]
    monkeypatch.setenv("SPARSE_BITNET_ISA", "generic")
    assert _cpu.Kernels.choose("").isa == "generic"
    assert _cpu.Kernels.choose(best).isa == best
    for name in _cpu.supported_isas():
        monkeypatch.setenv("SPARSE_BITNET_ISA", name)
        assert _cpu.Kernels.choose("").isa == name
    monkeypatch.setenv("SPARSE_BITNET_ISA", "mmx")
    with pytest.raises(ValueError, match=r"SPARSE_BITNET_ISA=mmx: .* generic"):
        _cpu.Kernels.choose("")


@pytest.mark.parametrize("tokens", [1, 5, 64])
@pytest.mark.parametrize("fine", [False, True])
def test_largest_sums_of_int8_are_exact(kernels, fine, tokens):
    """The most columns allowed, with weights of one sign: the sums just fit 32 bits."""
    columns, pool = 1 << 17, _cpu.ThreadPool(2)
    codes = np.repeat(np.array([-128, 127, 1], np.int8)[:, None], columns, 1)
    scales = np.array([0.5, 0.25, 2.0], np.float32)
    weights = Weights(format="int8", pattern=NMPattern(1, 1), codes=codes, scales=scales)
    x = Quantized(kernels, pool, np.ones((tokens, columns), np.float32), fine=fine)
    y = np.full((tokens, 3), np.nan, np.float32)
    kernels.matmul(pool, x.activations, [weights.product(y, None)])
    sums = codes.astype(np.int64).sum(1) * 127
    exact = sums.astype(np.float32) * (x.scales[:1] * scales)
    np.testing.assert_array_equal(y, exact[None].repeat(tokens, 0))
