# SPDX-License-Identifier: Apache-2.0
"""Trained checkpoints to pack."""

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn
from transformers import PreTrainedTokenizerFast

from factories import randomise_vectors_, tiny_model
from sparse_bitnet.checkpoint.trained import save_pretrained
from sparse_bitnet.data.tokenizer import train_tokenizer
from sparse_bitnet.nn.convert import convert_
from sparse_bitnet.nn.layer import SparseBitConfig


def make_model(family: str = "qwen2", format: str = "ternary-6:8", **changes: object) -> nn.Module:
    """A converted model whose biases and norms are not their initial values."""
    model = convert_(tiny_model(family, seed=4, **changes), SparseBitConfig.parse(format))
    return randomise_vectors_(model.eval())


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(["a small text"], 260)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, tokenizer) -> Callable[..., Path]:
    """Folder of a saved model, one for each set of arguments of `make_model`; never written to."""
    folders: dict[str, Path] = {}

    def get(family: str = "qwen2", format: str = "ternary-6:8", **changes: object) -> Path:
        key = f"{family} {format} {changes}"
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp("trained") / "final"
            save_pretrained(make_model(family, format, **changes), folders[key], tokenizer)
        return folders[key]

    return get
