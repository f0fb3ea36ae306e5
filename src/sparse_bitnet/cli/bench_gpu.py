# SPDX-License-Identifier: Apache-2.0
"""`sparse-bitnet bench prefill|decode|train|kernels|profile`: the paper's Table 3, training steps and
single kernels on a GPU; `bench gpu --all` measures everything."""

from pathlib import Path
from typing import Annotated

from sparse_bitnet.bench.options import GpuBenchOptions
from sparse_bitnet.cli.arguments import FLAT, parse
from sparse_bitnet.errors import UserError

KINDS = ("prefill", "decode", "train", "kernels", "profile")


def main(arguments: list[str]) -> None:
    """Measure on the GPU; `arguments` start with one of `KINDS`, or with "gpu"."""
    kind, *rest = arguments

    def entry(options: Annotated[GpuBenchOptions, FLAT], out: Path | None = None) -> None:
        """Dense bf16, dense int8 and sparse models of one shape, in turn, on a GPU.

        Args:
            options: what to measure.
            out: append the rows to this JSON-lines file.
        """
        run(kind, options, out)

    def everything(all: bool = False, out: Path | None = None, rehearse: bool = False) -> None:
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
            raise UserError("bench gpu: say --all, or take one of " + ", ".join(KINDS))
        if not (rehearse or torch.cuda.is_available()):
            raise UserError("bench gpu: torch sees no CUDA device; --rehearse runs it on the CPU")
        out = out or Path("gpu-rehearsal" if rehearse else "gpu-results")
        if not run_all(out, rehearse=rehearse):
            raise SystemExit(1)  # every step that failed has said why

    parse(everything if kind == "gpu" else entry, rest, prog=f"sparse-bitnet bench {kind}")


def run(kind: str, options: GpuBenchOptions, out: Path | None) -> None:
    """Measure one of `KINDS`, append the rows to `out` as they come, and print the table.

    Raises `UserError` for an unknown model, a pattern that does not fit, or no CUDA device.
    """
    from rich.console import Console

    from sparse_bitnet.bench import gpu_kernels, gpu_models
    from sparse_bitnet.bench.gpu_record import record, table
    from sparse_bitnet.bench.record import append_records, check_records
    from sparse_bitnet.experiments.provenance import provenance

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
