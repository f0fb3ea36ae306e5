"""`sparse-bitnet bench prefill|decode|train`: the paper's Table 3 and training steps on a GPU."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from sparse_bitnet.cli.arguments import parse
from sparse_bitnet.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from sparse_bitnet.bench.gpu_options import GpuBenchOptions

KINDS = ("prefill", "decode", "train")


def main(arguments: list[str]) -> None:
    """Measure on the GPU; `arguments` start with one of `KINDS`."""
    import tyro

    from sparse_bitnet.bench.gpu_options import GpuBenchOptions

    kind, *rest = arguments

    def entry(
        options: Annotated[GpuBenchOptions, tyro.conf.arg(name="")], out: Path | None = None
    ) -> None:
        """Dense bf16, dense int8 and sparse models of one shape, in turn, on a GPU.

        Args:
            options: what to measure.
            out: append the rows to this JSON-lines file.
        """
        from rich.console import Console

        console = Console()
        # In a file or a pipe nothing of a row is to be cut off.
        run(kind, options, out, console if console.is_terminal else Console(width=140))

    parse(entry, rest, prog=f"sparse-bitnet bench {kind}")


def run(kind: str, options: "GpuBenchOptions", out: Path | None, console: "Console") -> None:
    """Measure one of `KINDS`, print the table, and append the rows to `out`.

    Raises `UserError` for an unknown preset, a pattern that does not fit, or no CUDA device.
    """
    if kind not in KINDS:
        raise UserError(f"bench {kind}: choose one of {', '.join(KINDS)}")
    from sparse_bitnet.bench import gpu_inference, gpu_kernels, gpu_record, gpu_train
    from sparse_bitnet.bench.record import append_records
    from sparse_bitnet.experiments.provenance import provenance

    measured = {
        "prefill": gpu_inference.run_prefill,
        "decode": gpu_inference.run_decode,
        "train": gpu_train.run,
    }
    where = provenance()
    layers = "" if options.layers is None or options.kernels else f", {options.layers} layers"
    title = f"{options.model} {options.pattern}{layers}, {where['hardware']}"
    if options.kernels:
        kernel_rows = gpu_kernels.run(options)
        console.print(gpu_record.kernel_table(kernel_rows, f"kernels: {title}"))
        records = gpu_record.records(kernel_rows, options)
    else:
        rows = measured[kind](options)
        console.print(gpu_record.table(rows, f"{kind}: {title}"))
        records = gpu_record.records(rows, options)
    console.print(f"torch {where['versions']['torch']}, {where['date'][:10]}, {where['commit']}")
    if out is not None:
        append_records(out, records, where)
        console.print(f"written to {out}", soft_wrap=True)
