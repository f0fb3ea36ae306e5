# SPDX-License-Identifier: Apache-2.0
"""Tokens per second with and without draft tokens, on texts written by people.

    python benchmarks/speculation.py PACKED TOKENIZER --text edit BEFORE AFTER --text book BEGINNING REST

The engine computes everything; then each token's logits are changed so that the text's token is the
likeliest. A random model of a real shape thus writes a real text, like a model that knows it by heart:
the speeds are the engine's, and the draft tokens and their acceptance are the text's. Runs without and
with draft tokens alternate, from one cached prompt, greedily. Appends rows to benchmarks/results/.
"""

import argparse
import time
from pathlib import Path

import numpy as np
from recorded import record
from rich.console import Console

from sparse_bitnet.engine.engine import Engine
from sparse_bitnet.generation.open_model import OpenModel
from sparse_bitnet.generation.prefix_cache import PrefixCache
from sparse_bitnet.generation.sampling_options import SamplingOptions
from sparse_bitnet.generation.speculation import Speculation
from sparse_bitnet.generation.text import TextTokenizer


def follow(engine: Engine, text: list[int]) -> None:
    """Make the engine's likeliest token at each place the text's next one, from now on."""
    compute = engine._compute

    def computed(batch, logits):
        logits_of = compute(batch, logits)
        for (sequence, tokens), rows in zip(batch, logits_of, strict=False):
            for place, row in enumerate(np.atleast_2d(rows)[::-1]):
                end = len(sequence) + len(tokens) - place
                if end < len(text):
                    row[text[end]] = 1e6
        return logits_of

    engine._compute = computed


def measured(engine: Engine, tokenizer, prompt: list[int], text: list[int], turns: int) -> dict:
    """Return the best results of `turns` turns, without and with speculative decoding."""
    compute = engine._compute
    follow(engine, prompt + text)
    prefixes = PrefixCache(1)
    model = OpenModel(folder="", engine=engine, tokenizer=tokenizer, end_tokens=frozenset())
    drafts = Speculation(engine)
    best: dict = {"without": {}, "with": {}}
    for _ in range(turns):
        for name, speculation in (("without", None), ("with", drafts)):
            started = time.process_time()
            result = model.continue_tokens(
                prompt,
                len(text),
                sampling=SamplingOptions(temperature=0),
                prefixes=prefixes,
                speculation=speculation,
            )
            spent = time.process_time() - started
            assert result.tokens == text
            of = best[name]
            of["tokens_per_second"] = max(of.get("tokens_per_second", 0), result.decode_rate)
            if result.cached_tokens:
                of["processor_seconds"] = min(of.get("processor_seconds", spent), spent)
            of["guessed"], of["accepted"] = result.draft_tokens, result.accepted_tokens
    prefixes.clear()
    engine._compute = compute
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="packed model with a large vocabulary")
    parser.add_argument("tokenizer", help="folder with tokenizer.json")
    parser.add_argument("--text", nargs=3, action="append", metavar=("NAME", "PROMPT", "TEXT"))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--weight-format", default="auto")
    parser.add_argument("--prompt-tokens", type=int, default=1500, help="maximum")
    parser.add_argument("--tokens", type=int, default=400, help="maximum per text")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON lines; default: in benchmarks/results/")
    options = parser.parse_args()
    tokenizer, rows = TextTokenizer.load(options.tokenizer), []
    console = Console()
    for threads in options.threads:
        engine = Engine.load(
            options.folder,
            threads=threads,
            weight_format=options.weight_format,
            context_length=8192,
        )
        for name, *files in options.text:
            prompt, text = (tokenizer.encode(Path(file).read_text("utf-8")) for file in files)
            prompt, text = prompt[: options.prompt_tokens], text[: options.tokens]
            speeds = measured(engine, tokenizer, prompt, text, options.turns)
            row = {
                "model": options.folder.name,
                "weight_format": engine.weight_format,
                "threads": threads,
                "text": name,
                "prompt_tokens": len(prompt),
                "tokens": len(text),
                **speeds,
            }
            rows.append(row)
            console.print(row)
        engine.close()
    record("speculation", rows, options.out)


if __name__ == "__main__":
    main()
