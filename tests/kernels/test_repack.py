# SPDX-License-Identifier: Apache-2.0
"""Loading in C++ against the plain codec: the same codes, the same refusals, the same checksums."""

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sparse_bitnet.errors import UserError
from sparse_bitnet.ops.nm_mask import nm_mask_reference
from sparse_bitnet.ops.quantize_int8 import quantize_int8_reference
from sparse_bitnet.packing.codec import pack, unpack
from sparse_bitnet.packing.formats import row_bytes
from sparse_bitnet.pattern import NMPattern

_cpu = pytest.importorskip("sparse_bitnet._cpu")

STORED = {
    name: _cpu.StoredFormat[name.replace("-", "_")] for name in ("i2", "b3", "nm-enum", "nm-sign")
}
RUN_TIME = {name: _cpu.WeightFormat[name.replace("-", "_")] for name in ("i2", "b3")}
PATTERNS = ["1:1", "8:8", "6:8", "2:4", "2:8", "1:3", "3:5", "7:16", "12:24", "5:32"]
PATTERNS += ["1:2", "20:32"]
SHAPES = [(1, 1), (3, 2), (5, 7), (2, 64), (7, 65), (4, 129), (3, 384), (33, 896), (2, 1601)]
POISON = 0xA5


@pytest.fixture(scope="module", params=[1, 3])
def pool(request: pytest.FixtureRequest):
    return _cpu.ThreadPool(request.param)


def make_codes(pattern: NMPattern, rows: int, groups: int, *, exact: bool = False) -> torch.Tensor:
    torch.manual_seed(rows * 1000 + groups)
    weight = torch.randn(rows, groups * pattern.m)
    codes = torch.randint(-1, 2, weight.shape, dtype=torch.int8)
    if exact:
        codes = 1 - 2 * (codes > 0).to(torch.int8)
    return codes * nm_mask_reference(weight, pattern.n, pattern.m)


