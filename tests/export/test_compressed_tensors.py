# SPDX-License-Identifier: Apache-2.0
"""compressed-tensors: words, configuration, and the package's own loader under transformers."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from exported import verified_export
from sparse_bitnet.checkpoint.checkpoint import Checkpoint
from sparse_bitnet.export.export_checkpoint import export
from sparse_bitnet.export.export_config import ExportConfig
from sparse_bitnet.packing.two_bits import pack_words, unpack_words


@given(rows=st.integers(1, 5), columns=st.integers(1, 70), seed=st.integers(0, 2**32 - 1))
def test_packing_is_exact(random_codes, rows: int, columns: int, seed: int) -> None:
    codes = random_codes(rows, columns, seed)
    packed = pack_words(codes)
    assert packed.dtype == torch.int32
    assert packed.shape == (rows, -(-columns // 16))
    assert torch.equal(unpack_words(packed, columns), codes)


@pytest.mark.parametrize("columns", [16, 48, 50, 1])
def test_packing_is_that_of_the_package(random_codes, columns: int) -> None:
    package = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    codes = random_codes(3, columns, 0)
    assert torch.equal(pack_words(codes), package.pack_to_int32(codes, 2))


@pytest.mark.parametrize("format", ["compressed-tensors-w2a8", "compressed-tensors-w8a8"])
def test_compressed_tensors_reads_the_export(checkpoint: Path, tmp_path: Path, format: str) -> None:
    pytest.importorskip("compressed_tensors", reason="pip install compressed-tensors")
    verified_export(checkpoint, tmp_path / "out", format)


def test_config_and_tensors_are_those_of_the_format(
    source: Checkpoint, checkpoint: Path, tmp_path: Path
) -> None:
    export(checkpoint, tmp_path / "out", ExportConfig(format="compressed-tensors-w2a8"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    entry = config["quantization_config"]
    assert entry["ignore"] == ["lm_head"]
    assert entry["config_groups"]["group_0"]["format"] == entry["format"] == "pack-quantized"
    assert "sparsity_config" not in entry
    assert config["dtype"] == "bfloat16"
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for name, shape in source.layers.items():
        codes, weight_scale = source.ternary(name)
        assert torch.equal(unpack_words(tensors[f"{name}.weight_packed"], shape[1]), codes)
        assert tensors[f"{name}.weight_shape"].tolist() == list(shape)
        assert (tensors[f"{name}.weight_scale"] == weight_scale).all()
        assert tensors[f"{name}.weight_scale"].shape == (shape[0], 1)
    assert tensors["model.embed_tokens.weight"].dtype == torch.bfloat16
