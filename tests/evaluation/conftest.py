# SPDX-License-Identifier: Apache-2.0
"""A small prepared text, a tokenizer, and a model that was never trained."""

from pathlib import Path

import pytest

from sparse_bitnet.checkpoint.build_model import build_model
from sparse_bitnet.checkpoint.load import load_tokenizer
from sparse_bitnet.checkpoint.trained import save_pretrained
from sparse_bitnet.data.preparation import prepare
from sparse_bitnet.data.sources import parse_source
from sparse_bitnet.nn.layer import SparseBitConfig

WORDS = [
    "quantise",
    "weight",
    "ternary",
    "sparse",
    "mask",
    "scale",
    "group",
    "token",
    "layer",
    "mean",
]
LINES = [
    f"for {WORDS[i % 10]}_{i} in {WORDS[i * 7 % 9]}({i * 7}): {WORDS[i * 3 % 10]} += '{WORDS[i % 7]}'"
    for i in range(160)
]


@pytest.fixture
def quick_lm_eval(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory):
    """Skip lm-eval's survey of the machine, which takes seconds; cache data sets in a new folder."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
    cache = tmp_path_factory.getbasetemp() / "datasets"
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", cache)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared folder with a 300-token vocabulary; `text/*.txt` beside it."""
    root = tmp_path_factory.mktemp("evaluation")
    (root / "text").mkdir()
    for number in range(40):
        text = "\n".join(LINES[number * 4 : number * 4 + 4]) + "\n"
        (root / "text" / f"{number:02}.txt").write_text(text)
    source = parse_source(str(root / "text" / "*.txt"), validation_fraction=0.3)
    prepare(source, root / "data", vocab_size=300)
    return root / "data"


@pytest.fixture(scope="session")
def model_folder(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ternary 6:8 model with random weights and the tokenizer of `prepared`."""
    folder = tmp_path_factory.mktemp("models") / "ternary"
    tokenizer = load_tokenizer(prepared / "tokenizer")
    model = build_model("qwen2.5-1m", SparseBitConfig.parse("ternary-6:8"), vocab_size=300)
    save_pretrained(model, folder, tokenizer)
    return folder
