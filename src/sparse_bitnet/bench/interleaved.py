# SPDX-License-Identifier: Apache-2.0
"""One run of `sparse-bitnet bench`: every engine in a child process, all measured in turn.

Medians of the rounds are reported. Every round also measures the roofline of the machine
(csrc/roofline.h). Decode reads every weight once per step, so memory bounds it; prefill multiplies every
weight by every token, so the int8 multiply-adds of the instruction set bound it.
"""

import itertools
import os
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rich import box
from rich.table import Table

from sparse_bitnet.bench.child import OURS, Child, cache_tokens
from sparse_bitnet.bench.options import BenchOptions
from sparse_bitnet.bench.random_model import PUBLISHED, ROTATIONS, cached_random_model
from sparse_bitnet.checkpoint.model_folder import read_json
from sparse_bitnet.checkpoint.open_checkpoint import open_checkpoint
from sparse_bitnet.engine.architecture import read_architecture
from sparse_bitnet.errors import UserError, refuse_unused
from sparse_bitnet.pattern import NMPattern
from sparse_bitnet.presets import PRESETS

READ_BYTES = 512 << 20
"""Bytes to read in the roofline's measurement: more than any cache holds."""

_READS = ((1, 0), (1, 512), (8, 0), (8, 2048), (8, 4096))
"""Streams, and distances of the software prefetch, that are tried; 0 leaves it to the hardware."""

_LOOP_SECONDS = 0.02

Row = dict[str, Any]
"""One measurement of one engine, see `_row`."""

T = TypeVar("T")


def turns(groups: Iterable[Sequence[T]], rounds: int) -> Iterator[tuple[int, T]]:
    """Yield (round, job) for every job of every round: groups in order, their jobs in another order each
    round.

    A short disturbance by another process thus affects one value of each job, not all values of one job.
    """
    shuffle, orders = random.Random(0).shuffle, [list(group) for group in groups]
    for turn in range(rounds):
        for jobs in orders:
            shuffle(jobs)
            for job in jobs:
                yield turn, job


class RooflineMeter:
    """Measures the roofline of one thread count, a little at a time, between other measurements."""

    def __init__(self, threads: int, isas: Sequence[str], read_bytes: int = READ_BYTES) -> None:
        """`isas`: instruction sets, by csrc/matmul.h's names."""
        from sparse_bitnet import _cpu

        self.threads = threads
        self._meter = _cpu.Roofline(threads, read_bytes)
        self._reads: dict[tuple[int, int], list[float]] = {read: [] for read in _READS}
        self._int8: dict[str, list[float]] = {isa: [] for isa in isas}

    def visit(self) -> None:
        """Measure everything once; takes one or two tenths of a second."""
        for read, rates in self._reads.items():
            rates.append(self._meter.read_rate(*read))
        for isa, rates in self._int8.items():
            rates.append(self._meter.int8_rate(isa, _LOOP_SECONDS))

    def result(self, isa: str) -> dict[str, Any]:
        """Return medians over the visits, like those of what is compared with them; a multiply-add counts
        as two operations."""
        return {
            "threads": self.threads,
            "isa": isa,
            # The best of _READS.
            "read_bytes_per_second": max(map(statistics.median, self._reads.values())),
            "int8_ops_per_second": statistics.median(self._int8[isa]),
        }


def processor_seconds() -> tuple[float, float, float] | None:
    """Return seconds of all processors since boot, the busy ones, and those of this process and its
    ended children. None without /proc/stat."""
    try:
        line = Path("/proc/stat").read_text().split("\n")[0]
    except OSError:
        return None
    seconds = [int(ticks) / os.sysconf("SC_CLK_TCK") for ticks in line.split()[1:9]]
    idle = seconds[3] + seconds[4]  # the second is waiting for a disk
    return sum(seconds), sum(seconds) - idle, sum(os.times()[:4])


def others_share(before: tuple[float, float, float] | None) -> float | None:
    """Return the share of all processor time that other processes have used since `before`, the result
    of `processor_seconds` before our children started; they must have ended. None if unknown."""
    now = processor_seconds()
    if now is None or before is None:
        return None
    total, busy, ours = (end - start for end, start in zip(now, before, strict=True))
    # The three are read one after another and rounded to ticks: sums may exceed the total.
    return min(1.0, max(0.0, busy - ours) / total) if total > 0 else None


