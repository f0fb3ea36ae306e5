# SPDX-License-Identifier: Apache-2.0
"""Compares our CPU engine with others on the same random model, in one run.

    pip install ".[llama-cpp,export]"               # builds llama.cpp
    python benchmarks/peers.py                      # ten minutes on two cores, keep them otherwise idle
    python benchmarks/peers.py --model bonsai-2b --type tq2_0 --isa "" --threads 2 --rounds 3
    python benchmarks/peers.py --llama-bench PATH --gguf FILE [--llama-bench-args="-rtr 1"]
    python benchmarks/peers.py --type --isa avx2 --llama-bench PATH --gguf FILE --built-for avx2

llama.cpp runs the model exported to GGUF (ternary blocks, embedding and head in Q8_0) through the
library of llama-cpp-python. For other engines built on llama.cpp, give their llama-bench with a file of
theirs, or with the type of the exported file; both options may be repeated, pair by pair. A peer is
compared with our code for the instruction set that the peer was built for (`--built-for`; default: the
best one of this machine). Every engine has a process of its own, which is idle while another engine is
measured. Engines take turns, in another order each round, and medians are reported. All engines read
about as many bytes for the head: 8 bits per weight plus scales.
"""

import argparse
import importlib.util
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peer_engines import OURS, TYPES, Engine, engines_of, version_of
from recorded import record
from rich.console import Console

from sparse_bitnet.bench.interleaved import (
    READ_BYTES,
    RooflineMeter,
    others_share,
    processor_seconds,
    turns,
)
from sparse_bitnet.bench.random_model import ROTATIONS, cached_random_model
from sparse_bitnet.errors import UserError, install
from sparse_bitnet.host import available_cores
from sparse_bitnet.pattern import NMPattern
from sparse_bitnet.progress import Progress

IDLE_SECONDS = 0.05
"""Threads of OpenMP spin for a moment after their work; the next engine starts after that."""


@dataclass(kw_only=True)
class Row:
    """One measurement."""

    engine: str
    version: str
    type: str
    isa: str
    threads: int
    phase: str
    tokens: int
    tokens_per_second: float
    seconds: list[float]
    """Seconds of every round: for the whole prompt, or for one decoded token."""


def measure_all(
    engines: list[Engine],
    options: argparse.Namespace,
    meters: list[RooflineMeter],
    progress: Progress,
) -> dict[tuple[int, str], list[float]]:
    """Return the seconds of every round, by place in `engines` and phase."""
    phases = {"prefill": options.prompt, "decode": options.steps}
    groups = [[(place, phase) for place in range(len(engines))] for phase in phases]
    seconds: dict[tuple[int, str], list[float]] = {job: [] for group in groups for job in group}
    line, total = progress.line("measuring"), len(seconds) * options.rounds
    # A first token each: what is read from the file then is not speed.
    for engine in engines:
        engine.measure("decode", 2)
    ends, last = time.monotonic() + options.seconds, -1
    for done, (turn, (place, phase)) in enumerate(turns(groups, options.rounds)):
        if turn > last:
            if turn and time.monotonic() > ends:
                break
            last = turn
            for meter in meters:
                meter.visit()
        engine = engines[place]
        line(done, total, label=f"{phase}: {engine.name} {engine.type}")
        time.sleep(IDLE_SECONDS)
        seconds[place, phase].append(engine.measure(phase, phases[phase]))
    return seconds


def rows_of(
    engines: list[Engine], seconds: dict[tuple[int, str], list[float]], options: argparse.Namespace
) -> list[Row]:
    rows = []
    for (place, phase), times in seconds.items():
        engine, computed = engines[place], options.prompt if phase == "prefill" else 1
        rows.append(
            Row(
                engine=engine.name,
                version=version_of(engine.name),
                type=engine.type,
                isa=engine.isa,
                threads=engine.threads,
                phase=phase,
                tokens=options.prompt if phase == "prefill" else options.steps,
                tokens_per_second=computed / statistics.median(times),
                seconds=times,
            )
        )
    return rows


def ratios(rows: list[Row]) -> list[dict[str, Any]]:
    """Return our speed over the fastest peer's, for each phase and instruction set, at the best number of
    threads of either; only engines of one instruction set are compared."""
    made = []
    for phase, isa in dict.fromkeys((row.phase, row.isa) for row in rows if row.engine == OURS):
        own = [row for row in rows if (row.phase, row.isa) == (phase, isa)]
        best = {
            row.engine == OURS: row for row in sorted(own, key=lambda row: row.tokens_per_second)
        }
        if len(best) == 2:
            ours, peer = best[True], best[False]
            made.append(
                {
                    "phase": phase,
                    "isa": isa,
                    "ours": f"{ours.type}, {ours.threads} threads",
                    "peer": f"{peer.engine} {peer.type}, {peer.threads} threads",
                    "ratio": ours.tokens_per_second / peer.tokens_per_second,
                }
            )
    return made


