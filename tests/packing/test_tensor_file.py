# SPDX-License-Identifier: Apache-2.0
"""The tensor file: any safetensors reader opens it; ours accepts only files of its own writer."""

import json
import zlib
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparse_bitnet.errors import UserError
from sparse_bitnet.packing.tensor_file import TensorFile, TensorFileWriter, TensorSpec

TENSORS = {
    "a.weight_packed": torch.arange(7, dtype=torch.uint8),
    "a.weight_scale": torch.tensor([0.5]),
    "norm": torch.linspace(-1, 1, 6).view(2, 3),
    "embedding": torch.randn(5, 3).bfloat16(),
    "empty": torch.empty(0, 4),
    "codes": torch.arange(6, dtype=torch.int8).view(3, 2),
    "scalar": torch.tensor(7, dtype=torch.int64),
}
METADATA = {"version": 1, "layers": {"a": [1, 7]}}

# Function-scoped paths are written again for every example.
fuzz = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def write(path: Path, tensors: dict[str, Tensor] = TENSORS) -> Path:
    specs = [TensorSpec(name, value.dtype, tuple(value.shape)) for name, value in tensors.items()]
    with TensorFileWriter(path, specs, METADATA) as file:
        for name, value in reversed(tensors.items()):
            file.write(name, [value] if value.dim() == 0 else value.split(2))
    return path


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file's bytes."""
    return write(tmp_path_factory.mktemp("raw") / "model.safetensors").read_bytes()


def header_of(raw: bytes) -> dict[str, Any]:
    return json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])


def with_header(raw: bytes, header: Any, *, crc: bool = True) -> bytes:
    """The same data under another header, by default with the right checksum of the header."""
    if crc and isinstance(header, dict) and isinstance(header.get("__metadata__"), dict):
        header["__metadata__"]["header_crc32"] = "00000000"
    text = json.dumps(header, separators=(",", ":")).encode()
    if crc:
        text = text.replace(b'"00000000"', f'"{zlib.crc32(text):08x}"'.encode(), 1)
    return len(text).to_bytes(8, "little") + text + raw[8 + int.from_bytes(raw[:8], "little") :]


def test_other_readers_open_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors")
    loaded = load_file(path)
    assert loaded.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        assert torch.equal(loaded[name], value)
        assert loaded[name].dtype == value.dtype
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["format"] == "pt"


def test_reader_returns_every_tensor(tmp_path: Path) -> None:
    file = TensorFile(write(tmp_path / "model.safetensors"))
    file.verify()
    assert {key: file.metadata[key] for key in METADATA} == METADATA
    assert file.entries.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        assert torch.equal(file.tensor(name), value)
        assert file.entries[name].begin % value.dtype.itemsize == 0


def test_every_flipped_bit_is_found(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "damaged"
    begin = 8 + int.from_bytes(raw[:8], "little")
    for position in [*range(0, begin, 7), *range(begin, len(raw))]:
        damaged = bytearray(raw)
        damaged[position] ^= 1 << (position % 8)
        path.write_bytes(damaged)
        with pytest.raises(UserError):
            TensorFile(path).verify()


def test_every_truncation_is_found(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "truncated"
    for size in range(0, len(raw), 3):
        path.write_bytes(raw[:size])
        with pytest.raises(UserError):
            TensorFile(path)
    for changed, message in (
        (raw[:-1], "is truncated: its tensors end"),
        (raw + b"\0", "too long"),
    ):
        path.write_bytes(changed)
        with pytest.raises(UserError, match=message):
            TensorFile(path)


def test_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(UserError, match=r"cannot read .*model"):
        TensorFile(path)
    save_file({"a": torch.zeros(3)}, path)
    with pytest.raises(UserError, match="not written by sparse-bitnet pack"):
        TensorFile(path)
    path.write_bytes((2**63).to_bytes(8, "little") + b"{}")
    with pytest.raises(UserError, match="not written by sparse-bitnet pack"):
        TensorFile(path)


@fuzz
@given(content=st.binary(max_size=300), at=st.none() | st.integers(0, 10**6))
def test_random_bytes_are_refused(tmp_path: Path, raw: bytes, content: bytes, at: int | None):
    """Random bytes, alone or written over a file."""
    path = tmp_path / "model.safetensors"
    if at is not None:
        at %= len(raw)
        content = (raw[:at] + content + raw[at + len(content) :])[: len(raw)]
    path.write_bytes(content)
    if content == raw:
        TensorFile(path).verify()
        return
    with pytest.raises(UserError):
        TensorFile(path).verify()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
sizes = st.lists(st.integers(-1, 2**62), max_size=3)


@fuzz
@given(data=st.data())
def test_a_header_with_the_right_checksum_is_not_trusted_either(
    tmp_path: Path, raw: bytes, data: st.DataObject
) -> None:
    header = header_of(raw)
    name = data.draw(st.sampled_from([*TENSORS, "__metadata__", "new"]))
    field = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "sparse_bitnet", "*"]))
    value = data.draw(json_values | sizes)
    if field == "*" or name == "new":
        header[name] = value
    else:
        header[name] = header[name] | {field: value}
    path = tmp_path / "changed"
    path.write_bytes(with_header(raw, header))
    try:
        file = TensorFile(path)
        file.verify()
    except UserError:
        return
    # Only such changes pass as leave every tensor where and as it was.
    for tensor, expected in TENSORS.items():
        stored = file.tensor(tensor)
        assert stored.numel() * stored.itemsize == expected.numel() * expected.itemsize


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h.pop("norm"), "its tensors are not those with a checksum"),
        (lambda h: h["norm"].update(shape=[2, 4]), "tensor norm: 24 bytes do not make up"),
        (lambda h: h["norm"].update(shape=[2**48, 2**48]), "do not make up its shape"),
        (lambda h: h["norm"].update(shape=[True, 6]), "tensor norm has an unreadable shape"),
        (lambda h: h["norm"].update(shape=[1] * 9), "tensor norm has an unreadable shape"),
        (lambda h: h["norm"].update(data_offsets=[4, 28]), "its tensors leave a gap, or overlap"),
        (lambda h: h["norm"].update(dtype="F4"), "the header is damaged"),
        (lambda h: h["norm"].update(extra=1), "the header is damaged"),
        (lambda h: h["norm"].update(data_offsets=[8, 32, 40]), "the header is damaged"),
        (lambda h: h["__metadata__"].update(sparse_bitnet="{}"), "the header is damaged"),
        (lambda h: h["__metadata__"].update(sparse_bitnet="[" * 10**5), "the header is damaged"),
    ],
)
def test_inconsistent_headers_are_refused(tmp_path: Path, raw: bytes, change: Any, message: str):
    header = header_of(raw)
    change(header)
    path = tmp_path / "changed"
    path.write_bytes(with_header(raw, header))
    with pytest.raises(UserError, match=message):
        TensorFile(path)
