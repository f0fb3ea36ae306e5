"""`sparse-bitnet bench prefill|decode|train`: the GPU benchmarks as one function."""

import importlib
from typing import TYPE_CHECKING

from sparse_bitnet.bench.gpu_options import GpuBenchOptions, GpuOutput
from sparse_bitnet.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

KINDS = ("prefill", "decode", "train")


def run(kind: str, options: GpuBenchOptions, output: GpuOutput, console: "Console") -> None:
    """Measure, print the table, and append the rows to the file asked for.

    Args:
        kind: one of `KINDS`; with `options.kernels` single shapes are measured instead.
        options: what to measure.
        output: where rows go.
        console: to print on.

    Raises `UserError` for an unknown preset, a pattern that does not fit, or no CUDA device.
    """
    from sparse_bitnet.bench import gpu_record
    from sparse_bitnet.bench.record import append_records
    from sparse_bitnet.experiments.provenance import provenance

    if kind not in KINDS:
        raise UserError(f"bench {kind}: choose one of {', '.join(KINDS)}")
    name = "kernels" if options.kernels else kind
    rows = importlib.import_module(f"sparse_bitnet.bench.gpu_{name}").run(options)
    where = provenance()
    layers = "" if options.layers is None or options.kernels else f", {options.layers} layers"
    title = f"{name}: {options.model} {options.pattern}{layers}, {where['hardware']}"
    table = gpu_record.kernel_table if options.kernels else gpu_record.table
    console.print(table(rows, title))
    console.print(f"torch {where['versions']['torch']}, {where['date'][:10]}, {where['commit']}")
    if output.out is not None:
        append_records(output.out, gpu_record.records(rows, options), where)
        console.print(f"written to {output.out}", soft_wrap=True)