def line_of(row: Row) -> str:
    """Return the median tokens/s of a row, with its slowest and fastest round in brackets."""
    rates = [row.tokens_per_second * statistics.median(row.seconds) / s for s in row.seconds]
    return (
        f"{row.phase} {row.tokens}, {row.threads} threads: {row.tokens_per_second:6.1f} tokens/s "
        f"[{min(rates):.1f} to {max(rates):.1f}]  {row.engine} {row.type} ({row.isa})"
    )


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen2.5-1.5b", help="preset or published shape")
    parser.add_argument(
        "--scale-group", type=int, default=0, help="weights that share a scale; 0 for one a matrix"
    )
    parser.add_argument("--pattern", default="8:8", help="n:m of the random weights; 8:8 is dense")
    cores = available_cores()
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, cores}))
    parser.add_argument("--isa", nargs="+", default=["", "avx2"], help='our engine; "": the best')
    parser.add_argument("--weight-format", nargs="+", default=["auto"], help="for our engine")
    parser.add_argument("--type", nargs="*", default=["tq2_0", "tq1_0"], help="for llama.cpp")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--steps", type=int, default=32, help="tokens decoded")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3600, help="start no round after this")
    parser.add_argument("--llama-bench", type=Path, action="append", default=[])
    parser.add_argument("--gguf", action="append", default=[], help=f"a file, or {'/'.join(TYPES)}")
    parser.add_argument("--llama-bench-args", action="append", default=[])
    parser.add_argument(
        "--built-for", action="append", default=[], help="instruction set of each --llama-bench"
    )
    parser.add_argument(
        "--models", type=Path, help="folder to keep models in; default: a temporary one"
    )
    parser.add_argument("--out", type=Path, help="JSON lines; default: in benchmarks/results/")
    options = parser.parse_args(arguments)
    if len(options.gguf) != len(options.llama_bench):
        parser.error("give one --gguf FILE for each --llama-bench PATH")
    if options.type and importlib.util.find_spec("llama_cpp") is None:
        parser.error(f"llama.cpp is absent: {install('llama-cpp')}, or give --type (none)")
    return options


def run(options: argparse.Namespace, console: Console, read_bytes: int = READ_BYTES) -> None:
    pattern = NMPattern.parse(options.pattern)
    stored = {"cache": options.models, "scale_group": options.scale_group}
    folder = exported = cached_random_model(options.model, pattern, **stored)
    if options.model in ROTATIONS:  # which other engines do not know
        exported = cached_random_model(options.model, pattern, **stored, rotated=False)
    before = processor_seconds()
    with ExitStack() as stack, Progress(console) as progress:
        engines = engines_of(folder, exported, options, stack)
        isas = sorted({engine.isa for engine in engines if engine.name == OURS})
        meters = [RooflineMeter(threads, isas, read_bytes) for threads in options.threads]
        seconds = measure_all(engines, options, meters, progress)
    others = others_share(before)
    rows = rows_of(engines, seconds, options)
    for row in rows:
        console.print(line_of(row), markup=False, soft_wrap=True)
    for ratio in ratios(rows):
        console.print(
            "{phase}, {isa}: {ours} is {ratio:.2f}x {peer}".format(**ratio), soft_wrap=True
        )
    rooflines = [meter.result(isa) for meter in meters for isa in isas]
    for roofline in rooflines:
        console.print(
            f"{roofline['threads']} threads, {roofline['isa']}: memory "
            f"{roofline['read_bytes_per_second'] / 1e9:.1f} GB/s, int8 "
            f"{roofline['int8_ops_per_second'] / 1e12:.2f} TOP/s"
        )
    if others is not None:
        console.print(f"other processes used {others:.0%} of the processors")
    shared = {"model": options.model, "pattern": str(pattern)}
    shared |= {"scale_group": options.scale_group} if options.scale_group else {}
    records = [{**shared, **asdict(row)} for row in rows]
    records += [{**shared, "roofline": roofline} for roofline in rooflines]
    out = record("peers", records, options.out, others_share=others)
    console.print(f"written to {out}")


def main() -> None:
    options = parse_arguments()
    try:
        run(options, Console())
    except UserError as error:
        sys.exit(f"peers.py: {error}")


if __name__ == "__main__":
    main()
