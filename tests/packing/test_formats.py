# SPDX-License-Identifier: Apache-2.0
"""formats.py is the header in Python; the header is the specification of what Python writes."""

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from sparse_bitnet.errors import UserError
from sparse_bitnet.ops.nm_mask import nm_mask
from sparse_bitnet.packing import formats
from sparse_bitnet.packing.codec import pack
from sparse_bitnet.packing.formats import needs_exact, row_bytes
from sparse_bitnet.pattern import MAX_GROUP, NMPattern

CSRC = Path(__file__).resolve().parents[2] / "csrc"
CONSTANT = re.compile(r"^constexpr (?:int|std::int64_t) (\w+) = (.+);$", re.MULTILINE)
CASES = [
    *(("i2", *case) for case in (("8:8", 1), ("6:8", 248), ("6:8", 896), ("2:4", 2048))),
    *(("b3", *case) for case in (("8:8", 1), ("8:8", 333), ("6:8", 2048))),
    *(("nm-enum", *case) for case in (("8:8", 60), ("6:8", 2048), ("2:4", 196), ("2:8", 896))),
    *(("nm-enum", *case) for case in (("3:5", 35), ("7:24", 240), ("20:32", 96), ("1:32", 640))),
    *(("nm-sign", *case) for case in (("8:8", 65), ("3:4", 196), ("6:8", 896))),
    *(("nm-sign", *case) for case in (("3:5", 35), ("20:32", 96))),
]


@pytest.fixture(scope="session")
def packed_reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that includes packed_format.h and nothing else of ours."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path_factory.mktemp("packed_reader") / "packed_reader"
    source = Path(__file__).with_name("packed_reader.cpp")
    warnings = ["-Wall", "-Wextra", "-Werror"]
    command = [compiler, "-std=c++17", "-O1", *warnings, f"-I{CSRC}", source, "-o", program]
    subprocess.run([str(part) for part in command], check=True)
    return program


def test_constants_are_those_of_the_header() -> None:
    header = (CSRC / "packed_format.h").read_text()
    constants = {
        name.upper(): eval(value.replace("std::int64_t", "int"))
        for name, value in CONSTANT.findall(header)
    }
    assert constants.pop("MAX_GROUP") == MAX_GROUP
    ours = {name: value for name, value in vars(formats).items() if type(value) is int}
    assert constants == ours


@pytest.mark.parametrize(("format", "pattern", "in_features"), CASES)
def test_header_reads_what_python_packs(
    packed_reader: Path, format: str, pattern: str, in_features: int
) -> None:
    nm = NMPattern.parse(pattern)
    weight = torch.randn(3, in_features)
    codes = weight.sign().to(torch.int8) * (needs_exact(format) | (weight.abs() > 0.3))
    if not nm.is_dense:
        codes *= nm_mask(weight, nm)
    case = [format, str(nm.n), str(nm.m), str(in_features)]
    size = subprocess.run([packed_reader, "size", *case], check=True, capture_output=True)
    assert int(size.stdout) == row_bytes(format, nm, in_features)
    packed = pack(codes, format, nm).numpy().tobytes()
    read = subprocess.run(
        [packed_reader, "read", *case, "3"], input=packed, check=True, capture_output=True
    )
    assert np.array_equal(np.frombuffer(read.stdout, np.int8).reshape(3, -1), codes.numpy())


@pytest.mark.parametrize(
    ("format", "pattern", "in_features", "bits"),
    [
        ("i2", "6:8", 2048, 2),
        ("b3", "6:8", 8960, 1.6),
        ("nm-sign", "3:4", 2048, 1.25),
        ("nm-enum", "6:8", 11008, 1.55),
        ("nm-enum", "2:4", 11008, 1.27),
        ("nm-enum", "8:8", 11008, 1.594),
    ],
)
def test_bits_per_weight_are_as_documented(
    format: str, pattern: str, in_features: int, bits: float
) -> None:
    stored_bits = 8 * row_bytes(format, NMPattern.parse(pattern), in_features) / in_features
    assert stored_bits == pytest.approx(bits, abs=0.01)


def test_rows_that_are_too_long_or_too_short_are_refused() -> None:
    for in_features in (0, 2**23 + 8):
        with pytest.raises(UserError, match=r"layer k_proj: in_features .* is not within"):
            row_bytes("i2", NMPattern(6, 8), in_features, layer="k_proj")
