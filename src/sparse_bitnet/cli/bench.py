# SPDX-License-Identifier: Apache-2.0
"""`sparse-bitnet bench`: speed of the CPU engine beside the machine's limits; `bench gpu`: the paper's
Table 3 on a GPU."""

from pathlib import Path

from sparse_bitnet.bench.options import BenchOptions, GpuBenchOptions
from sparse_bitnet.cli.arguments import parse
from sparse_bitnet.errors import UserError


def main(arguments: list[str]) -> None:
    """Measure, print a table and write JSON lines if asked; on a GPU with "gpu" as the first argument."""
    if arguments[:1] == ["gpu"]:
        parse(on_gpu, arguments[1:], prog="sparse-bitnet bench gpu")
    else:
        parse(on_cpu, arguments, prog="sparse-bitnet bench")


def on_cpu(options: BenchOptions, out: Path | None = None) -> None:
    """Measure how fast the CPU engine runs a packed model, or a preset with random weights.

    The table compares decode with the machine's memory bandwidth and prefill with its int8
    throughput, both measured in the same run. Keep the machine otherwise idle.

    `sparse-bitnet bench gpu --help`: the same for an NVIDIA GPU.

    Args:
        out: Append the rows to this JSON-lines file.
    """
    from rich.console import Console

    from sparse_bitnet.bench.interleaved import run, table
    from sparse_bitnet.files import check_new_file
    from sparse_bitnet.progress import Progress
    from sparse_bitnet.provenance import append_records, where_measured

    if out is not None:
        check_new_file(out)
    console = Console()
    with Progress(console) as progress:
        line = progress.line("starting")
        rows = run(options, lambda what, share: line(share, 1.0, label=what))
    where = where_measured()
    for pattern in dict.fromkeys(row["pattern"] for row in rows):
        console.print(table([row for row in rows if row["pattern"] == pattern]))
    console.print(f"{where['hardware']}, {where['date'][:10]}, commit {where['commit']}")
    if (share := rows[0]["others_share"]) is not None:
        console.print(f"other processes used {share:.0%} of the processors")
    if out is not None:
        append_records(out, rows, where)
        console.print(f"{out}: {len(rows)} rows added")


def on_gpu(options: GpuBenchOptions, out: Path = Path("gpu-results")) -> None:
    """Measure prefill, decode and training on an NVIDIA GPU (the paper's Table 3).

    After an interruption or a failure, the same command measures what is missing.

    Args:
        out: Folder to write rows.jsonl and index.html to.
    """
    import torch

    from sparse_bitnet.bench.gpu import run
    from sparse_bitnet.provenance import provenance
    from sparse_bitnet_paper.paper import paper_gains

    if not (options.rehearse or torch.cuda.is_available()):
        raise UserError("bench gpu: torch sees no CUDA device; --rehearse runs it on the CPU")
    if not run(options, out, provenance(), paper_gains):
        raise SystemExit(1)  # every step that failed has said why