@dataclass
class _Job:
    """A measurement of one engine in its child process, and its results by round."""

    child: Child
    loaded: dict[str, Any]
    pattern: str
    threads: int
    phase: str
    tokens: int
    batch: int
    answers: list[dict[str, Any]] = field(default_factory=list)


def run(
    options: BenchOptions,
    report: Callable[[str, float], None] = lambda what, share: None,
    *,
    child: tuple[str, ...] = OURS,
    read_bytes: int = READ_BYTES,
) -> list[Row]:
    """Measure everything that `options` request.

    Args:
        report: called with a description of the current work and the share of the run that is done.
        child: Python's arguments for the measured process.
        read_bytes: number of bytes that the roofline's measurement reads.

    Returns one row per measurement. Raises `UserError` for a model that is neither a preset nor a packed
    folder, and for errors of the engine.
    """
    report("preparing the model", 0.0)
    before, models = processor_seconds(), _models(options)
    sizes = [read_architecture(read_json(f / "config.json"), str(f)) for f in models.values()]
    most = min(size.positions for size in sizes)
    if options.steps > most:
        raise UserError(f"--steps {options.steps}: the model was made for {most} tokens at most")
    prefills = sorted({min(tokens, most) for tokens in options.prefill})
    contexts = sorted({max(0, min(tokens, most - options.steps)) for tokens in options.contexts})
    # Small batches first: memory is reported as it is after each.
    measured, batches = [("prefill", tokens, 1) for tokens in prefills], sorted({*options.batches})
    measured += [("decode", context, batch) for batch in batches for context in contexts]
    # Recurrent states may take as much memory as the cache; one is below 4,096 tokens of it.
    states = (max(batches, default=1) + len(contexts) + 2) * any(size.delta_net for size in sizes)
    shared = {
        "head": options.head,
        "kv_cache": options.kv_cache,
        "context_length": max(*prefills, *(tokens + options.steps for tokens in contexts)),
        "cache_tokens": cache_tokens(prefills, contexts, batches, options.steps) + 4096 * states,
    }
    groups: list[list[_Job]] = [[] for _ in measured]
    with ExitStack() as stack:
        for (pattern, folder), threads, name, isa in itertools.product(
            models.items(), options.threads, options.weight_format, options.isa
        ):
            report(f"loading {pattern}, {name}, {threads} threads", 0.0)
            process = stack.enter_context(Child(child))
            asked = {"threads": threads, "weight_format": name, "isa": isa, **shared}
            loaded = process.ask({"op": "load", "folder": str(folder), "options": asked})
            for group, (phase, tokens, batch) in zip(groups, measured, strict=True):
                group.append(_Job(process, loaded, pattern, threads, phase, tokens, batch))
        isas = sorted({job.loaded["isa"] for job in groups[0]})
        meters = {count: RooflineMeter(count, isas, read_bytes) for count in options.threads}
        jobs: list[Sequence[_Job | RooflineMeter]] = [*groups, [*meters.values()]]
        total = options.rounds * sum(map(len, jobs))
        for done, (turn, job) in enumerate(turns(jobs, options.rounds)):
            if isinstance(job, RooflineMeter):
                report(f"round {turn + 1}: roofline", done / total)
                job.visit()
                continue
            report(f"round {turn + 1}: {job.phase} {job.tokens}", done / total)
            question = {"op": job.phase, "tokens": job.tokens, "context": job.tokens}
            question |= {"batch": job.batch, "steps": options.steps}
            job.answers.append(job.child.ask(question))
    others = others_share(before)
    return [_row(options, job, meters[job.threads], others) for group in groups for job in group]


def _models(options: BenchOptions) -> dict[str, Path]:
    """Return the folders by pattern."""
    if options.model not in PRESETS and options.model not in PUBLISHED:
        folder = Path(options.model)
        if "/" not in options.model and not folder.exists():
            names = ", ".join([*PRESETS, *PUBLISHED])
            raise UserError(f"{options.model!r} is neither a packed folder nor one of {names}")
        packed = open_checkpoint(folder, "packed")
        refuse_unused(options, ["pattern"], f"{folder} has weights of its own")
        return {str(packed.format.pattern): folder}
    if options.model in ROTATIONS and options.pattern != ("8:8",):
        refuse_unused(options, ["pattern"], f"{options.model} is dense")
    return {
        text: cached_random_model(
            options.model,
            NMPattern.parse(text.removesuffix(" binary")),
            packed_format="nm-sign" if text.endswith(" binary") else "i2",
        )
        for text in options.pattern or ("8:8" if options.model in ROTATIONS else "6:8",)
    }


