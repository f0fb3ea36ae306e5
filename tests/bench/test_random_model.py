# SPDX-License-Identifier: Apache-2.0
"""Random models are complete packed folders with the statistics that training leaves."""

from pathlib import Path

import pytest
import torch

from sparse_bitnet.bench.random_model import (
    ROTATIONS,
    cached_random_model,
    config_of_model,
    write_random_model,
)
from sparse_bitnet.checkpoint.build_model import preset_config
from sparse_bitnet.checkpoint.load import from_pretrained
from sparse_bitnet.checkpoint.packed import packed_layers
from sparse_bitnet.engine.architecture import read_architecture
from sparse_bitnet.errors import UserError
from sparse_bitnet.nn.convert import selected
from sparse_bitnet.nn.layer import SparseBitConfig
from sparse_bitnet.nn.selection import select
from sparse_bitnet.pattern import NMPattern


def codes_of(folder: Path) -> dict[str, torch.Tensor]:
    model = from_pretrained(folder, dtype=torch.float32)
    return {name: layer.codes for name, layer in packed_layers(model).items()}


@pytest.mark.parametrize("pattern", ["8:8", "6:8", "2:4", "2:8"])
def test_zeros_are_those_of_trained_weights(tmp_path: Path, tiny_preset: str, pattern: str) -> None:
    write_random_model(tmp_path / "model", tiny_preset, NMPattern.parse(pattern))
    codes = torch.cat([codes.flatten() for codes in codes_of(tmp_path / "model").values()])
    gaussian = select(torch.randn(512, 1024), SparseBitConfig.parse(f"ternary-{pattern}")).codes
    expected = float((gaussian == 0).float().mean())
    assert float((codes == 0).float().mean()) == pytest.approx(expected, abs=0.01)
    assert abs(float(codes.float().mean())) < 0.01


@pytest.mark.parametrize("pattern", ["8:8", "3:4"])
def test_binary_weights_keep_all_that_the_pattern_keeps(
    tmp_path: Path, tiny_preset: str, pattern: str
) -> None:
    n_of_m = NMPattern.parse(pattern)
    write_random_model(tmp_path / "model", tiny_preset, n_of_m, packed_format="nm-sign")
    for codes in codes_of(tmp_path / "model").values():
        assert int((codes != 0).sum()) == codes.numel() * n_of_m.n // n_of_m.m


def test_formats_hold_the_same_codes_and_the_same_call_writes_the_same_bytes(
    tmp_path: Path, tiny_preset: str
) -> None:
    codes_by_format = {}
    for name in ("i2", "b3", "nm-enum"):
        write_random_model(tmp_path / name, tiny_preset, NMPattern(6, 8), packed_format=name)
        codes_by_format[name] = codes_of(tmp_path / name)
    for layer, codes in codes_by_format["i2"].items():
        assert torch.equal(codes, codes_by_format["b3"][layer])
        assert torch.equal(codes, codes_by_format["nm-enum"][layer])
    write_random_model(tmp_path / "again", tiny_preset, NMPattern(6, 8))
    first, again = (
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("i2", "again")
    )
    assert first == again


def test_config_is_that_of_the_preset(tiny_preset: str) -> None:
    expected = preset_config(tiny_preset).to_dict()
    for key, value in config_of_model(tiny_preset).items():
        if key not in ("architectures", "dtype", "max_window_layers", "eos_token_id"):
            assert expected[key] == value, key


def test_cache_keeps_each_variant_once_and_the_model_predicts(tmp_path: Path, tiny_preset: str):
    first = cached_random_model(tiny_preset, NMPattern(5, 16), cache=tmp_path)
    (first / "mark").touch()
    assert cached_random_model(tiny_preset, NMPattern(5, 16), cache=tmp_path) == first
    assert (first / "mark").exists()
    assert cached_random_model(tiny_preset, NMPattern(6, 8), cache=tmp_path) != first
    model = from_pretrained(first, dtype=torch.float32).eval()
    with torch.no_grad(), selected(model):
        logits = model(torch.arange(20)[None]).logits[0]
    assert logits.isfinite().all()
    assert 0.01 < logits.std() < 100


@pytest.mark.parametrize(
    ("options", "words"),
    [({"preset": "qwen3"}, "not a preset"), ({"pattern": NMPattern(3, 7)}, "not a multiple of 7")],
)
def test_refused_models_leave_no_files(tmp_path: Path, options: dict, words: str) -> None:
    arguments = {"preset": "tiny", "pattern": NMPattern(6, 8), **options}
    with pytest.raises(UserError, match=words):
        write_random_model(tmp_path / "model", **arguments)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "billions"),
    [("bonsai-2b", 1.88), ("bonsai-4b", 4.20), ("bonsai-9b", 7.93), ("bonsai-27b", 25.60)],
)
def test_sizes_of_bonsai_give_the_published_number_of_weights(name: str, billions: float) -> None:
    """A token reads all weights but those of an untied embedding."""
    shape = read_architecture(config_of_model(name), name)
    layers = [size for n in range(shape.layers) for size in shape.linear_shapes(n).values()]
    read = [*layers, (shape.vocab, shape.hidden)]
    assert sum(rows * columns for rows, columns in read) / 1e9 == pytest.approx(billions, abs=0.005)
    assert not any(columns % ROTATIONS[name] for _, columns in read)
