"""Decode steps of a batch as CUDA graphs over a fixed cache: Table 3, lower half."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from sparse_bitnet.bench.gpu_models import (
    bench_device,
    choices,
    dense_model,
    set_policy_,
    ternary_model,
)
from sparse_bitnet.bench.gpu_options import PAPER_DECODE, GpuBenchOptions
from sparse_bitnet.bench.gpu_record import SpeedRow, rows_of
from sparse_bitnet.bench.gpu_timing import give_back_memory, medians, those_that_fit
from sparse_bitnet.engine.gpu.attention import FixedCache
from sparse_bitnet.engine.gpu.decode import GraphDecoder
from sparse_bitnet.engine.gpu.linear import RoutePolicy


def run(options: GpuBenchOptions) -> list[SpeedRow]:
    """One row a batch and variant; every step attends to `context` tokens."""
    device = bench_device(options)
    ternary, dense = ternary_model(options, device), dense_model(options, device)
    table = choices(options, ternary, device)
    policies = {
        "int8": RoutePolicy(always="dense"),
        "sparse": RoutePolicy(always="sparse"),
        "packed": RoutePolicy(always="packed", packed_format=options.packed_format),
        "chosen": RoutePolicy(table=table, packed_format=options.packed_format),
    }
    rows: list[SpeedRow] = []
    for batch in options.batch or PAPER_DECODE:
        ids = torch.randint(0, dense.config.vocab_size, (batch,), device=device)
        caches: list[FixedCache] = []

        def make(name: str, ids: Any = ids, caches: Any = caches) -> Callable[[], object]:
            if name != "bf16":
                set_policy_(ternary, policies[name])
            if options.compile:
                # Each variant is a graph of its own; together they would pass the limit.
                torch.compiler.reset()
            # One cache serves all: what it holds does not change the time.
            decoder = GraphDecoder(
                dense if name == "bf16" else ternary,
                len(ids),
                options.context + 1,
                compile=options.compile,
                cache=caches[0] if caches else None,
            )
            caches[:] = [decoder.cache]
            # Its first call records the graph, with the products of this policy.
            return _Step(decoder, ids, options.context)

        makers = {name: functools.partial(make, name) for name in ("bf16", *policies)}
        steps, lacking = those_that_fit(makers, device)
        found = medians(steps, device, options.rounds)
        rows += rows_of("decode", batch, batch, found, lacking)
        del steps, caches, make, makers
        give_back_memory(device)
    return rows


class _Step:
    """The step behind `context` tokens, again and again at the same place."""

    def __init__(self, decoder: GraphDecoder, tokens: torch.Tensor, context: int) -> None:
        self._decoder, self._tokens, self._context = decoder, tokens, context

    def __call__(self) -> None:
        self._decoder.set_length_(self._context)
        self._decoder.step(self._tokens)
