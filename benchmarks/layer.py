# SPDX-License-Identifier: Apache-2.0
"""Cost of selecting mask and codes, against the layer's own work and against the memory's speed.

    python benchmarks/layer.py            # every projection of Qwen2.5 0.5B, 1.5B and 3B
    python benchmarks/layer.py --quick    # two shapes, under half a minute

Per weight matrix: the kernels of each instruction set, the PyTorch reference, eager and compiled, and a
top-k/scatter implementation, all doing scale, mask and codes; and `nn.Linear` forward and backward at
65,536 tokens, extrapolated from a smaller batch. The methods take turns, medians are reported. The
target is a selection at 1/3 of the rate at which memory can be read, measured in the same run.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from recorded import RESULTS
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from sparse_bitnet import _cpu
from sparse_bitnet.bench.record import result_file
from sparse_bitnet.ops.absmean import absmean_reference
from sparse_bitnet.ops.cpu import Kernels
from sparse_bitnet.ops.select_ternary import select_ternary_reference
from sparse_bitnet.progress import Progress
from sparse_bitnet.provenance import provenance

STEP_TOKENS = 65_536
TARGET = 1 / 3
PATTERN = (6, 8)
READ_BYTES = 256 << 20
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Shape:
    """One weight matrix of a decoder block and the projections that have it."""

    model: str
    projections: str
    out_features: int
    in_features: int


def shapes_of(model: str, hidden: int, ffn: int, kv: int) -> list[Shape]:
    return [
        Shape(model, "q, o", hidden, hidden),
        Shape(model, "k, v", kv, hidden),
        Shape(model, "gate, up", ffn, hidden),
        Shape(model, "down", hidden, ffn),
    ]


SHAPES = [
    *shapes_of("qwen2.5-0.5b", 896, 4864, 128),
    *shapes_of("qwen2.5-1.5b", 1536, 8960, 256),
    *shapes_of("qwen2.5-3b", 2048, 11008, 256),
]


def by_reference(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scale = absmean_reference(weight)
    return scale, *select_ternary_reference(weight, scale, *PATTERN)


def by_topk(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same with a top-k per group, as N:M layers are commonly written."""
    n, m = PATTERN
    scale = absmean_reference(weight)
    groups = weight.abs().unflatten(-1, (-1, m))
    kept = groups.topk(n, dim=-1).indices
    mask = torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, kept, True).flatten(-2)
    codes = (weight.float() / scale).round().clamp(-1, 1).to(torch.int8) * mask
    return scale, codes, mask


def linear_step(shape: Shape, dtype: torch.dtype, tokens: int) -> Callable[[], None]:
    linear = nn.Linear(shape.in_features, shape.out_features, bias=False, dtype=dtype)
    x = torch.randn(tokens, shape.in_features, dtype=dtype, requires_grad=True)
    gradient = torch.randn(tokens, shape.out_features, dtype=dtype)

    def step() -> None:
        linear.zero_grad()
        x.grad = None
        linear(x).backward(gradient)

    return step


def medians(
    methods: dict[str, Callable[[], object]], rounds: int, budget: float
) -> dict[str, float]:
    """Seconds per method. They take turns; one that has used up its budget sits out after 3 turns.

    Each round has another order, because what ran before decides what the caches hold.
    """
    times: dict[str, list[float]] = {name: [] for name in methods}
    for run in methods.values():
        run()
    order, shuffle = list(methods), random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            if len(times[name]) < 3 or sum(times[name]) < budget:
                began = time.perf_counter()
                methods[name]()
                times[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in times.items()}


