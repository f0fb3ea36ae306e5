# SPDX-License-Identifier: Apache-2.0
"""Rows and tables of the GPU benchmarks."""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

# Speedup of 6:8 over dense in the paper's Table 3: prefill on an A100, decode on a B200.
PAPER_SPEEDUP = {
    "prefill": {
        512: 1.09,
        1024: 1.05,
        2048: 1.13,
        4096: 1.28,
        8192: 1.27,
        16384: 1.29,
        32768: 1.29,
        65536: 1.30,
    },
    "decode": {64: 1.09, 128: 1.18, 256: 1.12, 512: 1.13},
}
BASELINE = {"prefill": "int8", "decode": "int8", "train": "bf16"}


@dataclass(kw_only=True)
class SpeedRow:
    """One variant of one phase at one size."""

    phase: str
    """"prefill", "decode" or "train"."""
    variant: str
    size: int
    """Prompt length, batch of decode, or tokens of a training step."""
    seconds: float | None = None
    """Median, of a prompt or a step; None where `failed`."""
    spread: float | None = None
    """Slowest over fastest measurement, minus 1."""
    tokens_per_second: float | None = None
    peak_bytes: int | None = None
    """Most GPU memory held, of training."""
    failed: str | None = None
    """Why it could not be measured."""


OUT_OF_MEMORY = "out of memory"


def rows_of(
    phase: str,
    size: int,
    tokens: int,
    found: Mapping[str, tuple[float, float]],
    lacking: Iterable[str] = (),
) -> list[SpeedRow]:
    """Rows of one size: those measured, and those for which the memory did not suffice.

    Args:
        phase, size: of the rows.
        tokens: that a prompt or step computes.
        found: variant -> (seconds, spread).
        lacking: the other variants.
    """
    rows = [
        SpeedRow(
            phase=phase,
            variant=name,
            size=size,
            seconds=seconds,
            spread=spread,
            tokens_per_second=tokens / seconds,
        )
        for name, (seconds, spread) in found.items()
    ]
    return rows + [
        SpeedRow(phase=phase, variant=name, size=size, failed=OUT_OF_MEMORY) for name in lacking
    ]


@dataclass(kw_only=True)
class KernelRow:
    """One product of one shape at one token count."""

    route: str
    out_features: int
    in_features: int
    tokens: int
    seconds: float | None = None
    """Median; None where `failed`."""
    spread: float | None = None
    product_seconds: float | None = None
    """Of the product alone, without quantisation; None where it is not a step of its own."""
    bound: str | None = None
    """What limits it on this machine's roofline: "memory" or "compute"."""
    roofline_share: float | None = None
    """Time that the roofline allows the whole over the time taken."""
    share_of_layer: float | None = None
    """Of a profile: the kernel's part of the time of all."""
    failed: str | None = None
    """Why it could not be measured."""


def table(rows: list[SpeedRow], title: str) -> "Table":
    """A line a size, a column a variant, ratios to the baseline, and the paper's ratio."""
    from rich import box
    from rich.table import Table

    phase = rows[0].phase
    baseline, paper = BASELINE[phase], PAPER_SPEEDUP.get(phase, {})
    variants = list(dict.fromkeys(row.variant for row in rows))
    speed = {(row.size, row.variant): row for row in rows}
    found = Table(
        title=title,
        caption=f"tokens/s, and their ratio to {baseline}",
        box=box.SIMPLE_HEAD,
    )
    found.add_column("batch" if phase == "decode" else "tokens", justify="right")
    for variant in variants:
        found.add_column(variant, justify="right", no_wrap=True)
    if paper:
        found.add_column("paper, sparse", justify="right")
    for size in dict.fromkeys(row.size for row in rows):
        cells = []
        for variant in variants:
            row, base = speed.get((size, variant)), speed.get((size, baseline))
            if row is None or row.tokens_per_second is None:
                cells.append("-" if row is None else row.failed or "-")
                continue
            text = f"{row.tokens_per_second:,.0f}"
            if variant != baseline and base is not None and base.tokens_per_second:
                text += f"  {row.tokens_per_second / base.tokens_per_second:.2f}x"
            cells.append(text)
        if paper:
            cells.append(f"{paper[size]:.2f}x" if size in paper else "-")
        found.add_row(f"{size:,}", *cells)
    return found


def kernel_table(rows: list[KernelRow], title: str) -> "Table":
    """A line a measurement; its share of the roofline, or in a profile of the layer."""
    from rich import box
    from rich.table import Table

    found = Table(title=title, box=box.SIMPLE_HEAD)
    for name in ("product", "out x in", "tokens", "us", "product us", "bound", "share"):
        found.add_column(name, justify="left" if name == "product" else "right", no_wrap=True)
    for row in rows:
        share = row.roofline_share if row.share_of_layer is None else row.share_of_layer
        alone = "-" if row.product_seconds is None else f"{row.product_seconds * 1e6:.1f}"
        found.add_row(
            row.route[:60],
            f"{row.out_features} x {row.in_features}",
            f"{row.tokens:,}",
            row.failed if row.seconds is None else f"{row.seconds * 1e6:.1f}",
            alone,
            row.bound or "-",
            "-" if share is None else f"{share:.0%}",
        )
    return found


def records(rows: list[SpeedRow] | list[KernelRow], options: Any) -> list[dict[str, Any]]:
    """Rows as JSON-able mappings, each with what was asked for."""
    given = {name: getattr(options, name) for name in ("model", "pattern", "rounds", "layers")}
    return [{**given, **dataclasses.asdict(row)} for row in rows]
