"""Decode steps of a batch as CUDA graphs over a fixed cache: Table 3, lower half."""

import torch

from sparse_bitnet.bench.gpu_models import (
    bench_device,
    choices,
    dense_model,
    set_policy_,
    ternary_model,
)
from sparse_bitnet.bench.gpu_options import PAPER_DECODE, GpuBenchOptions
from sparse_bitnet.bench.gpu_record import SpeedRow
from sparse_bitnet.bench.gpu_timing import medians
from sparse_bitnet.inference.gpu.decode import GraphDecoder
from sparse_bitnet.inference.gpu.linear import RoutePolicy


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
        steps: dict[str, _Step] = {}
        cache = None
        for name in ("bf16", *policies):
            if name != "bf16":
                set_policy_(ternary, policies[name])
            model = dense if name == "bf16" else ternary
            if options.compile:
                # Each variant is a graph of its own; together they would pass the limit.
                torch.compiler.reset()
            decoder = GraphDecoder(
                model, batch, options.context + 1, compile=options.compile, cache=cache
            )
            # One cache serves all: what it holds does not change the time.
            cache = decoder.cache
            steps[name] = _Step(decoder, ids, options.context)
            # The first step records the graph, with the products of this policy.
            steps[name]()
        for name, (seconds, spread) in medians(steps, device, options.rounds).items():
            rows.append(
                SpeedRow(
                    phase="decode",
                    variant=name,
                    size=batch,
                    seconds=seconds,
                    spread=spread,
                    tokens_per_second=batch / seconds,
                )
            )
        del steps
    return rows


class _Step:
    """The step behind `context` tokens, again and again at the same place."""

    def __init__(self, decoder: GraphDecoder, tokens: torch.Tensor, context: int) -> None:
        self._decoder, self._tokens, self._context = decoder, tokens, context

    def __call__(self) -> None:
        self._decoder.set_length_(self._context)
        self._decoder.step(self._tokens)
