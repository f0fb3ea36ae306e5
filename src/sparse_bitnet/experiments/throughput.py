# SPDX-License-Identifier: Apache-2.0
"""Table 3: throughput of dense and sparse models, of the CPU engine, beside the paper's on GPUs."""

import json
from pathlib import Path

from sparse_bitnet.errors import UserError
from sparse_bitnet.experiments.cells import paper_results
from sparse_bitnet.experiments.page import Block, Paragraph, Section
from sparse_bitnet.experiments.scales import DENSE_PATTERN
from sparse_bitnet.experiments.table import NOTHING, Table


def throughput_blocks(path: Path) -> list[Block]:
    """The table of the rows that `sparse-bitnet bench --out` wrote.

    Each pattern is shown in the faster of its run-time formats, with float16 caches and without context.
    Raises `UserError` where the file holds no rows.
    """
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        first: dict[tuple[str, int, int, int], dict[tuple[str, str], float]] = {}
        for row in rows:
            asked = (row["phase"], row["tokens"], row["batch"], row["threads"])
            if row["kv_cache"] == "float16" and (row["phase"] == "prefill" or row["tokens"] == 0):
                speeds = first.setdefault(asked, {})
                speeds.setdefault((row["pattern"], row["weight_format"]), row["tokens_per_second"])
        made = rows[0]
        where = f"{made['model']}, random weights; {made['hardware']}, {made['date'][:10]}"
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise UserError(f"{path}: no rows of `sparse-bitnet bench --out` ({error})") from error
    patterns = list(dict.fromkeys(row["pattern"] for row in rows))
    sparse = [pattern for pattern in patterns if pattern != DENSE_PATTERN]
    body = []
    for (phase, tokens, batch, threads), speeds in first.items():
        best = {
            pattern: max(found)
            for pattern in patterns
            if (found := [speed for (own, _), speed in speeds.items() if own == pattern])
        }
        if (dense := best.get(DENSE_PATTERN)) is None:
            continue
        size = f"{tokens} tokens" if phase == "prefill" else f"batch {batch}"
        cells = [f"{best[p]:.1f}\n{best[p] / dense:.2f}x" if p in best else NOTHING for p in sparse]
        name = f"{phase}, {size}, {threads} thread{'s' * (threads > 1)}"
        body.append((name, f"{dense:.1f}", *cells, "not measured", _paper(phase)))
    head = ("tokens/s", "dense", *sparse, "ours on a GPU", "paper's tokens/s, 6:8 over dense")
    note = f"`sparse-bitnet bench` ({where}). After each speed: over the dense model's."
    return [
        Section("Throughput (table 3)"),
        Table(head, body, notes=[note]),
        Paragraph(
            "On a CPU sparsity saves bytes of weights, not products. The paper's gain needs a GPU's "
            "sparse tensor cores; [gpu.md](gpu.md) says how to measure ours."
        ),
    ]


def _paper(phase: str) -> str:
    table = paper_results()["throughput_qwen2.5_3B_tokens_per_second"]
    gpu, found = next((name, each) for name, each in table.items() if name.startswith(phase))
    gains = [s / d for s, d in zip(found["sparse_6:8"], found["dense"], strict=True)]
    return f"{min(gains):.2f}x to {max(gains):.2f}x ({gpu.partition('_')[2]})"
