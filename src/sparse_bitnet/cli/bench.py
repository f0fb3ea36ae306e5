# SPDX-License-Identifier: Apache-2.0
"""`sparse-bitnet bench`: speed of the CPU engine, beside what the machine could do at most."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from sparse_bitnet.bench.options import BenchOptions
from sparse_bitnet.cli.arguments import FLAT, parse


def main(arguments: list[str]) -> None:
    """Measure prefill and decode; print a table and write JSON lines if asked.

    `prefill`, `decode`, `train`, `kernels`, `profile` or `gpu` as the first argument measures on a GPU
    instead.
    """
    from sparse_bitnet.cli.bench_gpu import KINDS
    from sparse_bitnet.cli.bench_gpu import main as on_gpu

    if arguments[:1] and arguments[0] in ("gpu", *KINDS):
        return on_gpu(arguments)
    parse(run, arguments, prog="sparse-bitnet bench")


def run(options: Annotated[BenchOptions, FLAT], out: Path | None = None) -> None:
    """Speed of the CPU engine on a model of a preset's shape with random weights, or on yours.

    Decode is given as a share of the memory's speed, prefill of the int8 multiply-adds', both
    measured in the same run. Keep the machine otherwise idle.

    `bench prefill|decode|train|kernels|profile`, and `bench gpu --all`, measure on a GPU instead.

    Args:
        options: what to measure.
        out: append the rows to this JSON-lines file.
    """
    from rich.console import Console

    from sparse_bitnet.bench.contention import warning
    from sparse_bitnet.bench.interleaved import run as measure
    from sparse_bitnet.bench.record import append_records, check_records, table, where_measured
    from sparse_bitnet.progress import Progress

    if out is not None:
        check_records(out)
    console = Console()
    with Progress(console) as progress:
        line = progress.line("starting")
        rows = measure(options, lambda what, share: line(share, 1.0, label=what))
    where = where_measured()
    for pattern in dict.fromkeys(row.pattern for row in rows):
        console.print(table([row for row in rows if row.pattern == pattern]))
    console.print(f"{where['hardware']}, {where['date'][:10]}, commit {where['commit']}")
    if doubt := warning(rows[0].others_share):
        console.print(doubt)
    if out is not None:
        append_records(out, map(asdict, rows), where)
        console.print(f"written to {out}")
