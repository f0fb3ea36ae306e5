# SPDX-License-Identifier: Apache-2.0
"""Whole training steps: dense bf16, ternary with the int8 forward, and with the fake-quantised one."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from sparse_bitnet.bench.gpu_models import bench_device, random_model
from sparse_bitnet.bench.gpu_options import GpuBenchOptions
from sparse_bitnet.bench.gpu_record import GpuRow, rows_of
from sparse_bitnet.bench.gpu_timing import give_back_memory, measured
from sparse_bitnet.nn.convert import convert_, selected, set_integer_forward_
from sparse_bitnet.nn.layer import SparseBitConfig
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet.training.device import autocast, make_deterministic, peak_memory_bytes
from sparse_bitnet.training.loss import causal_lm_loss
from sparse_bitnet.training.optimizer import build_optimizer

VARIANTS = ("bf16", "int8", "fake")
DEFAULT_TOKENS = 2048
DEFAULT_BATCHES = (4, 2, 1)
"""Unless asked otherwise, the first that every variant has the memory for."""


def run(options: GpuBenchOptions) -> Iterator[GpuRow]:
    """One row a length, batch and variant: forward, backward and AdamW, float32 masters under autocast,
    with the deterministic kernels of a training run.

    Every variant is built, measured and dropped in turn, so that one model and its optimiser need to
    fit; what is interleaved is the rounds of a variant with those of no other.
    """
    device = bench_device(options)
    make_deterministic(device)
    for length in options.tokens or [DEFAULT_TOKENS]:
        for batch in options.batch or DEFAULT_BATCHES:
            all_fit = True
            for variant in VARIANTS:
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                make = functools.partial(_training_step, variant, options, device, batch, length)
                found = measured({variant: make}, device, options.rounds)
                (row,) = rows_of("train", batch * length, found, layer=f"{batch} x {length}")
                row.peak_bytes = peak_memory_bytes(device)
                all_fit &= row.failed is None
                yield row
                give_back_memory(device)
            if not options.batch and all_fit:
                break


def training_model(variant: str, options: GpuBenchOptions, device: torch.device) -> Any:
    """A float32 model in training mode in one of `VARIANTS`."""
    model = random_model(options, device, torch.float32)
    if variant in ("int8", "fake"):
        convert_(model, SparseBitConfig.parse(f"ternary-{options.pattern}"))
        set_integer_forward_(model, variant == "int8")
    if options.compile:
        for block in model.get_decoder().layers:
            block.compile()
    return model.train()


def _training_step(
    variant: str, options: GpuBenchOptions, device: torch.device, batch: int, length: int
) -> Callable[[], None]:
    model = training_model(variant, options, device)
    optimizer = build_optimizer(model, TrainConfig())
    ids = torch.randint(0, model.config.vocab_size, (batch, length + 1), device=device)

    def step() -> None:
        with selected(model):
            with autocast(device, torch.bfloat16):
                loss = causal_lm_loss(model, ids[:, :-1], ids[:, 1:])
            (loss / (batch * length)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