def columns_near(pattern: NMPattern, columns: int) -> int:
    return max(1, columns // pattern.m) * pattern.m


def from_strips(strips: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """The codes [rows, columns] of b3 without group scales [strips, segments, 5, 64]."""
    pairs, signs = strips[:, :, :4, None], strips[:, :, 4, None, None]
    index = np.concatenate([pairs & 15, pairs >> 4], 3).astype(int)  # [.., 4, 2, 64]
    bits = (np.arange(4)[:, None] + [0, 4])[:, :, None]
    numbers = 13 + np.where(signs >> bits & 1, -index, index)
    digits = (numbers[..., None] // [1, 3, 9] % 3).reshape(*strips.shape[:2], 2, 4, 64, 3) - 1
    codes = digits.transpose(0, 4, 1, 2, 5, 3).reshape(len(strips) * 64, -1).astype(np.int8)
    assert not codes[:rows, columns:].any()
    return codes[:rows, :columns]


def repack(
    pool, data: np.ndarray, stored: str, pattern: NMPattern, rows: int, columns: int, target: str
):
    """(rows of the target [rows, row_bytes], crc32, damage); checks that nothing else is written."""
    coded = NMPattern(1, 1) if pattern.is_dense else pattern
    in_strips = target == "b3"
    taken, height = row_bytes(target, pattern, columns), rows
    stride = -(-taken // 64) * 64 + 64
    if in_strips:
        stride, height = _cpu.bytes_per_row(RUN_TIME["b3"], 1, 1, columns), -(-rows // 64) * 64
    out = np.full(height * stride + 256, POISON, np.uint8)
    base = -out.ctypes.data % 64
    data = np.ascontiguousarray(data).reshape(-1)
    # Sources have no alignment: every second one starts at an odd address.
    shifted = np.full(data.size + 8, POISON, np.uint8)
    shifted[1 : 1 + data.size] = data.view(np.uint8)
    shape = (coded.n, coded.m, rows, columns)
    crc32, is_readable, damage = _cpu.repack(
        pool,
        _cpu.StoredMatrix(STORED[stored], *shape, data.size, address=shifted.ctypes.data + 1),
        _cpu.Matrix(RUN_TIME[target], *shape, stride, out.ctypes.data + base),
    )
    assert is_readable
    assert (out[:base] == POISON).all()
    assert (out[base + height * stride :] == POISON).all()
    written = out[base : base + height * stride]
    if in_strips:
        strips = written.reshape(height // 64, -1, 5, 64)
        assert (strips[-1, :, :, (rows - 1) % 64 + 1 :] == POISON).all()
        if damage is not None:
            return None, crc32, damage
        codes = from_strips(strips, rows, columns)
        return pack(torch.from_numpy(codes), "b3", pattern).numpy(), crc32, damage
    written = written.reshape(rows, stride)
    assert (written[:, taken:] == POISON).all()
    return written[:, :taken], crc32, damage


@pytest.mark.parametrize("text", PATTERNS)
def test_every_format_repacks_to_every_format(pool, text: str) -> None:
    pattern = NMPattern.parse(text)
    for rows, wanted in SHAPES:
        columns = columns_near(pattern, wanted)
        for stored in STORED:
            codes = make_codes(pattern, rows, columns // pattern.m, exact=stored == "nm-sign")
            data = pack(codes, stored, pattern)
            raw = data.numpy().view(np.uint8)
            for target in RUN_TIME:
                expected = pack(codes, target, pattern).numpy()
                got, crc32, damage = repack(pool, raw, stored, pattern, rows, columns, target)
                assert damage is None, (stored, target, rows, columns)
                assert crc32 == zlib.crc32(raw.tobytes())
                assert np.array_equal(got, expected), (stored, target)


@pytest.mark.parametrize("rows", [1, 16, 35])
def test_i2_with_group_scales_lies_in_strips(pool, rows: int) -> None:
    columns, strips = 416, -(-rows // 16)
    codes = make_codes(NMPattern(6, 8), rows, columns // 8)
    digits = np.full((strips * 16, columns), 0, np.uint8)
    digits[:rows] = codes.numpy() + 1
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    words = (digits.reshape(strips, 16, columns // 16, 4, 4) << shifts).sum(3, dtype=np.uint8)
    wanted = words.swapaxes(1, 2).reshape(strips, -1)
    stride = 192
    out = np.zeros(strips * 16 * stride + 256, np.uint8)
    base = -out.ctypes.data % 64
    shape, scales = (6, 8, rows, columns), np.ones((strips, 13, 16), np.float32)
    data = pack(codes, "b3", NMPattern(6, 8)).numpy()
    stored = _cpu.StoredMatrix(STORED["b3"], *shape, data.size, address=data.ctypes.data)
    to = _cpu.Matrix(
        RUN_TIME["i2"], *shape, stride, out.ctypes.data + base, 1.0, scales.ctypes.data, 32
    )
    assert _cpu.repack(pool, stored, to) == (zlib.crc32(data.tobytes()), True, None)
    written = out[base : base + strips * 16 * stride].reshape(strips, -1)
    assert np.array_equal(written[:, : 4 * columns], wanted)
    assert not written[:, 4 * columns :].any()


@pytest.mark.parametrize("text", ["1:1", "6:8", "2:4", "3:5", "7:16", "5:32"])
@pytest.mark.parametrize("stored", ["i2", "b3", "nm-enum", "nm-sign"])
def test_damaged_bytes_are_refused_exactly_when_the_codec_refuses(text: str, stored: str) -> None:
    pattern = NMPattern.parse(text)
    pool = _cpu.ThreadPool(2)
    rows, columns = 2, columns_near(pattern, 100)
    codes = make_codes(pattern, rows, columns // pattern.m, exact=stored == "nm-sign")
    intact = pack(codes, stored, pattern).numpy()
    random = np.random.default_rng(0)
    refusals = 0
    for _ in range(150):
        damaged = intact.copy()
        damaged[random.integers(rows), random.integers(damaged.shape[1])] = random.integers(256)
        try:
            expected = unpack(torch.from_numpy(damaged), stored, pattern, (rows, columns))
        except UserError as error:
            expected = None
            refusals += 1
            reason = str(error).partition(": ")[2].replace(f"pattern {pattern}", "pattern")
        for target in ("i2", stored if stored in RUN_TIME else "b3"):
            got, _, damage = repack(pool, damaged, stored, pattern, rows, columns, target)
            if expected is None:
                # Where several things are wrong, either may be named.
                assert damage is not None, reason
            else:
                assert damage is None
                assert np.array_equal(got, pack(expected, target, pattern).numpy())
    # Words of 64 bits hold nearly all numbers; then most changes are other codes.
    assert refusals or stored == "nm-enum" or (stored, text) == ("nm-sign", "1:1")


def test_full_groups_are_for_lookup() -> None:
    with pytest.raises(ValueError, match="exact counts of non-zeros are for lookup"):
        _cpu.Matrix(_cpu.WeightFormat.i2, 3, 4, 8, 256, 64, 0, exact=True)


@pytest.mark.parametrize("text", ["2:4", "6:8"])
def test_rows_that_share_bytes_do_not_depend_on_threads(text: str) -> None:
    pattern = NMPattern.parse(text)
    codes = make_codes(pattern, 1509, 1000 // pattern.m).numpy()
    shape = (pattern.n, pattern.m, *codes.shape)
    stride = _cpu.bytes_per_row(_cpu.WeightFormat.lookup, *shape[:2], codes.shape[1])
    data, results = pack(codes, "i2", pattern), []
    for threads in (1, 2, 4):
        out = np.full(1520 * stride + 128, POISON, np.uint8)
        base = -out.ctypes.data % 64
        stored = _cpu.StoredMatrix(STORED["i2"], *shape, data.size, address=data.ctypes.data)
        matrix = _cpu.Matrix(_cpu.WeightFormat.lookup, *shape, stride, out.ctypes.data + base)
        pool = _cpu.ThreadPool(threads)
        assert _cpu.repack(pool, stored, matrix)[2] is None
        assert (out[:base] == POISON).all()
        assert (out[base + 1512 * stride :] == POISON).all()
        results.append(out[base : base + 1504 * stride])
    assert all(np.array_equal(results[0], result) for result in results)


def test_sizes_that_do_not_fit_are_refused() -> None:
    pool, out = _cpu.ThreadPool(1), np.zeros(4096, np.uint8)
    base = out.ctypes.data + -out.ctypes.data % 64
    shape = {"n": 1, "m": 1, "rows": 2, "columns": 64}
    stored = shape | {"format": _cpu.StoredFormat.i2, "bytes": 32, "address": base}
    target = shape | {"format": RUN_TIME["i2"], "row_stride": 64, "address": base + 1024}

    def repack_with(stored_change: dict[str, Any], target_change: dict[str, Any]) -> None:
        source = _cpu.StoredMatrix(**stored | stored_change)
        _cpu.repack(pool, source, _cpu.Matrix(**target | target_change))

    repack_with({}, {})
    for change in (
        *({"n": 2}, {"m": 33}, {"rows": 0}, {"columns": 65}, {"address": 0}, {"bytes": 31}),
        {"address": 0, "descriptor": 1, "offset": -1},
    ):
        with pytest.raises(ValueError, match=r"."):
            repack_with(change, {})
    for change in (
        *({"n": 2}, {"m": 33}, {"rows": 0}, {"rows": 1}, {"columns": 65}, {"row_stride": 32}),
        *({"format": _cpu.WeightFormat.int4, "scales": base}, {"address": base + 1025}),
    ):
        with pytest.raises(ValueError, match=r"."):
            repack_with({}, change)
    for enum in (_cpu.StoredFormat, _cpu.WeightFormat):
        with pytest.raises(ValueError, match="not a valid"):
            enum(7)


@pytest.mark.parametrize(
    "size", [-1, -(2**63), 1 << 62, *(2**63 - (1 << bits) for bits in (0, 21, 22))]
)
def test_a_huge_buffer_of_an_impossible_size_is_refused(size: int) -> None:
    with pytest.raises(MemoryError):
        _cpu.HugeBuffer(size)


def quantize_table(
    pool, values: torch.Tensor, type: str, scales: np.ndarray | None = None, isa: str = ""
):
    """(codes [rows, stride], scales, crc32, finite)."""
    rows, columns = values.shape
    source = values.contiguous().view(torch.uint8).numpy().reshape(-1)
    stride = (columns // (2 if type == "int4" else 1) + 63) // 64 * 64
    out = np.full(rows * stride + 64, POISON, np.uint8)
    base = -out.ctypes.data % 64
    made = np.full((rows, columns // 64 if type == "int4" else 1), np.nan, np.float32)
    crc32, is_readable, damage = _cpu.Kernels.choose(isa).load_table(
        pool,
        _cpu.StoredTable(
            _cpu.TableType[str(values.dtype).removeprefix("torch.")],
            rows,
            columns,
            source.size,
            address=source.ctypes.data,
            scales=0 if scales is None else scales.ctypes.data,
        ),
        _cpu.Table(
            _cpu.TableType[type], rows, columns, stride, out.ctypes.data + base, made.ctypes.data
        ),
    )
    assert (crc32, is_readable) == (zlib.crc32(source.tobytes()), True)
    return out[base : base + rows * stride].reshape(rows, stride), made, damage is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 63), (5, 100), (700, 192)])
def test_int8_tables_are_those_of_the_quantizer(pool, dtype: torch.dtype, shape) -> None:
    values = torch.randn(shape).to(dtype)
    values[0] = 0
    got, scales, finite = quantize_table(pool, values, "int8")
    codes, expected = quantize_int8_reference(values)
    assert finite
    assert np.array_equal(got[:, : shape[1]].view(np.int8), codes.numpy())
    assert (got[:, shape[1] :] == POISON).all()
    assert np.array_equal(scales, expected.numpy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_int4_tables_are_close(pool, dtype: torch.dtype) -> None:
    values = torch.randn(9, 192)
    stored_scales = np.full(9, 0.5, np.float32)
    values = (values * 30).round().to(dtype) if dtype == torch.int8 else values.to(dtype)
    got, scales, finite = quantize_table(pool, values, "int4", stored_scales)
    assert finite
    blocks = got[:, :96].reshape(9, 3, 32)
    digits = np.concatenate([blocks & 15, blocks >> 4], axis=2).astype(np.float32) - 8
    restored = (digits * scales[:, :, None]).reshape(9, 192)
    exact = values.float().numpy() * (0.5 if dtype == torch.int8 else 1)
    error = np.square(restored - exact).sum() / np.square(exact).sum()
    # 0.0083 with many Gaussian groups, 0.0088 without the choice between scales.
    assert error < 0.01


def test_int4_tables_are_the_same_on_every_instruction_set(pool) -> None:
    values = torch.randn(50, 192) * torch.logspace(-45, 30, 50)[:, None]
    values[3] = 0
    values[4] = 1
    values[5, :64] = values[5, 64]
    values[6] = torch.arange(192) - 96
    results = []
    for isa in _cpu.supported_isas():
        got, scales, finite = quantize_table(pool, values, "int4", isa=isa)
        assert finite
        results.append((got.tobytes(), scales.tobytes()))
    assert len(set(results)) == 1


def test_values_that_are_not_finite_are_found(pool) -> None:
    for type in ("int8", "int4"):
        for bad in (float("nan"), float("inf")):
            values = torch.randn(4, 64)
            values[2, 63] = bad
            assert not quantize_table(pool, values, type)[2]
            assert not quantize_table(pool, values.bfloat16(), type)[2]


def test_tables_of_floats_are_copied_row_by_row(pool) -> None:
    values = torch.randn(70, 33)
    out = np.full(70 * 192 + 64, POISON, np.uint8)
    base = -out.ctypes.data % 64
    array = values.numpy()
    source = _cpu.StoredTable(
        _cpu.TableType.float32, 70, 33, array.nbytes, address=array.ctypes.data
    )
    target = _cpu.Table(_cpu.TableType.float32, 70, 33, 192, out.ctypes.data + base)
    report = _cpu.Kernels.choose().load_table(pool, source, target)
    assert report == (zlib.crc32(array.tobytes()), True, None)
    rows = out[base : base + 70 * 192].reshape(70, 192)
    assert np.array_equal(rows[:, :132], array.view(np.uint8))
    assert (rows[:, 132:] == POISON).all()
    data = torch.randint(-128, 128, (1, 10_000), dtype=torch.int8)
    for size in (1, 7, 8, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1000, 9990):  # of checksums
        for first in (0, 1, 7):
            quantize_table(pool, data[:, first : first + size], "int8", np.ones(1, np.float32))


def test_files_are_read_from_an_offset_and_short_ones_refused(tmp_path: Path) -> None:
    kernels, pool, pattern = _cpu.Kernels.choose(), _cpu.ThreadPool(2), NMPattern(6, 8)
    codes = make_codes(pattern, 400, 100)
    raw = pack(codes, "nm-enum", pattern).numpy()
    path = tmp_path / "file"
    path.write_bytes(b"xyz" + raw.tobytes())
    stride = 256
    out = np.zeros(400 * stride + 64, np.uint8)
    base = out.ctypes.data + -out.ctypes.data % 64
    with open(path, "rb") as file:
        for offset, is_readable in ((3, True), (4, False)):
            shape = (6, 8, 400, 800)
            place = {"descriptor": file.fileno(), "offset": offset}
            source = _cpu.StoredMatrix(STORED["nm-enum"], *shape, raw.size, **place)
            report = _cpu.repack(pool, source, _cpu.Matrix(RUN_TIME["i2"], *shape, stride, base))
            assert report[1] == is_readable
            assert (report[0] == zlib.crc32(raw.tobytes())) == is_readable
        shape, scales = (400, raw.shape[1]), np.ones(400, np.float32)
        table = _cpu.StoredTable(
            _cpu.TableType.int8, *shape, raw.size, descriptor=file.fileno(), offset=4
        )
        target = _cpu.Table(_cpu.TableType.int8, *shape, 192, base, scales.ctypes.data)
        assert not kernels.load_table(pool, table, target)[1]
