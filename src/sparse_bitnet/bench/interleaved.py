# SPDX-License-Identifier: Apache-2.0
"""One run of `sparse-bitnet bench`: every engine in a child process, all measured in turn.

Medians of the rounds are reported, and the roofline is measured in every round too.
"""

import copy
import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_bitnet.bench.child import OURS, Child, cache_tokens
from sparse_bitnet.bench.machine import READ_BYTES, Contention, RooflineMeter, turns
from sparse_bitnet.bench.options import BenchOptions
from sparse_bitnet.bench.random_model import PUBLISHED, cached_random_model
from sparse_bitnet.checkpoint.model_folder import read_json
from sparse_bitnet.checkpoint.open_checkpoint import open_checkpoint
from sparse_bitnet.engine.architecture import read_architecture
from sparse_bitnet.errors import refuse_unused
from sparse_bitnet.pattern import NMPattern
from sparse_bitnet.presets import PRESETS

if TYPE_CHECKING:
    from rich.table import Table

Row = dict[str, Any]
"""One measurement of one engine, see `_row`."""


@dataclass(kw_only=True)
class _Job:
    """A measurement of an engine in its process, and its answers by round."""

    child: Child
    loaded: dict[str, Any]
    pattern: str
    threads: int
    phase: str
    tokens: int
    batch: int
    steps: int
    answers: list[dict[str, Any]] = field(default_factory=list)

    def __call__(self) -> None:
        question = {"op": self.phase, "tokens": self.tokens, "context": self.tokens}
        self.answers.append(self.child.ask({**question, "batch": self.batch, "steps": self.steps}))


def run(
    options: BenchOptions,
    report: Callable[[str, float], None] = lambda what, share: None,
    *,
    child: tuple[str, ...] = OURS,
    read_bytes: int = READ_BYTES,
) -> list[Row]:
    """Measure everything that `options` ask for.

    Args:
        options: see `BenchOptions`.
        report: called with what is being done and the share of the run that is done.
        child: Python's arguments for the measured process.
        read_bytes: memory that the roofline's measurement reads.

    Raises `UserError` for a model that is neither a preset nor a packed folder, and for whatever the
    engine refuses.
    """
    report("preparing the model", 0.0)
    models = _models(options)
    options = _within_positions(options, models.values())
    # Small batches first: memory is reported as it is after each.
    measured = [("prefill", tokens, 1) for tokens in sorted(set(options.prefill))]
    batches, contexts = sorted(set(options.batches)), sorted(set(options.contexts))
    measured += [("decode", context, batch) for batch in batches for context in contexts]
    shared = {
        "head": options.head,
        "kv_cache": options.kv_cache,
        "context_length": max(*options.prefill, *(n + options.steps for n in contexts)),
        "cache_tokens": cache_tokens(options.prefill, contexts, batches, options.steps),
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
            make = partial(_Job, child=process, loaded=loaded, pattern=pattern, threads=threads)
            for group, (phase, tokens, batch) in zip(groups, measured, strict=True):
                job = make(phase=phase, tokens=tokens, batch=batch, steps=options.steps)
                group.append(job)
        isas = sorted({job.loaded["isa"] for job in groups[0]})
        meters = {count: RooflineMeter(count, isas, read_bytes) for count in options.threads}
        visits = [meter.visit for meter in meters.values()]
        contention = Contention(job.child.pid for job in groups[0])
        jobs: list[Sequence[Callable[[], None]]] = [*groups, visits]
        total = options.rounds * (sum(map(len, groups)) + len(visits))
        for done, (turn, call) in enumerate(turns(jobs, options.rounds)):
            what = f"{call.phase} {call.tokens}" if isinstance(call, _Job) else "roofline"
            report(f"round {turn + 1}: {what}", done / total)
            call()
        others = contention.others_share()
    return [_row(options, job, meters[job.threads], others) for group in groups for job in group]


def _models(options: BenchOptions) -> dict[str, Path]:
    """Folders by pattern."""
    if options.model not in PRESETS and options.model not in PUBLISHED:
        folder = Path(options.model)
        packed = open_checkpoint(folder, "packed")
        of_random = ("pattern", "scale_group", "embeddings", "models")
        refuse_unused(options, of_random, f"{folder} has weights of its own")
        return {str(packed.format.pattern): folder}
    parsed = {text: NMPattern.parse(text.removesuffix(" binary")) for text in options.pattern}
    return {
        text: cached_random_model(
            options.model,
            pattern,
            cache=options.models,
            packed_format="nm-sign" if text.endswith(" binary") else "i2",
            embeddings=options.embeddings,
            scale_group=options.scale_group,
        )
        for text, pattern in parsed.items()
    }


def _within_positions(options: BenchOptions, folders: Iterable[Path]) -> BenchOptions:
    """Prompts and contexts cut to what the models were made for."""
    most = min(read_architecture(read_json(f / "config.json"), str(f)).positions for f in folders)
    within = copy.copy(options)  # not `replace`, which would ask --quick again
    within.prefill = [min(tokens, most) for tokens in options.prefill]
    within.contexts = [max(0, min(tokens, most - options.steps)) for tokens in options.contexts]
    return within


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
        cached = job.tokens + job.batch * job.steps / 2
        step_bytes = loaded["weight_bytes"] + cached * loaded["cache_token_bytes"]
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
        "resident_bytes": job.answers[-1]["resident_bytes"],  # of the engine's whole process
        "others_share": others_share,  # of the processors' time, during the run
    }


def table(rows: list[Row]) -> "Table":
    """Tokens a second and shares of the roofline: a line a measurement of an engine."""
    from rich import box
    from rich.table import Table

    first = rows[0]
    shown = Table(
        title=f"{first['model']} {first['pattern']}, kv-cache {first['kv_cache']}",
        caption=f"Medians of {first['rounds']} rounds. Spread: slowest over fastest. Share: of the "
        "roofline, measured too. MB: resident. A batch shares its context.",
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
                what = f"  decode behind {row['tokens']}, batch {row['batch']}"
            share, limit = row["int8_share"], f"{row['int8_ops_per_second'] / 1e12:.2f} TOP/s"
            if (row["memory_share"] or 0.0) > share:
                share, limit = row["memory_share"], f"{row['read_bytes_per_second'] / 1e9:.1f} GB/s"
            resident = (
                "-" if row["resident_bytes"] is None else f"{row['resident_bytes'] / 1e6:.0f}"
            )
            speed = f"{row['tokens_per_second']:.1f}"
            shown.add_row(what, speed, f"{row['spread']:.0%}", f"{share:.0%} of {limit}", resident)
    return shown
