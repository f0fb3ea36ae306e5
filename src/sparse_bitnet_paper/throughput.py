# SPDX-License-Identifier: Apache-2.0
"""Table 3: throughput of dense and sparse models, of the CPU engine, beside the paper's on GPUs."""

import json
from pathlib import Path

from sparse_bitnet.errors import UserError
from sparse_bitnet_paper.cells import paper_gains
from sparse_bitnet_paper.page import Block, Paragraph, Section
from sparse_bitnet_paper.scales import DENSE_PATTERN
from sparse_bitnet_paper.table import Table

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
        date, run = next((date, run) for date, run in reversed(runs.items()) if _is_in_turn(run))
        made = next(row for row in rows if row["date"] == date)
        where = f"{made['model']}, random weights; {made['hardware']}, {date[:10]}"
        sparse = [pattern for pattern in next(iter(run.values())) if pattern != DENSE_PATTERN]
        spread = max(row["spread"] for row in rows if row["date"] == date)
    except (OSError, ValueError, LookupError, TypeError, StopIteration) as error:
        raise UserError(
            f"{path}: no run of dense and sparse models in turn, as of `sparse-bitnet bench --pattern "
            "8:8 6:8 --out`"
        ) from error
    body = []
    for (phase, tokens, batch, threads), speeds in run.items():
        dense = speeds[DENSE_PATTERN]
        size = f"{tokens} tokens" if phase == "prefill" else f"batch {batch}"
        cells = [f"{speeds[p]:.1f}\n{speeds[p] / dense:.2f}x" for p in sparse]
        name = f"{phase}, {size}, {threads} thread{'s' * (threads > 1)}"
        body.append((name, f"{dense:.1f}", *cells, "not measured", _paper(phase)))
    head = ("tokens/s", "dense", *sparse, "ours on a GPU", "paper's 3B, 6:8 over dense")
    note = (
        f"`sparse-bitnet bench` ({where}). Each pattern in the fastest of its formats; after each "
        f"speed: over the dense model's. The rounds of a measurement differ by up to {spread:.0%}. The "
        "paper's are of all its prompts, of 512 to 65,536 tokens, and of all its batches, of 64 to 512."
    )
    return [
        Section("Throughput (table 3)"),
        Table(head, body, notes=[note]),
        Paragraph(
            "On a CPU sparsity saves bytes of weights, not products. The paper's gain needs a GPU's "
            "sparse tensor cores; [gpu.md](gpu.md) says how to measure ours."
        ),
    ]


def _is_in_turn(run: dict[_Measured, dict[str, float]]) -> bool:
    """Whether each measurement is of the dense model and of the same sparse ones."""
    patterns = {frozenset(speeds) for speeds in run.values()}
    return len(patterns) == 1 and all(DENSE_PATTERN in own and len(own) > 1 for own in patterns)


def _paper(phase: str) -> str:
    gpu, gains = paper_gains(phase)
    return f"{min(gains.values()):.2f}x to {max(gains.values()):.2f}x ({gpu})"
