# SPDX-License-Identifier: Apache-2.0
"""What forms cost: processor time of a grammar's start, and of a token's mask with its use on the logits.

    python benchmarks/masks.py TOKENIZER      # a folder with tokenizer.json

Texts are drawn at random from the tokens that may come, as a model that knows nothing would write them.
"""

import argparse
import time
from pathlib import Path

import numpy as np
from load_jobs import SCHEMA
from recorded import RESULTS
from rich.console import Console
from rich.progress import track

from sparse_bitnet.bench.record import append_records, result_file, where_measured
from sparse_bitnet.errors import UserError
from sparse_bitnet.generation.grammar import Grammar, TokenGrammars
from sparse_bitnet.generation.text import TextTokenizer

ADDRESS = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 40},
        "email": {"type": "string", "pattern": r"^[a-z]+@[a-z]+\.(com|org)$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["private", "company", "public"]},
        "lines": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
    },
    "required": ["name", "email", "age", "kind", "lines"],
    "additionalProperties": False,
}
FORMS = {
    "json_object": Grammar.json_object(),
    "a schema of 2 properties": Grammar.json_schema(SCHEMA),
    "a schema of 5 properties": Grammar.json_schema(ADDRESS),
    "a regular expression": Grammar.regex(r"[A-Z][a-z]+( [a-z]+){3,12}\."),
    "a choice": Grammar.choice(["yes", "no", "it depends"]),
}


def measured(grammars: TokenGrammars, grammar: Grammar, texts: int, most: int) -> dict:
    """Seconds of one form."""
    rng = np.random.default_rng(0)
    started = time.thread_time()
    first = grammars.start(grammar)
    start_seconds, masks = time.thread_time() - started, []
    logits = rng.standard_normal((8, grammars.vocab_size), np.float32)
    for _ in range(texts):
        form = first.copy()
        for place in range(most):
            started = time.thread_time()
            masked = form.masked(logits[place % 8])
            masks.append(time.thread_time() - started)
            try:
                if form.take(int(rng.choice(np.flatnonzero(np.isfinite(masked))))):
                    break
            except UserError:
                break
    return {
        "start_seconds": start_seconds,
        "mask_seconds": {f"p{p}": float(np.percentile(masks, p)) for p in (50, 99)},
        "masks": len(masks),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tokenizer", help="folder with tokenizer.json")
    parser.add_argument("--vocab-size", type=int, default=151936, help="of the model's logits")
    parser.add_argument("--texts", type=int, default=40)
    parser.add_argument("--most", type=int, default=60, help="most tokens of a text")
    parser.add_argument("--out", type=Path, help="JSON lines; benchmarks/results/ by default")
    options = parser.parse_args()
    where, size = where_measured(), options.vocab_size
    grammars = TokenGrammars(TextTokenizer.load(options.tokenizer), size, frozenset())
    rows = [
        {"form": name, "vocab_size": size, **measured(grammars, form, options.texts, options.most)}
        for name, form in track(FORMS.items(), "forms", transient=True)
    ]
    console = Console()
    for row in rows:
        mask = {key: f"{1e6 * value:.0f}" for key, value in row["mask_seconds"].items()}
        start = 1e3 * row["start_seconds"]
        console.print(f"{row['form']}: start {start:.1f} ms, a token's mask {mask} us")
    out = options.out or result_file(RESULTS, "masks", where)
    append_records(out, rows, where)
    console.print(f"written to {out}")


if __name__ == "__main__":
    main()
