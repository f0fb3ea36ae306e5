# SPDX-License-Identifier: Apache-2.0
"""Model cards state the run's data, and how each tool loads the model."""

import json
import shutil
from pathlib import Path

import pytest

from sparse_bitnet.checkpoint.open_checkpoint import open_checkpoint
from sparse_bitnet.export.export_config import FORMATS
from sparse_bitnet.export.model_card import model_card
from sparse_bitnet.training.config import TrainConfig


@pytest.fixture
def run(checkpoint: Path, tmp_path: Path) -> Path:
    """A finished run folder with its data beside it."""
    run, data = tmp_path / "small-run", tmp_path / "data"
    shutil.copytree(checkpoint, run / "final")
    data.mkdir()
    source = {
        "kind": "files",
        "files": [{"name": f"part-{number}.jsonl", "bytes": 10} for number in range(10)],
        "column": "text",
    }
    (data / "manifest.json").write_text(json.dumps({"settings": {"source": source}}))
    (run / "config.json").write_text(TrainConfig(data=str(data), steps=1234).to_json())
    result = {"validation_perplexity": 12.3456, "validation_tokens": 65536, "zero_fraction": 0.421}
    (run / "result.json").write_text(json.dumps(result))
    return run


@pytest.mark.parametrize("format", FORMATS)
def test_card_has_recipe_pattern_data_and_perplexity(run: Path, format: str) -> None:
    card = model_card(open_checkpoint(run), format, "bf16", checked=[("reader", "some | tool")])
    assert card.startswith("---\nlibrary_name: ")
    for part in (
        "# small-run",
        "| pattern | 6:8 (keeps 75%) |",
        "| steps | 1,234, each of 4,096 tokens |",
        "| learning rate | 0.003, cosine",
        "part-7.jsonl ...",
        "| validation perplexity | 12.346 |",
        "| reader | some / tool |",
        "## How to load it",
    ):
        assert part in card
    assert "part-8" not in card
    assert str(run.parent) not in card


@pytest.mark.parametrize(
    ("format", "commands"),
    [
        ("bitnet", ["AutoModelForCausalLM.from_pretrained", "accelerate"]),
        ("compressed-tensors-w2a8", ["vllm serve", "compressed-tensors`"]),
        ("compressed-tensors-w8a8", ["vllm serve"]),
        ("gguf-tq2_0", ["llama-cli -m model-TQ2_0.gguf", "llama_cpp", "FROM ./model-TQ2_0.gguf"]),
        ("dense", ["vllm serve", "wrong"]),
    ],
)
def test_card_has_a_command_for_every_tool(source, format: str, commands: list[str]) -> None:
    card = model_card(source, format, "f16", checked=[])
    for command in commands:
        assert command in card
    assert "## Training" not in card
    assert "## Checked" not in card


def test_card_of_a_full_precision_model_says_so(make_checkpoint) -> None:
    card = model_card(open_checkpoint(make_checkpoint("full-2:4")), "dense", "bf16", checked=[])
    assert "2:4 sparsity and full-precision weights" in card