def measure(
    shape: Shape,
    dtype: str,
    isas: list[str],
    compiled: Callable | None,
    options: argparse.Namespace,
) -> dict:
    """One row: seconds of every method, and the rates they mean, for one matrix."""
    torch.manual_seed(0)
    weight = (torch.randn(shape.out_features, shape.in_features) * 0.02).to(DTYPES[dtype])
    scale = absmean_reference(weight)
    read_buffer = torch.ones(READ_BYTES // 4)
    methods: dict[str, Callable[[], object]] = {
        "linear": linear_step(shape, DTYPES[dtype], options.tokens),
        "eager": lambda: by_reference(weight),
        "top-k": lambda: by_topk(weight),
        # Memory's speed is what the better of two readers reaches.
        "read by torch": lambda: read_buffer.sum(),
        "read by kernel": lambda: Kernels().absmean(read_buffer),
    }
    if compiled is not None:
        methods["compiled"] = lambda: compiled(weight)
    for isa in isas:
        kernels = Kernels(isa)
        methods[f"{isa} scale"] = lambda kernels=kernels: kernels.absmean(weight)
        methods[f"{isa} mask"] = lambda kernels=kernels: kernels.nm_mask(weight, *PATTERN)
        methods[f"{isa} select"] = lambda kernels=kernels: kernels.select_ternary(
            weight, scale, *PATTERN
        )
    seconds = medians(methods, options.rounds, options.budget)
    read = READ_BYTES / min(seconds.pop("read by torch"), seconds.pop("read by kernel"))
    seconds["linear"] *= STEP_TOKENS / options.tokens
    size = weight.numel() * weight.element_size()
    share = {
        name: size / value / read for name, value in seconds.items() if name.split()[0] in isas
    }
    best = isas[0]
    total = seconds[f"{best} scale"] + seconds[f"{best} select"]
    return {
        "model": shape.model,
        "projections": shape.projections,
        "out_features": shape.out_features,
        "in_features": shape.in_features,
        "dtype": dtype,
        "weight_bytes": size,
        "pattern": "{}:{}".format(*PATTERN),
        "best_isa": best,
        "seconds": seconds,
        "linear_tokens": STEP_TOKENS,
        "linear_measured_tokens": options.tokens,
        "read_bytes_per_second": read,
        "share_of_read": share,
        "ratio_to_target": {name: value / TARGET for name, value in share.items()},
        "share_of_linear": total / seconds["linear"],
    }


def table_of(rows: list[dict], isas: list[str]) -> Table:
    best = isas[0]
    table = Table(title=f"{PATTERN[0]}:{PATTERN[1]}; kernel times are of {best}; ms unless stated")
    for name in ("model", "projections", "dtype", "scale", "mask", "mask + codes"):
        table.add_column(name)
    table.add_column("rate / target")
    for name in ("eager", "compiled", "top-k", "linear, s", "cost"):
        table.add_column(name, justify="right")
    for row in rows:
        ms = {name: f"{1e3 * value:.2f}" for name, value in row["seconds"].items()}
        ratio = row["ratio_to_target"]
        table.add_row(
            row["model"],
            f"{row['projections']} {row['out_features']}x{row['in_features']}",
            row["dtype"],
            ms[f"{best} scale"],
            ms[f"{best} mask"],
            ms[f"{best} select"],
            ", ".join(f"{ratio[f'{isa} mask']:.1f} {ratio[f'{isa} select']:.1f}" for isa in isas),
            ms["eager"],
            ms.get("compiled", "-"),
            ms["top-k"],
            f"{row['seconds']['linear']:.2f}",
            f"{100 * row['share_of_linear']:.3f} %",
        )
    return table


def summarise(rows: list[dict], isas: list[str], console: Console) -> None:
    read = statistics.median(row["read_bytes_per_second"] for row in rows)
    console.print(
        f"memory read {read / 1e9:.1f} GB/s (median), target {read * TARGET / 1e9:.1f} GB/s"
    )
    console.print(
        f"rate / target: mask and mask + codes for {', '.join(isas)}; at least 1 meets it. "
        f"linear: forward + backward at {STEP_TOKENS:,} tokens, extrapolated from "
        f"{rows[0]['linear_measured_tokens']:,}. cost: scale + mask + codes over linear"
    )
    for model in dict.fromkeys(row["model"] for row in rows):
        for dtype in DTYPES:
            block = [row for row in rows if (row["model"], row["dtype"]) == (model, dtype)]
            ratios = ", ".join(
                f"{isa} {block_rate(block, f'{isa} mask') / read / TARGET:.2f} "
                f"{block_rate(block, f'{isa} select') / read / TARGET:.2f}"
                for isa in isas
            )
            console.print(f"whole block of {model}, {dtype:>8}: rate / target {ratios}")


def block_rate(rows: list[dict], method: str) -> float:
    """Bytes per second over all the matrices of a decoder block, each as often as it occurs."""
    size = seconds = 0.0
    for row in rows:
        count = len(row["projections"].split(","))
        size += count * row["weight_bytes"]
        seconds += count * row["seconds"][method]
    return size / seconds


def warm_allocator() -> None:
    """Reach the allocator's steady state.

    glibc returns large blocks to the system, page faults and all, until a process has freed one of
    32 MiB or nearly so; a process that trains has.
    """
    for _ in range(3):
        torch.ones(31 << 20, dtype=torch.int8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="two shapes, nothing compiled or saved"
    )
    parser.add_argument("--out", type=Path, help="JSON lines; benchmarks/results/ by default")
    options = parser.parse_args()
    options.rounds, options.budget, options.tokens = (
        (7, 0.3, 256) if options.quick else (11, 1, 512)
    )
    isas = [isa for isa in _cpu.supported_isas() if isa != "generic"] or ["generic"]
    compiled = None
    if not options.quick:
        compiled = torch.compile(by_reference, dynamic=True, fullgraph=True)
    warm_allocator()
    where = provenance()
    console = Console()
    console.print(
        f"{where['hardware']}, {where['threads']} threads, torch {where['versions']['torch']}"
    )
    shapes = SHAPES[0:3:2] if options.quick else SHAPES
    cases = [(shape, dtype) for shape in shapes for dtype in DTYPES]
    rows = []
    with Progress(console) as progress:
        line = progress.line("measuring")
        for shape, dtype in cases:
            line(len(rows), len(cases))
            rows.append(measure(shape, dtype, isas, compiled, options))
    console.print(table_of(rows, isas))
    summarise(rows, isas, console)
    out = options.out or (None if options.quick else result_file(RESULTS, "layer", where))
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text("".join(json.dumps(row | where) + "\n" for row in rows))
        console.print(f"written to {out}")


if __name__ == "__main__":
    main()
