"""Prefill of one sequence through all layers, attention and cache included: Table 3, upper half."""

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
from sparse_bitnet.bench.gpu_options import PAPER_PREFILL, GpuBenchOptions
from sparse_bitnet.bench.gpu_record import SpeedRow, rows_of
from sparse_bitnet.bench.gpu_timing import give_back_memory, medians, recorded, those_that_fit
from sparse_bitnet.engine.gpu.decode import GraphDecoder
from sparse_bitnet.engine.gpu.linear import RoutePolicy

RECORDED_TOKENS = 8192
"""Prompts up to here run as CUDA graphs: of short ones launching takes longer than computing. Of longer
ones it does not, and each graph would hold its own memory."""


def run(options: GpuBenchOptions) -> list[SpeedRow]:
    """One row a prompt length and variant."""
    device = bench_device(options)
    ternary, dense = ternary_model(options, device), dense_model(options, device)
    table = choices(options, ternary, device)
    policies = {
        "int8": RoutePolicy(always="dense"),
        "sparse": RoutePolicy(always="sparse"),
        "chosen": RoutePolicy(table=table, packed_format=options.packed_format),
    }
    rows: list[SpeedRow] = []
    for tokens in options.tokens or PAPER_PREFILL:
        ids = torch.randint(0, dense.config.vocab_size, (1, tokens), device=device)
        decoders: dict[bool, GraphDecoder] = {}

        def prefill(name: str, decoders: Any = decoders, ids: Any = ids) -> None:
            is_dense = name == "bf16"
            if not is_dense:
                set_policy_(ternary, policies[name])
            if is_dense not in decoders:
                decoders[is_dense] = GraphDecoder(dense if is_dense else ternary, 1, ids.shape[1])
            decoders[is_dense].prefill(ids)

        def make(name: str, prefill: Any = prefill, tokens: int = tokens) -> Callable[[], object]:
            function = functools.partial(prefill, name)
            return recorded(function, device) if tokens <= RECORDED_TOKENS else function

        makers = {name: functools.partial(make, name) for name in ("bf16", *policies)}
        functions, lacking = those_that_fit(makers, device)
        found = medians(functions, device, options.rounds)
        rows += rows_of("prefill", tokens, tokens, found, lacking)
        del functions, decoders, prefill, make, makers
        give_back_memory(device)
    return rows
