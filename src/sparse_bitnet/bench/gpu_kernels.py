# SPDX-License-Identifier: Apache-2.0
"""Every kernel at the shapes of a model, with its share of the roofline; and the kernels of one layer by
the time that they take."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_bitnet.bench.gpu_models import bench_device, ternary_model
from sparse_bitnet.bench.gpu_record import GpuRow, rows_of
from sparse_bitnet.bench.gpu_timing import GpuRoofline, measure_roofline, measured
from sparse_bitnet.bench.options import GpuBenchOptions
from sparse_bitnet.engine.gpu.decode import SlotDecoder, recorded
from sparse_bitnet.engine.gpu.linear import (
    RoutePolicy,
    TernaryLinear,
    possible_routes,
    quantized,
)
from sparse_bitnet.engine.gpu.measure import cache_flush, ternary_layers
from sparse_bitnet.ops.absmean import absmean
from sparse_bitnet.ops.operands import word_dtype
from sparse_bitnet.ops.tuning_cache import Route
from sparse_bitnet.ops.windows import window_layout

DEFAULT_TOKENS = (1, 8, 64, 512, 4096, 16384)
PROFILED_TOKENS = (1, 4096)
MOST_KERNELS = 12
"""Lines of a profile."""


def run(options: GpuBenchOptions) -> Iterator[GpuRow]:
    """Rows of every shape of the model's blocks (one block is built)."""
    device = bench_device(options)
    options.layers = 1
    roofline, flush = measure_roofline(device, options.rounds), cache_flush(device)
    for layer in ternary_layers(ternary_model(options, device)).values():
        for tokens in (0, *(options.tokens or DEFAULT_TOKENS)):
            makers = _products(layer, tokens, device) if tokens else _selection(layer, device)
            found = measured(makers, device, options.rounds, flush)
            shape = f"{layer.out_features} x {layer.in_features}"
            for row in rows_of("kernels", tokens, found, layer=shape, has_rate=False):
                least, row.bound = roofline_seconds(row.variant, layer, tokens, roofline)
                row.share = row.seconds and least / row.seconds
                yield row


def _selection(layer: TernaryLinear, device: torch.device) -> dict[str, Callable[[], Any]]:
    """Codes, mask bits and flips from a float32 master: on CUDA one kernel."""
    n, m = layer.pattern.n, layer.pattern.m

    def make() -> Callable[[], object]:
        weight = torch.randn(layer.out_features, layer.in_features, device=device)
        scale = absmean(weight)
        op = torch.ops.sparse_bitnet.select_ternary_bits
        _, bits, _ = op(weight, scale, n, m, None)
        return recorded(lambda: op(weight, scale, n, m, bits), device)[0]

    return {"select": make}


def _products(layer: TernaryLinear, tokens: int, device: torch.device) -> dict[str, Any]:
    """Of each kernel what makes its graph: the bf16 product, ours of tokens that are quantised already,
    and their quantisation."""

    def floats() -> Tensor:
        return torch.randn(tokens, layer.in_features, dtype=torch.bfloat16, device=device)

    def dense() -> Callable[[], object]:
        x, weight = floats(), layer.codes.bfloat16()
        return recorded(lambda: F.linear(x, weight), device)[0]

    def product(route: Route) -> Callable[[], object]:
        layer.set_policy_(RoutePolicy(always=route))
        x = quantized(floats(), layer.pattern if route == "sparse" else None)
        return recorded(lambda: layer.product(route, *x, torch.bfloat16), device)[0]

    def quantise(windows: Any) -> Callable[[], object]:
        x = floats()
        return recorded(lambda: quantized(x, windows), device)[0]

    makers: dict[str, Any] = {"bf16": dense}
    for route in possible_routes(layer.pattern, tokens):
        makers[route] = lambda route=route: product(route)
    makers["quantise"] = lambda: quantise(None)
    if "sparse" in makers:
        makers["quantise windows"] = lambda: quantise(layer.pattern)
    return makers


def roofline_seconds(
    kernel: str, layer: TernaryLinear, tokens: int, roofline: GpuRoofline
) -> tuple[float, str]:
    """(least time, what bounds it): bytes moved once, operations at the speed of their kind."""
    rows, columns, m = layer.out_features, layer.in_features, layer.pattern.m
    width, operations, per_second = columns, 2.0 * tokens * rows * columns, roofline.int8_per_second
    if kernel in ("sparse", "quantise windows"):
        width = window_layout(layer.pattern).width(columns)
    weight_bytes: float = rows * columns
    if kernel == "bf16":
        weight_bytes, width, per_second = 2 * weight_bytes, 2 * columns, roofline.bf16_per_second
    elif kernel == "sparse":
        assert layer.compressed is not None
        weight_bytes = layer.compressed.numel()
        # Half of the width is multiplied, at twice the dense rate.
        operations, per_second = tokens * rows * width, 2 * per_second
    elif kernel == "packed":
        assert layer.weight_packed is not None
        weight_bytes = layer.weight_packed.numel()
    moved = weight_bytes + tokens * (width + 2.0 * rows)
    if kernel == "select":
        # Reads the float32 master, writes codes, writes and reads a mask of a word a group.
        moved, operations = rows * columns * (5 + 2 * word_dtype(m).itemsize / m), 0.0
    elif kernel.startswith("quantise"):
        moved, operations = tokens * (2.0 * columns + width + 4), 0.0
    memory, compute = moved / roofline.bytes_per_second, operations / per_second
    return max(memory, compute), "memory" if memory >= compute else "compute"


def run_profile(options: GpuBenchOptions) -> Iterator[GpuRow]:
    """Kernels of one decoder layer and the head by the time they take, most first, as PyTorch's profiler
    also prints them; tokens at once."""
    device = bench_device(options)
    options.layers = 1
    model = ternary_model(options, device)
    kind = "cuda" if device.type == "cuda" else "cpu"
    for tokens in options.tokens or PROFILED_TOKENS:
        ids = torch.randint(0, model.config.vocab_size, (1, tokens), device=device)
        decoder = SlotDecoder(model, 1, tokens)
        decoder.prompt(slice(None), ids)
        activity = getattr(torch.profiler.ProfilerActivity, kind.upper())
        with torch.profiler.profile(activities=[activity]) as seen:
            decoder.prompt(slice(None), ids)
        field = "self_device_time_total" if kind == "cuda" else "self_cpu_time_total"
        events = seen.key_averages()
        print(events.table(sort_by=field, row_limit=MOST_KERNELS, max_name_column_width=60))
        times = {event.key: getattr(event, field) for event in events}
        total = sum(times.values())
        for name, time in sorted(times.items(), key=lambda pair: -pair[1])[:MOST_KERNELS]:
            row = GpuRow(phase="profile", variant=name, size=tokens, seconds=time / 1e6)
            row.share = time / total
            yield row
