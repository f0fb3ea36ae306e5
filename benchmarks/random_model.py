# SPDX-License-Identifier: Apache-2.0
"""Writes a packed folder of a preset's shape with random weights, for measuring servers and engines.

    python benchmarks/random_model.py OUT --model qwen2.5-1.5b
    python benchmarks/random_model.py OUT --model qwen2.5-0.3m --tokenizer FOLDER

With --tokenizer, the model gets that tokenizer's vocabulary and chat template.
"""

import argparse
from pathlib import Path

from sparse_bitnet.bench.random_model import write_random_model
from sparse_bitnet.checkpoint.model_folder import TOKENIZER_FILES, copy_files
from sparse_bitnet.generation.text import TextTokenizer
from sparse_bitnet.pattern import NMPattern


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="qwen2.5-1.5b")
    parser.add_argument("--pattern", type=NMPattern.parse, default=NMPattern(6, 8))
    parser.add_argument("--tokenizer", type=Path, help="folder with tokenizer.json")
    options = parser.parse_args()
    vocab_size = None
    if options.tokenizer is not None:
        vocab_size = -(-len(TextTokenizer.load(options.tokenizer).vocabulary) // 64) * 64
    write_random_model(options.out, options.model, options.pattern, vocab_size=vocab_size)
    if options.tokenizer is not None:
        copy_files(options.tokenizer, options.out, TOKENIZER_FILES)


if __name__ == "__main__":
    main()
