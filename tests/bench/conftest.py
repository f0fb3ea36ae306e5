# SPDX-License-Identifier: Apache-2.0
"""A preset small enough to write at once, whose rows fill the blocks of every format."""

from pathlib import Path

import pytest

from sparse_bitnet.bench.random_model import write_random_model
from sparse_bitnet.pattern import NMPattern
from sparse_bitnet.presets import PRESETS, Shape


@pytest.fixture(scope="session")
def tiny_shape() -> Shape:
    return Shape(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        max_position_embeddings=256,
    )


@pytest.fixture(autouse=True)
def tiny_preset(monkeypatch: pytest.MonkeyPatch, tiny_shape: Shape) -> str:
    monkeypatch.setitem(PRESETS, "tiny", tiny_shape)
    return "tiny"


@pytest.fixture
def tiny_folder(tmp_path: Path, tiny_preset: str) -> Path:
    folder = tmp_path / "model"
    write_random_model(folder, tiny_preset, NMPattern(6, 8))
    return folder
