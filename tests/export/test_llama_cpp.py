# SPDX-License-Identifier: Apache-2.0
"""llama.cpp itself: loads the file, makes the same tokens, predicts the same."""

import shutil
from pathlib import Path

import pytest

from exported import verified_export
from factories import edit_json
from sparse_bitnet.checkpoint.load import load_tokenizer
from sparse_bitnet.export.export_checkpoint import export
from sparse_bitnet.export.export_config import ExportConfig
from sparse_bitnet.export.verify import PARAGRAPH, open_reader

pytest.importorskip("llama_cpp", reason="pip install llama-cpp-python builds llama.cpp")


@pytest.mark.parametrize("format", ["gguf-tq1_0", "gguf-tq2_0", "gguf-q2_0"])
def test_llama_cpp_predicts_what_the_trained_model_does(
    wide_checkpoint: Path, python_text: str, tmp_path: Path, format: str
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(python_text[-6000:])
    options = {"text": str(text), "verify_tokens": 1024}
    verification = verified_export(wide_checkpoint, tmp_path / "out", format, **options)
    assert verification.same_token_ids
    assert abs(verification.perplexity_difference) < 0.01
    assert verification.same_best_token > 0.95
    assert verification.perplexity < 100, "not trained: every model would agree"


@pytest.mark.parametrize("embeddings", ["q8_0", "bf16"])
def test_other_embeddings_and_rows_of_64_predict_the_same(
    checkpoint: Path, tmp_path: Path, embeddings: str
) -> None:
    verified_export(checkpoint, tmp_path / "out", "gguf-q2_0", embeddings=embeddings)


def test_gpt_2_pre_tokenizer_gives_the_same_tokens(
    checkpoint: Path, python_text: str, tmp_path: Path
) -> None:
    folder = tmp_path / "gpt-2"
    shutil.copytree(checkpoint, folder)
    step = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True, "trim_offsets": True}
    edit_json(folder / "tokenizer.json", pre_tokenizer=step, normalizer=None)
    export(folder, tmp_path / "out", ExportConfig(format="gguf-q2_0"))
    tokenizer = load_tokenizer(folder)
    with open_reader("gguf-q2_0", tmp_path / "out", 64) as reader:
        for text in (PARAGRAPH, python_text):
            assert reader.tokenise(text) == tokenizer(text, add_special_tokens=False).input_ids
