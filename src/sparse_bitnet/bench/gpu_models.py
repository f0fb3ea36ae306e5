# SPDX-License-Identifier: Apache-2.0
"""Whole models with random weights, dense bf16 and ternary with all its forms: training steps, and the
paper's Table 3: prefill of one sequence through all layers, attention and cache included, and decode
steps of a batch as CUDA graphs over a fixed cache."""

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from sparse_bitnet.bench.gpu_record import GpuRow, rows_of
from sparse_bitnet.bench.gpu_timing import give_back_memory, measured
from sparse_bitnet.bench.options import PAPER_DECODE, PAPER_PREFILL, GpuBenchOptions
from sparse_bitnet.checkpoint.build_model import preset_config
from sparse_bitnet.checkpoint.load import load_with, skeleton
from sparse_bitnet.checkpoint.model_folder import read_config
from sparse_bitnet.engine.gpu.blocks import int8_head_, prepare_
from sparse_bitnet.engine.gpu.decode import SlotDecoder, recorded
from sparse_bitnet.engine.gpu.linear import RoutePolicy
from sparse_bitnet.engine.gpu.measure import measured_table, set_policy_
from sparse_bitnet.errors import UserError
from sparse_bitnet.nn.convert import convert_, selected, set_integer_forward_
from sparse_bitnet.nn.layer import SparseBitConfig
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet.training.device import autocast, make_deterministic, peak_memory_bytes
from sparse_bitnet.training.loss import SummedLoss
from sparse_bitnet.training.optimizer import build_optimizer

RECORDED_TOKENS = 8192
"""Prompts up to here run as CUDA graphs: of short ones launching takes longer than computing. Of longer
ones it does not, and each graph would hold its own memory."""

VARIANTS = ("bf16", "int8", "fake")
TRAINED_TOKENS = 2048
TRAINED_BATCHES = (4, 2, 1)
"""Unless asked otherwise, the first that every variant has the memory for."""


def bench_device(options: GpuBenchOptions) -> torch.device:
    """Raises `UserError` where CUDA is asked for and absent."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("bench: torch sees no CUDA device; --device cpu tests the benchmark itself")
    return torch.device(options.device)


def random_model(
    options: GpuBenchOptions, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> Any:
    """A transformers model of the preset's or folder's shape, with fewer layers if asked for, and the
    same weights in every call.

    Raises `UserError` for more layers than there are, or none.
    """
    from transformers import AutoModelForCausalLM

    folder = Path(options.model)
    config: Any = (
        skeleton(read_config(folder), folder).config
        if folder.is_dir()
        else preset_config(options.model)
    )
    if options.layers is not None:
        if not 1 <= options.layers <= config.num_hidden_layers:
            raise UserError(
                f"--layers {options.layers}: {options.model} has 1 to {config.num_hidden_layers}"
            )
        config.num_hidden_layers = options.layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: options.layers]
    torch.manual_seed(0)
    with device:
        return load_with(AutoModelForCausalLM.from_config, config, dtype=dtype)


def dense_model(options: GpuBenchOptions, device: torch.device) -> Any:
    """The bf16 baseline, merged and fused as the ternary models are."""
    model = random_model(options, device).eval().requires_grad_(False)
    return prepare_(model, RoutePolicy())


def ternary_model(options: GpuBenchOptions, device: torch.device) -> Any:
    """Random ternary weights within the pattern, and an int8 head."""
    model = random_model(options, device).eval().requires_grad_(False)
    convert_(model, SparseBitConfig.parse(f"ternary-{options.pattern}"))
    int8_head_(prepare_(model, RoutePolicy()))
    return model


def run_inference(options: GpuBenchOptions, phase: str) -> Iterator[GpuRow]:
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


def run_training(options: GpuBenchOptions) -> Iterator[GpuRow]:
    """One row a length, batch and variant: forward, backward and AdamW, float32 masters under autocast,
    with the deterministic kernels of a training run.

    Every variant is built, measured and dropped in turn, so that one model and its optimiser need to
    fit; what is interleaved is the rounds of a variant with those of no other.
    """
    device = bench_device(options)
    make_deterministic(device)
    for length in options.tokens or [TRAINED_TOKENS]:
        for batch in options.batch or TRAINED_BATCHES:
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
    optimizer, summed_loss = build_optimizer(model, TrainConfig()), SummedLoss(model)
    ids = torch.randint(0, model.config.vocab_size, (batch, length + 1), device=device)

    def step() -> None:
        with selected(model):
            with autocast(device, torch.bfloat16):
                loss = summed_loss(ids[:, :-1], ids[:, 1:])
            (loss / (batch * length)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
