# SPDX-License-Identifier: Apache-2.0
"""Table 3: throughput of dense and sparse models, of the CPU engine, beside the paper's on GPUs."""

import json
from pathlib import Path

from sparse_bitnet.errors import UserError
from sparse_bitnet.experiments.cells import paper_results
from sparse_bitnet.experiments.page import Block, Paragraph, Section
from sparse_bitnet.experiments.scales import DENSE_PATTERN
from sparse_bitnet.experiments.table import Table

_Measured = tuple[str, int, int, int]
"""Phase, tokens, batch and threads."""


def throughput_blocks(path: Path) -> list[Block]:
    """The table of the rows that `sparse-bitnet bench --out` wrote.

    Of the last run that measured dense and sparse models in turn; each pattern in the fastest of its
    run-time formats, with float16 caches and without context. Raises `UserError` where there is none.
    """
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        runs: dict[str, dict[_Measured, dict[str, float]]] = {}
        for row in rows:
            if row["kv_cache"] == "float16" and (row["phase"] == "prefill" or row["tokens"] == 0):
                measured = (row["phase"], row["tokens"], row["batch"], row["threads"])
                speeds = runs.setdefault(row["date"], {}).setdefault(measured, {})
                before = speeds.get(row["pattern"], 0.0)
                speeds[row["pattern"]] = max(before, row["tokens_per_second"])
        date, run = next(
            (date, run)
            for date, run in reversed(runs.items())
            if all(DENSE_PATTERN in speeds and len(speeds) > 1 for speeds in run.values())
        )
        made = next(row for row in rows if row["date"] == date)
        where = f"{made['model']}, random weights; {made['hardware']}, {date[:10]}"
    except (OSError, ValueError, KeyError, StopIteration) as error:
        raise UserError(
            f"{path}: no run of dense and sparse models in turn, as of `sparse-bitnet bench --pattern "
            "8:8 6:8 --out`"
        ) from error
    sparse = [pattern for pattern in next(iter(run.values())) if pattern != DENSE_PATTERN]
    body = []
    for (phase, tokens, batch, threads), speeds in run.items():
        dense = speeds[DENSE_PATTERN]
        size = f"{tokens} tokens" if phase == "prefill" else f"batch {batch}"
        cells = [f"{speeds[p]:.1f}\n{speeds[p] / dense:.2f}x" for p in sparse]
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
