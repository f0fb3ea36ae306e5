# SPDX-License-Identifier: Apache-2.0
"""`sparse-bitnet bench`: speed of the CPU engine, beside what the machine could do at most; on a GPU the
paper's Table 3, training steps and single kernels."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from sparse_bitnet.bench.options import BenchOptions, GpuBenchOptions
from sparse_bitnet.cli.arguments import FLAT, parse
from sparse_bitnet.errors import UserError

GPU_KINDS = ("prefill", "decode", "train", "kernels", "profile")


def main(arguments: list[str]) -> None:
    """Measure, print a table and write JSON lines if asked.

    On a GPU with one of `GPU_KINDS` as the first argument, or with "gpu" for everything.
    """
    kind, *rest = arguments or [""]

    def one_kind(options: Annotated[GpuBenchOptions, FLAT], out: Path | None = None) -> None:
        """Dense bf16, dense int8 and sparse models of one shape, in turn, on a GPU.

        Args:
            options: what to measure.
            out: append the rows to this JSON-lines file.
        """
        on_gpu(kind, options, out)

    if kind in ("gpu", *GPU_KINDS):
        parse(all_on_gpu if kind == "gpu" else one_kind, rest, prog=f"sparse-bitnet bench {kind}")
    else:
        parse(on_cpu, arguments, prog="sparse-bitnet bench")


def on_cpu(options: Annotated[BenchOptions, FLAT], out: Path | None = None) -> None:
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
    from sparse_bitnet.bench.interleaved import run
    from sparse_bitnet.bench.record import append_records, check_records, table, where_measured
    from sparse_bitnet.progress import Progress

    if out is not None:
        check_records(out)
    console = Console()
    with Progress(console) as progress:
        line = progress.line("starting")
        rows = run(options, lambda what, share: line(share, 1.0, label=what))
    where = where_measured()
    for pattern in dict.fromkeys(row.pattern for row in rows):
        console.print(table([row for row in rows if row.pattern == pattern]))
    console.print(f"{where['hardware']}, {where['date'][:10]}, commit {where['commit']}")
    if doubt := warning(rows[0].others_share):
        console.print(doubt)
    if out is not None:
        append_records(out, map(asdict, rows), where)
        console.print(f"written to {out}")


def all_on_gpu(all: bool = False, out: Path | None = None, rehearse: bool = False) -> None:
    """Tests, kernels, prefill, decode, training and a profile on this GPU, in a folder with a page.

    Every step is a process of its own; one that fails is a row that says why. Called again it goes on
    with what is missing or failed.

    Args:
        all: every step; there is no other choice yet.
        out: folder for rows and index.html; gpu-results, or gpu-rehearsal.
        rehearse: the same steps on the CPU with a small model, to see that all is in place.
    """
    import torch

    from sparse_bitnet.bench.gpu_all import run_all

    if not all:
        raise UserError("bench gpu: say --all, or take one of " + ", ".join(GPU_KINDS))
    if not (rehearse or torch.cuda.is_available()):
        raise UserError("bench gpu: torch sees no CUDA device; --rehearse runs it on the CPU")
    out = out or Path("gpu-rehearsal" if rehearse else "gpu-results")
    if not run_all(out, rehearse=rehearse):
        raise SystemExit(1)  # every step that failed has said why


def on_gpu(kind: str, options: GpuBenchOptions, out: Path | None) -> None:
    """Measure one of `GPU_KINDS`, append the rows to `out` as they come, and print the table.

    Raises `UserError` for an unknown model, a pattern that does not fit, or no CUDA device.
    """
    from rich.console import Console

    from sparse_bitnet.bench import gpu_kernels, gpu_models
    from sparse_bitnet.bench.gpu_record import record, table
    from sparse_bitnet.bench.record import append_records, check_records
    from sparse_bitnet.provenance import provenance

    measured = {
        "prefill": lambda: gpu_models.run_inference(options, "prefill"),
        "decode": lambda: gpu_models.run_inference(options, "decode"),
        "train": lambda: gpu_models.run_training(options),
        "kernels": lambda: gpu_kernels.run(options),
        "profile": lambda: gpu_kernels.run_profile(options),
    }
    if out is not None:
        check_records(out)
    where, rows, console = provenance(), [], Console()
    for row in measured[kind]():
        rows.append(row)
        if out is not None:
            append_records(out, [record(row, options)], where)
    if not console.is_terminal:  # in a file or a pipe nothing of a row is to be cut off
        console = Console(width=200)
    layers = "" if options.layers is None else f", {options.layers} layers"
    if kind != "profile":
        title = f"{kind}: {options.model} {options.pattern}{layers}, {where['hardware']}"
        console.print(table(rows, title))
    console.print(f"torch {where['versions']['torch']}, {where['date'][:10]}, {where['commit']}")
    if out is not None:
        console.print(f"written to {out}", soft_wrap=True)
