# SPDX-License-Identifier: Apache-2.0
"""Small texts for the data tests, and files of them."""

import json
import random
from collections.abc import Iterable
from pathlib import Path

WORDS = ["the", "quick", "brown", "fox", "über", "naïve", "漢字", "42", "jumps\n", "over\tlazy"]
WORDS += ["dogs,", "don't", "it's", "🙂", "e\u0301"]


def some_texts(count: int, seed: int = 0) -> list[str]:
    """Distinct documents of 1 to 60 words, some with characters outside ASCII."""
    choose = random.Random(seed)
    return [
        f"{number} " + " ".join(choose.choices(WORDS, k=choose.randint(1, 60)))
        for number in range(count)
    ]


def write_jsonl(path: Path, texts: Iterable[str], column: str = "text") -> Path:
    path.write_text("".join(json.dumps({column: text, "n": 1}) + "\n" for text in texts))
    return path


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of prepared data but the dotted ones, which are about this copy alone."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }
