# SPDX-License-Identifier: Apache-2.0
"""Single shapes of a model: every product with its quantisation and its share of the roofline; and the
kernels of one layer by the time that they take."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_bitnet.bench.gpu_models import bench_device, ternary_model
from sparse_bitnet.bench.gpu_options import GpuBenchOptions
from sparse_bitnet.bench.gpu_record import OUT_OF_MEMORY, KernelRow
from sparse_bitnet.bench.gpu_timing import (
    GpuRoofline,
    give_back_memory,
    is_out_of_memory,
    measure_roofline,
    medians,
)
from sparse_bitnet.engine.gpu.decode import recorded
from sparse_bitnet.engine.gpu.linear import RoutePolicy, TernaryLinear, possible_routes
from sparse_bitnet.engine.gpu.measure import CacheFlush, ternary_layers
from sparse_bitnet.ops.absmean import absmean
from sparse_bitnet.ops.operands import word_dtype
from sparse_bitnet.ops.quantize_int8 import quantize_int8
from sparse_bitnet.ops.quantize_windows import quantize_windows
from sparse_bitnet.ops.tuning_cache import Route
from sparse_bitnet.ops.windows import window_layout

DEFAULT_TOKENS = (1, 8, 64, 512, 4096, 16384)
PROFILED_TOKENS = (1, 4096)
MOST_KERNELS = 12
"""Lines of a profile."""


def run(options: GpuBenchOptions) -> list[KernelRow]:
    """Rows of every shape of the model's blocks (one block is built)."""
    device = bench_device(options)
    options.layers = 1
    model = ternary_model(options, device)
    roofline, flush = measure_roofline(device, options.rounds), CacheFlush(device)

    def rows_of(
        layer: TernaryLinear, tokens: int, functions: dict[str, Callable[[], Any]]
    ) -> list[KernelRow]:
        named: dict[str, Any] = {
            "out_features": layer.out_features,
            "in_features": layer.in_features,
        }
        try:
            graphs = {name: recorded(call, device)[0] for name, call in functions.items()}
            found = medians(graphs, device, options.rounds, flush)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            give_back_memory(device)
            return [KernelRow(route="all", tokens=tokens, failed=OUT_OF_MEMORY, **named)]
        rows = []
        for name, (seconds, spread) in found.items():
            least, bound = roofline_seconds(name, layer, tokens, roofline)
            of_quantising = "quantise windows" if name == "sparse" else "quantise"
            is_product = name in ("dense", "sparse", "packed")
            alone = seconds - found[of_quantising][0] if is_product else None
            rows.append(
                KernelRow(
                    route=name,
                    tokens=tokens,
                    seconds=seconds,
                    spread=spread,
                    product_seconds=alone,
                    bound=bound,
                    roofline_share=least / seconds,
                    **named,
                )
            )
        return rows

    rows = []
    for layer in ternary_layers(model).values():
        rows += rows_of(layer, 0, {"select": _selection(layer, device)})
        for tokens in options.tokens or DEFAULT_TOKENS:
            rows += rows_of(layer, tokens, _products(layer, tokens, device))
    return rows


def _selection(layer: TernaryLinear, device: torch.device) -> Callable[[], Any]:
    """Codes, mask bits and flips from a float32 master: on CUDA one kernel."""
    pattern = layer.pattern
    weight = torch.randn(layer.out_features, layer.in_features, device=device)
    scale = absmean(weight)
    op = torch.ops.sparse_bitnet.select_ternary_bits
    _, bits, _ = op(weight, scale, pattern.n, pattern.m, None)
    return lambda: op(weight, scale, pattern.n, pattern.m, bits)


def _products(
    layer: TernaryLinear, tokens: int, device: torch.device
) -> dict[str, Callable[[], Any]]:
    x = torch.randn(tokens, layer.in_features, dtype=torch.bfloat16, device=device)
    weight = torch.randn(layer.out_features, layer.in_features, dtype=torch.bfloat16, device=device)
    functions: dict[str, Callable[[], Any]] = {"bf16": lambda: F.linear(x, weight)}
    for route in possible_routes(layer.pattern, tokens):

        def whole(route: Route = route) -> Tensor:
            layer.set_policy_(RoutePolicy(always=route))
            return layer(x)

        functions[route] = whole
    functions["quantise"] = lambda: quantize_int8(x)
    if "sparse" in functions:
        functions["quantise windows"] = lambda: quantize_windows(x, layer.pattern)
    return functions


def roofline_seconds(
    route: str, layer: TernaryLinear, tokens: int, roofline: GpuRoofline
) -> tuple[float, str]:
    """(least time, what bounds it): bytes moved once, operations at the speed of their kind."""
    rows, columns = layer.out_features, layer.in_features
    width, operations, per_second = columns, 2.0 * tokens * rows * columns, roofline.int8_per_second
    if route in ("sparse", "quantise windows"):
        width = window_layout(layer.pattern).padded_width(columns)
    weight_bytes: float = rows * columns
    if route == "bf16":
        weight_bytes, per_second = 2 * rows * columns, roofline.bf16_per_second
    elif route == "sparse":
        assert layer.compressed is not None
        weight_bytes = layer.compressed.numel()
        # Half of the width is multiplied, at twice the dense rate.
        operations, per_second = tokens * rows * width, 2 * per_second
    elif route == "packed":
        assert layer.weight_packed is not None
        weight_bytes = layer.weight_packed.numel()
    moved = weight_bytes + 2.0 * tokens * (columns + rows)
    if route in ("dense", "sparse", "packed"):
        # Quantised activations are written and read once.
        moved += 2.0 * tokens * width
    elif route == "select":
        # Reads the float32 master, writes codes, writes and reads a mask of a word a group.
        m = layer.pattern.m
        moved, operations = rows * columns * (5 + 2 * word_dtype(m).itemsize / m), 0.0
    elif route.startswith("quantise"):
        moved, operations = tokens * (2.0 * columns + width + 4), 0.0
    memory, compute = moved / roofline.bytes_per_second, operations / per_second
    return max(memory, compute), "memory" if memory >= compute else "compute"


def run_profile(options: GpuBenchOptions) -> list[KernelRow]:
    """Kernels of one decoder layer and the head by the time they take, most first; tokens at once."""
    device = bench_device(options)
    options.layers = 1
    model = ternary_model(options, device)
    config = model.config
    activity = torch.profiler.ProfilerActivity
    is_cuda = device.type == "cuda"
    rows = []
    for tokens in options.tokens or PROFILED_TOKENS:
        ids = torch.randint(0, config.vocab_size, (1, tokens), device=device)
        with torch.no_grad():
            model(ids, use_cache=False, logits_to_keep=1)
            with torch.profiler.profile(
                activities=[activity.CUDA if is_cuda else activity.CPU]
            ) as seen:
                model(ids, use_cache=False, logits_to_keep=1)
        times = {
            event.key: (event.self_device_time_total if is_cuda else event.self_cpu_time_total)
            for event in seen.key_averages()
        }
        total = sum(times.values())
        for name, time in sorted(times.items(), key=lambda pair: -pair[1])[:MOST_KERNELS]:
            rows.append(
                KernelRow(
                    route=name,
                    out_features=config.intermediate_size,
                    in_features=config.hidden_size,
                    tokens=tokens,
                    seconds=time / 1e6,
                    share_of_layer=time / total,
                )
            )
    return rows
