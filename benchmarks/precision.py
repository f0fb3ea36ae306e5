# SPDX-License-Identifier: Apache-2.0
"""Difference between the CPU engine and the PyTorch reference, and the cost of smaller number formats.

    python benchmarks/precision.py PACKED_FOLDER TEXT      # a packed model, a text file it has not seen

The reference is the transformers model of the same folder in float32. Compared are the logits on every
position, greedy continuations of 200 tokens, and perplexity. As a yardstick, the reference is also
compared with itself under another implementation of attention, which adds in another order. Then the
perplexity of the engine is measured with each type of output head and KV cache. Appends rows to
benchmarks/results/.
"""

import argparse
import math
from pathlib import Path

import numpy as np
import torch
from recorded import record
from rich.console import Console

from sparse_bitnet.checkpoint.load import from_pretrained
from sparse_bitnet.engine.engine import Engine
from sparse_bitnet.errors import UserError
from sparse_bitnet.evaluation.perplexity import perplexity
from sparse_bitnet.generation.text import TextTokenizer

HEADS = ("stored", "int8", "int4")
CACHE_TYPES = ("float16", "int8", "int4")
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 8, 32, 200


def logits_of(model, tokens: list[int], context: int) -> np.ndarray:
    """Return the reference logits [tokens, vocab], computed in windows of `context` tokens."""
    with torch.inference_mode():
        windows = [tokens[i : i + context] for i in range(0, len(tokens), context)]
        return np.concatenate([model(torch.tensor([w])).logits[0].numpy() for w in windows])


def engine_logits(engine: Engine, tokens: list[int], context: int) -> np.ndarray:
    logits = []
    for start in range(0, len(tokens), context):
        sequence = engine.new_sequence()
        logits += engine.forward([(sequence, tokens[start : start + context])], logits="all")
        sequence.close()
    return np.concatenate(logits)


def greedy(step, prompt: list[int]) -> list[int]:
    """Return NEW_TOKENS tokens; `step` maps the new tokens to logits."""
    text, new = [], prompt
    for _ in range(NEW_TOKENS):
        text.append(int(np.argmax(step(new))))
        new = text[-1:]
    return text


def reference_step(model):
    cache = None

    def step(tokens: list[int]) -> np.ndarray:
        nonlocal cache
        with torch.inference_mode():
            out = model(torch.tensor([tokens]), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        return out.logits[0, -1].numpy()

    return step


def closeness(folder: Path, tokens: list[int], context: int) -> dict:
    model = from_pretrained(folder, dtype=torch.float32).eval()
    reference = logits_of(model, tokens, context)
    with_exact = {"head": "stored", "kv_cache": "float32", "context_length": context}
    engine = Engine.load(folder, **with_exact)
    ours = engine_logits(engine, tokens, context)
    other = from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    error, own_error = (
        np.linalg.norm(logits - reference, axis=1) / np.linalg.norm(reference, axis=1)
        for logits in (ours, logits_of(other, tokens, context))
    )
    same = 0
    for index in range(PROMPTS):
        prompt = tokens[index * PROMPT_TOKENS : (index + 1) * PROMPT_TOKENS]
        sequence = engine.new_sequence()
        engine_step = lambda new, s=sequence: engine.forward([(s, new)])[0]  # noqa: E731
        same += greedy(engine_step, prompt) == greedy(reference_step(model), prompt)
        sequence.close()
    engine.close()
    return {
        "what": "closeness",
        "isa": engine.isa,
        "tokens": len(tokens),
        "relative_error_median": float(np.median(error)),
        "relative_error_largest": float(error.max()),
        "positions_above_1e-3": int((error > 1e-3).sum()),
        "reference_own_error_median": float(np.median(own_error)),
        "reference_own_error_largest": float(own_error.max()),
        "reference_own_positions_above_1e-3": int((own_error > 1e-3).sum()),
        "greedy_prompts": PROMPTS,
        "greedy_tokens": NEW_TOKENS,
        "greedy_identical": same,
        "perplexity": perplexity_of(ours, tokens, context),
        "reference_perplexity": perplexity_of(reference, tokens, context),
    }


def perplexity_of(logits: np.ndarray, tokens: list[int], context: int) -> float:
    """Return the perplexity of all tokens but the first of each window."""
    x = logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    scores = x - np.log(np.exp(x).sum(axis=1, keepdims=True))
    positions = [i for i in range(1, len(tokens)) if i % context]
    return math.exp(-float(np.mean([scores[i - 1, tokens[i]] for i in positions])))


def costs(folder: Path, tokens: list[int], context: int) -> list[dict]:
    variants = [(head, "float32") for head in HEADS]
    variants += [("stored", cache) for cache in CACHE_TYPES]
    rows = []
    for head, cache in variants:
        sizes = {"context_length": context, "cache_tokens": 8 * context}
        try:
            engine = Engine.load(folder, head=head, kv_cache=cache, **sizes)
        except UserError as error:  # int4 takes groups of 64
            print(error)
            continue
        score = perplexity(engine, np.array(tokens), context_length=context)
        rows.append(
            {
                "what": "cost",
                "head": head,
                "kv_cache": cache,
                "perplexity": score.perplexity,
                "tokens": score.tokens,
                "context": context,
                "head_bytes": engine.head_bytes,
            }
        )
        engine.close()
    base = rows[0]["perplexity"]
    return [{**row, "percent": 100 * (row["perplexity"] / base - 1)} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="packed model")
    parser.add_argument("text", type=Path, help="UTF-8 text")
    parser.add_argument("--tokens", type=int, default=8192, help="compared with the reference")
    parser.add_argument("--cost-tokens", type=int, default=65536, help="scored with each variant")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--name", help="name of the model in the record")
    parser.add_argument("--out", type=Path, help="JSON lines; default: in benchmarks/results/")
    options = parser.parse_args()
    tokens = TextTokenizer.load(options.folder).encode(options.text.read_text(encoding="utf-8"))
    rows = [closeness(options.folder, tokens[: options.tokens], options.context)]
    rows += costs(options.folder, tokens[: options.cost_tokens], options.context)
    name = options.name or options.folder.name
    rows = [{"model": name, "text": options.text.name, **row} for row in rows]
    out = record("precision", rows, options.out)
    console = Console()
    for row in rows:
        console.print_json(data=row)
    console.print(f"written to {out}")


if __name__ == "__main__":
    main()
