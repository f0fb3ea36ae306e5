# SPDX-License-Identifier: Apache-2.0
"""The paper's Table 3: prefill of one sequence through all layers, attention and cache included, and
decode steps of a batch as CUDA graphs over a fixed cache."""

import functools
from collections.abc import Callable, Iterator, Sequence

import torch

from sparse_bitnet.bench.gpu_models import bench_device, dense_model, ternary_model
from sparse_bitnet.bench.gpu_options import PAPER_DECODE, PAPER_PREFILL, GpuBenchOptions
from sparse_bitnet.bench.gpu_record import GpuRow, rows_of
from sparse_bitnet.bench.gpu_timing import give_back_memory, measured
from sparse_bitnet.engine.gpu.decode import SlotDecoder, recorded
from sparse_bitnet.engine.gpu.linear import RoutePolicy
from sparse_bitnet.engine.gpu.measure import measured_table, set_policy_

RECORDED_TOKENS = 8192
"""Prompts up to here run as CUDA graphs: of short ones launching takes longer than computing. Of longer
ones it does not, and each graph would hold its own memory."""


def run(options: GpuBenchOptions, phase: str) -> Iterator[GpuRow]:
    """One row a prompt length ("prefill") or batch ("decode") and variant. Every step of decoding attends
    to `context` tokens."""
    device = bench_device(options)
    ternary, dense = ternary_model(options, device), dense_model(options, device)
    policies = {
        "bf16": None,
        "int8": RoutePolicy(always="dense"),
        "sparse": RoutePolicy(always="sparse"),
        "packed": RoutePolicy(always="packed"),
        "chosen": RoutePolicy(table=measured_table(ternary)),
    }
    sizes: Sequence[int] = options.batch or PAPER_DECODE
    if phase == "prefill":
        del policies["packed"]
        sizes = options.tokens or PAPER_PREFILL
    for size in sizes:
        # One cache serves all: what it holds does not change the time.
        shared: list[SlotDecoder] = []

        def make(
            policy: RoutePolicy | None, size: int = size, shared: list[SlotDecoder] = shared
        ) -> Callable[[], object]:
            model = dense if policy is None else ternary
            sequences, length = (1, size) if phase == "prefill" else (size, options.context + 1)
            decoder = SlotDecoder(model, sequences, length, *shared[:1])
            shared.append(decoder)
            count = size if phase == "prefill" else 1
            ids = torch.randint(0, dense.config.vocab_size, (sequences, count), device=device)

            def call() -> object:
                if policy is not None:
                    set_policy_(ternary, policy)
                if phase == "prefill":
                    return decoder.prompt(slice(None), ids)
                # Its first call records the graph, with the products of this policy.
                return decoder.step(ids[:, 0], [options.context] * sequences)

            return recorded(call, device)[0] if count in range(2, RECORDED_TOKENS + 1) else call

        makers = {name: functools.partial(make, policy) for name, policy in policies.items()}
        yield from rows_of(phase, size, measured(makers, device, options.rounds))
        give_back_memory(device)
