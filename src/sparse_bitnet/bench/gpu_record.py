# SPDX-License-Identifier: Apache-2.0
"""Rows and tables of the GPU benchmarks."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

BASELINE = {"prefill": "int8", "decode": "int8", "train": "bf16"}
PAPER_GAINS = {
    "prefill": {512: 10.6 / 9.7, 1024: 21.3 / 20.3, 2048: 42.5 / 37.7, 4096: 52.2 / 40.9}
    | {8192: 53.6 / 42.1, 16384: 55.1 / 42.7, 32768: 55.4 / 42.8, 65536: 55.5 / 42.7},
    "decode": {64: 12.2 / 11.1, 128: 20.4 / 17.2, 256: 29.1 / 25.9, 512: 34.4 / 30.4},
}
"""Speed of 6:8 over dense in the paper's table 3 (Qwen2.5-3B), by prompt length or batch."""


@dataclass(kw_only=True)
class GpuRow:
    """One variant, or one kernel, at one size."""

    phase: str
    """"prefill", "decode", "train", "kernels" or "profile"."""
    variant: str
    size: int
    """Prompt length, batch of decode, tokens of a training step or of a product."""
    layer: str = ""
    """Of a kernel: "out_features x in_features"; of training: "batch x length"."""
    seconds: float | None = None
    """Median, of a prompt, a step or a kernel; None where `failed`."""
    spread: float | None = None
    """Slowest over fastest measurement, minus 1."""
    tokens_per_second: float | None = None
    peak_bytes: int | None = None
    """Most GPU memory held, of training."""
    bound: str | None = None
    """What limits a kernel on this machine's roofline: "memory" or "compute"."""
    share: float | None = None
    """Time that the roofline allows over the time taken; in a profile, the part of the time of all."""
    failed: str | None = None
    """Why it could not be measured."""


def rows_of(
    phase: str,
    size: int,
    found: Mapping[str, tuple[float, float] | None],
    *,
    layer: str = "",
    has_rate: bool = True,
) -> list[GpuRow]:
    """Rows of one size, from what `measured` returns; `has_rate`: `size` is of tokens computed."""
    rows = []
    for variant, times in found.items():
        row = GpuRow(phase=phase, variant=variant, size=size, layer=layer)
        if times is None:
            row.failed = "out of memory"
        else:
            row.seconds, row.spread = times
            row.tokens_per_second = size / row.seconds if has_rate else None
        rows.append(row)
    return rows


def table(rows: list[GpuRow], title: str) -> "Table":
    """A line a size, a column a variant: speeds with their ratio to the baseline and the paper's ratio
    beside, or times of kernels with their share of the roofline."""
    from rich import box
    from rich.table import Table

    phase = rows[0].phase
    baseline, paper = BASELINE.get(phase), PAPER_GAINS.get(phase, {})
    found = {(row.layer, row.size, row.variant): row for row in rows}
    variants = list(dict.fromkeys(row.variant for row in rows))
    caption = f"tokens/s, and their ratio to {baseline}"
    shown = Table(
        title=title,
        caption=caption if baseline else "microseconds, and share of the roofline",
        box=box.SIMPLE_HEAD,
    )
    shown.add_column("batch" if phase == "decode" else "tokens", justify="right")
    for variant in [*variants, *(["paper, sparse"] if paper else [])]:
        shown.add_column(variant, justify="right", no_wrap=True)
    for layer, size in dict.fromkeys((row.layer, row.size) for row in rows):
        base = found.get((layer, size, baseline or ""))
        cells = [_cell(found.get((layer, size, variant)), base) for variant in variants]
        if paper:
            cells.append(f"{paper[size]:.2f}x" if size in paper else "-")
        shown.add_row(f"{layer}  {size:,}".strip(), *cells)
    return shown


def _cell(row: GpuRow | None, base: GpuRow | None) -> str:
    if row is None or row.seconds is None:
        return "-" if row is None else row.failed or "-"
    if row.tokens_per_second is None:
        return f"{row.seconds * 1e6:.1f}" + ("" if row.share is None else f"  {row.share:.0%}")
    ratio = f"  {base.seconds / row.seconds:.2f}x" if base and base.seconds else ""
    return f"{row.tokens_per_second:,.0f}" + ("" if row is base else ratio)


def record(row: GpuRow, options: Any) -> dict[str, Any]:
    """JSON-able, with what was asked for."""
    given = {name: getattr(options, name) for name in ("model", "pattern", "rounds", "layers")}
    return {**given, **dataclasses.asdict(row)}
