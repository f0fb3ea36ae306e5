# SPDX-License-Identifier: Apache-2.0
"""Small trained checkpoints to export."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from factories import edit_json, tiny_model
from sparse_bitnet.checkpoint.checkpoint import Checkpoint
from sparse_bitnet.checkpoint.open_checkpoint import open_checkpoint
from sparse_bitnet.checkpoint.trained import save_pretrained
from sparse_bitnet.data.tokenizer import train_tokenizer
from sparse_bitnet.nn.convert import convert_, selected
from sparse_bitnet.nn.layer import SparseBitConfig

TEXT = "\n".join(path.read_text() for path in sorted(Path(json.__file__).parent.glob("*.py")))
VOCABULARY = 384
MODEL_VOCABULARY = 392
"""More rows than the tokenizer has tokens, as in published models."""

MakeCheckpoint = Callable[..., Path]


def train(folder: Path, *, format: str, steps: int, **sizes: int) -> Path:
    """Train a two-layer Qwen2 on Python source text for a few steps and save it with its tokenizer."""
    tokenizer = train_tokenizer([TEXT], VOCABULARY)
    options = {"vocab_size": MODEL_VOCABULARY, "intermediate_size": 192, "rms_norm_eps": 1e-6}
    options |= {"max_position_embeddings": 256}
    options |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}}
    model = convert_(tiny_model("qwen2", **(options | sizes)), SparseBitConfig.parse(format))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    ids = torch.tensor(tokenizer(TEXT, add_special_tokens=False).input_ids)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    for _ in range(steps):
        starts = torch.randint(0, len(ids) - 64, (8,)).tolist()
        batch = torch.stack([ids[start : start + 64] for start in starts])
        with selected(model):
            model(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    save_pretrained(model.eval(), folder, tokenizer)
    return folder


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """`make_checkpoint("ternary-6:8", steps=20)`: a folder, the same one for the same arguments."""
    made: dict[str, Path] = {}

    def make(format: str = "ternary-6:8", *, steps: int = 10, **sizes: int) -> Path:
        key = f"{format} {steps} {sorted(sizes.items())}"
        if key not in made:
            folder = tmp_path_factory.mktemp("checkpoint") / "model"
            made[key] = train(folder, format=format, steps=steps, **sizes)
        return made[key]

    return make


@pytest.fixture(scope="session")
def checkpoint(make_checkpoint: MakeCheckpoint) -> Path:
    """A 6:8 model whose rows of 64 and 192 fill blocks of 64, not of 256."""
    return make_checkpoint()


@pytest.fixture(scope="session")
def source(checkpoint: Path) -> Checkpoint:
    return open_checkpoint(checkpoint)


@pytest.fixture(scope="session")
def wide_checkpoint(make_checkpoint: MakeCheckpoint) -> Path:
    """A 6:8 model whose rows of 256 and 512 fill every GGUF block, trained to predict something."""
    return make_checkpoint(steps=60, hidden_size=256, intermediate_size=512)


@pytest.fixture
def edited(checkpoint: Path, tmp_path: Path) -> Callable[..., Path]:
    """`edited(hidden_act="gelu")`: a copy of `checkpoint` with other values in config.json."""

    def edit(**changes: object) -> Path:
        folder = tmp_path / "edited"
        shutil.copytree(checkpoint, folder)
        edit_json(folder / "config.json", **changes)
        return folder

    return edit


@pytest.fixture(scope="session")
def python_text() -> str:
    """The text that the checkpoints were trained on."""
    return TEXT
