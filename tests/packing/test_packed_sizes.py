# SPDX-License-Identifier: Apache-2.0
"""Sizes as computed are sizes as written; bounds are bounds."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sparse_bitnet.checkpoint.build_model import PRESETS, build_model
from sparse_bitnet.checkpoint.hub import save_pretrained
from sparse_bitnet.cli.sizes import main
from sparse_bitnet.errors import UserError
from sparse_bitnet.export.pack_checkpoint import pack_checkpoint
from sparse_bitnet.export.packed_sizes import code_statistics, model_size, size_table
from sparse_bitnet.nn.layer import SparseBitConfig
from sparse_bitnet.nn.selection import select
from sparse_bitnet.packing.codec import pack, unpack
from sparse_bitnet.packing.formats import FORMATS, has_fixed_rows
from sparse_bitnet.pattern import NMPattern

Trained = Callable[..., Path]


def test_presets_in_every_format() -> None:
    rows = size_table()
    assert len(rows) == 3 * 4 * 4
    found = {(row.model, row.pattern, row.packed_format): row for row in rows}
    for row in rows:
        weights = PRESETS[row.model].block_weights
        assert math.isclose(row.weight_bytes * 8, row.bits_per_weight * weights)
    assert round(found["qwen2.5-3b", "6:8", "nm-bitmap"].bits_per_weight, 3) == 1.750
    for pattern, most in (("6:8", 1.56), ("2:4", 1.29), ("2:8", 0.90)):
        for model in ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b"):
            assert found[model, pattern, "nm-enum"].bits_per_weight <= most


@pytest.mark.parametrize("embeddings", ["bf16", "int8", "float32"])
def test_computed_sizes_are_those_of_a_packed_model(tmp_path: Path, embeddings: str) -> None:
    model = build_model("qwen2.5-1m", SparseBitConfig(), vocab_size=300)
    save_pretrained(model, tmp_path / "trained")
    packed = pack_checkpoint(
        tmp_path / "trained", tmp_path / "out", format="i2", embeddings=embeddings
    )
    size = model_size("qwen2.5-1m", NMPattern(6, 8), "i2", embeddings)
    assert packed.weight_bytes == size.weight_bytes
    assert packed.bits_per_weight == size.bits_per_weight
    written = load_file(tmp_path / "out" / "model.safetensors").values()
    vocabulary = PRESETS["qwen2.5-1m"].vocab_size
    fewer = size.embedding_bytes * (vocabulary - 300) // vocabulary
    assert sum(tensor.nbytes for tensor in written) == size.total_bytes - fewer


@pytest.mark.parametrize("text", ["ternary-8:8", "ternary-6:8", "ternary-2:4", "ternary-2:8"])
def test_statistics_of_a_model(trained: Trained, tmp_path: Path, text: str) -> None:
    found = code_statistics(trained(format=text))
    assert found.formats.keys() == FORMATS.keys() - {"nm-sign"}
    # The signs are taken for equally likely, which they nearly are.
    assert found.group_entropy <= min(found.code_entropy, found.pattern_bound) + 1e-3
    assert found.group_entropy <= found.formats["nm-enum"]
    assert found.pattern_bound <= found.formats["nm-enum"]
    assert found.code_entropy <= math.log2(3)
    for name, bits in found.formats.items():
        packed = pack_checkpoint(trained(format=text), tmp_path / name, format=name)
        scales = 4 * len(packed.metadata.layers)
        assert bits == 8 * (packed.weight_bytes - scales) / packed.weights


def test_entropies_of_known_codes(trained: Trained, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for path in trained(format="ternary-2:4").iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    masters = load_file(source / "model.safetensors")
    for name, weight in masters.items():
        if "proj" in name and name.endswith("weight"):
            masters[name] = torch.tensor([1.0, -1.0, 0.0, 0.0]).repeat(weight.numel() // 4)
            masters[name] = masters[name].view_as(weight).contiguous()
    save_file(masters, source / "model.safetensors", metadata={"format": "pt"})
    found = code_statistics(source)
    assert found.zero_fraction == 0.5
    assert math.isclose(found.code_entropy, 1.5)
    # Two of four places and two signs, as if they were not always the same.
    assert math.isclose(found.group_entropy, (math.log2(6) + 2) / 4)
    assert math.isclose(found.pattern_bound, math.log2(33) / 4)


def test_binary_codes_take_the_bits_of_the_page() -> None:
    """log2(C(4, 3) 2^3) / 4 = 1.25 and log2(C(8, 6) 2^6) / 8 = 1.351 are the least."""
    page = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
    weight = torch.randn(1024, 2048, generator=torch.Generator().manual_seed(0))
    names = ("nm-sign", "nm-zstd", "nm-enum", "nm-bitmap")
    table = (("3:4", (1.25, 1.25, 1.53, 1.75)), ("6:8", (1.375, 1.36, 1.55, 1.75)))
    for pattern, sizes in table:
        config = SparseBitConfig.parse(f"ternary-{pattern},quantizer=binary")
        codes = select(weight, config).codes
        for format, bits in zip(names, sizes, strict=True):
            packed = pack(codes, format, config.pattern, name="layer")
            assert 8 * packed.nbytes / codes.numel() == pytest.approx(bits, abs=0.005)
            assert f"{bits}" in page
            restored = unpack(packed, format, config.pattern, tuple(codes.shape))
            assert torch.equal(restored, codes)


def test_zstd_gains_where_zeros_are_uneven() -> None:
    weight = torch.randn(512, 1024)
    codes = weight.sign().to(torch.int8) * (weight.abs() > 2.0)
    pattern = NMPattern(6, 8)
    bits = [
        8 * pack(codes, name, pattern).numel() / codes.numel() for name in ("nm-zstd", "nm-enum")
    ]
    assert bits[0] < 0.5 < bits[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpt-9", NMPattern(6, 8), "i2", "bf16"), "'gpt-9' is not a preset"),
        (("qwen2.5-1m", NMPattern(6, 8), "i2", "fp4"), "embeddings 'fp4': choose one of"),
        (("qwen2.5-1m", NMPattern(6, 8), "i9", "bf16"), "'i9' is unknown"),
        (("qwen2.5-1m", NMPattern(6, 8), "nm-zstd", "bf16"), "depends on the weights"),
        (
            ("qwen2.5-0.5b", NMPattern(3, 5), "i2", "bf16"),
            "q_proj of qwen2.5-0.5b: in_features 896",
        ),
    ],
)
def test_what_has_no_size(arguments: tuple, message: str) -> None:
    with pytest.raises(UserError, match=message):
        model_size(*arguments)


def test_command_prints_presets(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    main(
        ["--models", "qwen2.5-3b", "--patterns", "6:8", "7:16", "--json", str(tmp_path / "s.json")]
    )
    printed = capsys.readouterr().out
    assert "1.750*" in printed
    assert "nm-zstd depends on the weights" in " ".join(printed.split())
    rows = json.loads((tmp_path / "s.json").read_text())
    fixed = sum(has_fixed_rows(name) for name in FORMATS) - 1  # nm-sign asks for binary weights
    assert len(rows) == 2 * fixed
    assert rows[0]["total_bytes"] > rows[0]["weight_bytes"]


def test_command_prints_a_models_statistics(
    trained: Trained, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    main([str(trained()), "--json", str(tmp_path / "s.json")])
    printed = capsys.readouterr().out
    assert "zeros among the codes" in printed
    assert "nm-zstd" in printed
    (found,) = json.loads((tmp_path / "s.json").read_text())
    assert found["pattern"] == "6:8"


def test_command_measures_gaussian_weights(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--gaussian", "64", "480", "--patterns", "6:8", "2:3"])
    printed = capsys.readouterr().out
    assert "30,720 ternary weights" in printed
    assert "-" in next(line for line in printed.splitlines() if "nm-bitmap" in line)