def _row(options: BenchOptions, job: _Job, meter: RooflineMeter, others_share: float | None) -> Row:
    """Return the result row of a job: its measurements, and its speed as a share of the roofline."""
    loaded, times = job.loaded, [answer["seconds"] for answer in job.answers]
    seconds = statistics.median(times)  # of a prompt or of a step
    roofline = meter.result(loaded["isa"])
    decodes = job.phase == "decode"
    computed = job.batch if decodes else job.tokens
    step_bytes = None  # read by a decode step
    if decodes:
        # The sequences share their context, and what each adds grows from nothing to `steps`.
        cached = job.tokens + job.batch * options.steps / 2
        step_bytes = loaded["weight_bytes"] + cached * loaded["cache_token_bytes"]
        step_bytes += job.batch * loaded["state_bytes"]
    # Of the blocks, a multiply-add being two; attention and head are not counted.
    operations = 2 * loaded["block_weights"] * computed
    return {
        "model": options.model,
        "pattern": job.pattern,
        "weight_format": loaded["weight_format"],
        "head": loaded["head"],
        "kv_cache": options.kv_cache,
        "isa": loaded["isa"],
        "threads": job.threads,
        "phase": job.phase,
        "tokens": job.tokens,  # of the prompt, or of the context that a batch shares
        "batch": job.batch,
        "seconds": seconds,
        "spread": max(times) / min(times) - 1,
        "rounds": len(times),
        "tokens_per_second": computed / seconds,  # of all sequences together
        "step_bytes": step_bytes,
        "memory_share": step_bytes and step_bytes / seconds / roofline["read_bytes_per_second"],
        "int8_share": operations / seconds / roofline["int8_ops_per_second"],
        "read_bytes_per_second": roofline["read_bytes_per_second"],
        "int8_ops_per_second": roofline["int8_ops_per_second"],
        "load_seconds": loaded["load_seconds"],
        "resident_bytes": job.answers[0]["resident_bytes"],  # of the engine's whole process
        "others_share": others_share,  # of the processors' time, during the run
    }


def table(rows: list[Row]) -> Table:
    """Return tokens per second and shares of the roofline: one line per measurement."""
    first = rows[0]
    shown = Table(
        title=f"{first['model']} {first['pattern']}, kv-cache {first['kv_cache']}",
        caption=f"Medians; rounds: {first['rounds']}. Spread: slowest round over fastest. Share: of the "
        "machine's limit, measured too. MB: resident memory. A batch shares one context.",
        box=box.SIMPLE_HEAD,
    )
    shown.add_column("weights, head")
    for name in ("tokens/s", "spread", "share", "MB"):
        shown.add_column(name, justify="right", no_wrap=True)
    engines: dict[str, list[Row]] = {}
    for row in rows:
        threads = f"{row['threads']} thread{'s' * (row['threads'] > 1)}"
        engine = f"{row['weight_format']}, {row['head']}, {threads}, {row['isa']}"
        engines.setdefault(engine, []).append(row)
    for engine, own in engines.items():
        shown.add_section()
        shown.add_row(engine)
        for row in own:
            what = f"  prefill {row['tokens']}"
            if row["phase"] == "decode":
                what = f"  decode, context {row['tokens']}, batch {row['batch']}"
            share, limit = row["int8_share"], f"{row['int8_ops_per_second'] / 1e12:.2f} TOP/s"
            if (row["memory_share"] or 0.0) > share:
                share, limit = row["memory_share"], f"{row['read_bytes_per_second'] / 1e9:.1f} GB/s"
            memory, speed = row["resident_bytes"], f"{row['tokens_per_second']:.1f}"
            resident = "-" if memory is None else f"{memory / 1e6:.0f}"
            shown.add_row(what, speed, f"{row['spread']:.0%}", f"{share:.0%} of {limit}", resident)
    return shown
