# SPDX-License-Identifier: Apache-2.0
"""The paper's Table 3: prefill of one sequence through all layers, attention and cache included, and
decode steps of a batch as CUDA graphs over a fixed cache."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sparse_bitnet.bench.gpu_models import bench_device, dense_model, ternary_model
from sparse_bitnet.bench.gpu_options import PAPER_DECODE, PAPER_PREFILL, GpuBenchOptions
from sparse_bitnet.bench.gpu_record import SpeedRow, rows_of
from sparse_bitnet.bench.gpu_timing import give_back_memory, medians, those_that_fit
from sparse_bitnet.engine.gpu.decode import SlotDecoder, recorded
from sparse_bitnet.engine.gpu.linear import RoutePolicy
from sparse_bitnet.engine.gpu.measure import measured_table, set_policy_, ternary_layers

RECORDED_TOKENS = 8192
"""Prompts up to here run as CUDA graphs: of short ones launching takes longer than computing. Of longer
ones it does not, and each graph would hold its own memory."""


def run_prefill(options: GpuBenchOptions) -> list[SpeedRow]:
    """One row a prompt length and variant."""
    models = _Models(options)

    def maker(tokens: int) -> Callable[[str], Callable[[], object]]:
        ids = torch.randint(0, models.dense.config.vocab_size, (1, tokens), device=models.device)

        def make(variant: str) -> Callable[[], object]:
            model = models.of(variant)
            decoder = SlotDecoder(model, 1, tokens)

            def prefill() -> None:
                models.of(variant)
                decoder.prompt(slice(None), ids)

            return recorded(prefill, models.device)[0] if tokens <= RECORDED_TOKENS else prefill

        return make

    variants = ("bf16", "int8", "sparse", "chosen")
    return models.measure("prefill", variants, options.tokens or PAPER_PREFILL, maker)


def run_decode(options: GpuBenchOptions) -> list[SpeedRow]:
    """One row a batch and variant; every step attends to `context` tokens."""
    models = _Models(options)

    def maker(batch: int) -> Callable[[str], Callable[[], object]]:
        ids = torch.randint(0, models.dense.config.vocab_size, (batch,), device=models.device)
        caches: list[SlotDecoder] = []

        def make(variant: str) -> Callable[[], object]:
            if options.compile:
                # Each variant is a graph of its own; together they would pass the limit.
                torch.compiler.reset()
            model = models.of(variant)
            decoder = SlotDecoder(model, batch, options.context + 1, compile=options.compile)
            caches.append(decoder)
            # One cache serves all: what it holds does not change the time.
            decoder.keys, decoder.values = caches[0].keys, caches[0].values

            # Its first call records the graph, with the products of this policy.
            def step() -> None:
                decoder.step(ids, [options.context] * batch)

            return step

        return make

    variants = ("bf16", *models.policies)
    return models.measure("decode", variants, options.batch or PAPER_DECODE, maker)


class _Models:
    """The dense model, and the ternary one that takes each variant's policy in turn."""

    def __init__(self, options: GpuBenchOptions) -> None:
        self.device, self.rounds = bench_device(options), options.rounds
        self.ternary = ternary_model(options, self.device)
        self.dense = dense_model(options, self.device)
        table = measured_table(ternary_layers(self.ternary), self.device)
        self.policies = {
            "int8": RoutePolicy(always="dense"),
            "sparse": RoutePolicy(always="sparse"),
            "packed": RoutePolicy(always="packed"),
            "chosen": RoutePolicy(table=table),
        }

    def of(self, variant: str) -> Any:
        """The model of a variant, with its policy."""
        if variant == "bf16":
            return self.dense
        set_policy_(self.ternary, self.policies[variant])
        return self.ternary

    def measure(
        self,
        phase: str,
        variants: Sequence[str],
        sizes: Sequence[int],
        maker: Callable[[int], Callable[[str], Callable[[], object]]],
    ) -> list[SpeedRow]:
        """Rows of every size, for which `maker` gives a function that makes what is timed."""
        rows: list[SpeedRow] = []
        for size in sizes:
            make = maker(size)
            functions, lacking = those_that_fit(
                {variant: functools.partial(make, variant) for variant in variants}, self.device
            )
            found = medians(functions, self.device, self.rounds)
            rows += rows_of(phase, size, size, found, lacking)
            del functions, make
            give_back_memory(self.device)
        return rows
