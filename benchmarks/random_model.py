# SPDX-License-Identifier: Apache-2.0
"""Writes a packed folder of a preset's shape with random weights, for measuring servers and engines.

    python benchmarks/random_model.py OUT --model qwen2.5-0.3m [--tokenizer FOLDER]

The model gets the vocabulary and chat template of --tokenizer.
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
    parser.add_argument("--tokenizer", type=Path, help="folder with tokenizer.json")
    options = parser.parse_args()
    pattern = NMPattern(6, 8)
    if options.tokenizer is None:
        write_random_model(options.out, options.model, pattern)
        return
    vocab_size = -(-len(TextTokenizer.load(options.tokenizer).vocabulary) // 64) * 64
    write_random_model(options.out, options.model, pattern, vocab_size=vocab_size)
    copy_files(options.tokenizer, options.out, TOKENIZER_FILES)


if __name__ == "__main__":
    main()
