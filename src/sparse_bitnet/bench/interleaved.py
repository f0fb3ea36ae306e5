# SPDX-License-Identifier: Apache-2.0
"""One run of `sparse-bitnet bench`: every engine in a child process, all measured in turn.

Rounds go over all measurements and, in another order each time, over all engines; medians of the rounds
are reported. So a neighbour that takes the machine for a moment disturbs one value of each, not one
engine's only. The roofline is measured in every round too.
"""

import copy
import itertools
import random
import statistics
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparse_bitnet.bench.child import Child
from sparse_bitnet.bench.contention import Contention
from sparse_bitnet.bench.model import cache_tokens
from sparse_bitnet.bench.model_shapes import PUBLISHED
from sparse_bitnet.bench.options import BenchOptions
from sparse_bitnet.bench.random_model import cached_random_model
from sparse_bitnet.bench.record import BenchRow
from sparse_bitnet.bench.roofline import READ_BYTES, RooflineMeter
from sparse_bitnet.checkpoint.model_folder import read_json
from sparse_bitnet.checkpoint.open_checkpoint import open_checkpoint
from sparse_bitnet.engine.architecture import read_architecture
from sparse_bitnet.errors import refuse_unused
from sparse_bitnet.pattern import NMPattern
from sparse_bitnet.presets import PRESETS

CHILD = ("-m", "sparse_bitnet.bench.model")

OnProgress = Callable[[str, float], None]
"""Called with what is being done and the share of the run that is done."""


@dataclass(kw_only=True)
class _Variant:
    """One engine in its process."""

    child: Child
    pattern: str
    threads: int
    loaded: dict[str, Any]


@dataclass(frozen=True)
class _Measurement:
    phase: str
    tokens: int
    batch: int


def run(
    options: BenchOptions,
    progress: OnProgress | None = None,
    *,
    child: tuple[str, ...] = CHILD,
    read_bytes: int = READ_BYTES,
) -> list[BenchRow]:
    """Measure everything that `options` ask for.

    Args:
        options: see `BenchOptions`.
        progress: see `OnProgress`.
        child: Python's arguments for the measured process.
        read_bytes: memory that the roofline's measurement reads.

    Raises `UserError` for a model that is neither a preset nor a packed folder, and for whatever the
    engine refuses.
    """
    report = progress or (lambda what, share: None)
    report("preparing the model", 0.0)
    models = _models(options)
    options = _within_positions(options, models.values())
    measurements = _measurements(options)
    with ExitStack() as stack:
        variants = []
        for (pattern, folder), threads, name, isa in itertools.product(
            models.items(), options.threads, options.weight_format, options.isa
        ):
            report(f"loading {pattern}, {name}, {threads} threads", 0.0)
            process = stack.enter_context(Child(child))
            loaded = process.ask(
                {
                    "op": "load",
                    "folder": str(folder),
                    "options": {
                        **_engine_options(options),
                        "threads": threads,
                        "weight_format": name,
                        "isa": isa,
                    },
                }
            )
            variants.append(
                _Variant(child=process, pattern=pattern, threads=threads, loaded=loaded)
            )
        isas = sorted({variant.loaded["isa"] for variant in variants})
        meters = {count: RooflineMeter(count, isas, read_bytes) for count in options.threads}
        contention = Contention(variant.child.pid for variant in variants)
        answers = _rounds(options, variants, measurements, meters, report)
        others = contention.others_share()
        return [
            _row(options, variant, measurement, answers[index, measurement], meters, others)
            for measurement in measurements
            for index, variant in enumerate(variants)
        ]


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


def _engine_options(options: BenchOptions) -> dict[str, Any]:
    longest = max(*options.prefill, *(context + options.steps for context in options.contexts))
    return {
        "head": options.head,
        "kv_cache": options.kv_cache,
        "context_length": longest,
        "cache_tokens": cache_tokens(
            options.prefill, options.contexts, options.batches, options.steps
        ),
    }


def _measurements(options: BenchOptions) -> list[_Measurement]:
    """Small batches first: memory is reported as it is after each."""
    found = [_Measurement("prefill", tokens, 1) for tokens in sorted(set(options.prefill))]
    return found + [
        _Measurement("decode", context, batch)
        for batch in sorted(set(options.batches))
        for context in sorted(set(options.contexts))
    ]


def _rounds(
    options: BenchOptions,
    variants: list[_Variant],
    measurements: list[_Measurement],
    meters: dict[int, RooflineMeter],
    report: OnProgress,
) -> dict[tuple[int, _Measurement], list[dict[str, Any]]]:
    answers: dict[tuple[int, _Measurement], list[dict[str, Any]]] = {
        (index, measurement): [] for index in range(len(variants)) for measurement in measurements
    }
    order, shuffle = list(range(len(variants))), random.Random(0).shuffle
    for turn in range(options.rounds):
        for place, measurement in enumerate(measurements):
            done = (turn * len(measurements) + place) / (options.rounds * len(measurements))
            report(f"round {turn + 1}: {measurement.phase} {measurement.tokens}", done)
            shuffle(order)
            for index in order:
                question = {
                    "op": measurement.phase,
                    "tokens": measurement.tokens,
                    "context": measurement.tokens,
                    "batch": measurement.batch,
                    "steps": options.steps,
                }
                answers[index, measurement].append(variants[index].child.ask(question))
        for meter in meters.values():
            meter.visit()
    return answers


def _row(
    options: BenchOptions,
    variant: _Variant,
    measurement: _Measurement,
    answers: list[dict[str, Any]],
    meters: dict[int, RooflineMeter],
    others_share: float | None,
) -> BenchRow:
    times = [answer["seconds"] for answer in answers]
    seconds = statistics.median(times)
    loaded = variant.loaded
    roofline = meters[variant.threads].result(loaded["isa"])
    decodes = measurement.phase == "decode"
    computed = measurement.batch if decodes else measurement.tokens
    step_bytes = None
    if decodes:
        # The sequences share their context, and what each adds grows from nothing to `steps`.
        cached = measurement.tokens + measurement.batch * options.steps / 2
        step_bytes = loaded["weight_bytes"] + cached * loaded["cache_token_bytes"]
    # Of the blocks, a multiply-add being two; attention and head are not counted.
    operations = 2 * loaded["block_weights"] * computed
    return BenchRow(
        model=options.model,
        pattern=variant.pattern,
        weight_format=loaded["weight_format"],
        head=loaded["head"],
        kv_cache=options.kv_cache,
        isa=loaded["isa"],
        threads=variant.threads,
        phase=measurement.phase,
        tokens=measurement.tokens,
        batch=measurement.batch,
        seconds=seconds,
        spread=max(times) / min(times) - 1,
        rounds=len(times),
        tokens_per_second=computed / seconds,
        step_bytes=step_bytes,
        memory_share=step_bytes and step_bytes / seconds / roofline.read_bytes_per_second,
        int8_share=operations / seconds / roofline.int8_ops_per_second,
        read_bytes_per_second=roofline.read_bytes_per_second,
        int8_ops_per_second=roofline.int8_ops_per_second,
        load_seconds=loaded["load_seconds"],
        resident_bytes=answers[-1]["resident_bytes"],
        others_share=others_share,
    )
