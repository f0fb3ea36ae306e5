"""Prefill of one sequence through all layers, attention and cache included: Table 3, upper half."""

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
from sparse_bitnet.bench.gpu_record import SpeedRow
from sparse_bitnet.bench.gpu_timing import medians
from sparse_bitnet.inference.gpu.decode import GraphDecoder
from sparse_bitnet.inference.gpu.linear import RoutePolicy


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
        decoders = {
            "bf16": GraphDecoder(dense, 1, tokens),
            "int8": GraphDecoder(ternary, 1, tokens),
        }

        def prefill(name: str, decoders: Any = decoders, ids: Any = ids) -> None:
            if name != "bf16":
                set_policy_(ternary, policies[name])
            decoders["bf16" if name == "bf16" else "int8"].prefill(ids)

        functions = {name: lambda name=name: prefill(name) for name in ("bf16", *policies)}
        for name, (seconds, spread) in medians(functions, device, options.rounds).items():
            rows.append(
                SpeedRow(
                    phase="prefill",
                    variant=name,
                    size=tokens,
                    seconds=seconds,
                    spread=spread,
                    tokens_per_second=tokens / seconds,
                )
            )
        del decoders
    return rows
