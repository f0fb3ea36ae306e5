# SPDX-License-Identifier: Apache-2.0
"""One small tokenizer and one small folder of prepared data, made once."""

from pathlib import Path

import pytest
from texts import some_texts, write_jsonl

from sparse_bitnet.data.preparation import prepare
from sparse_bitnet.data.sources import parse_source
from sparse_bitnet.data.tokenizer import train_tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(some_texts(200, seed=1), 300).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    """300 documents, a tenth of them for validation, in shards of 1,000 tokens. Not to be changed."""
    folder = tmp_path_factory.mktemp("prepared")
    texts = write_jsonl(folder / "text.jsonl", some_texts(300))
    source = parse_source(str(texts), validation_fraction=0.1)
    prepare(source, folder / "data", tokenizer=tokenizer_folder, shard_tokens=1000)
    return folder / "data"
