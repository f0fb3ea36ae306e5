"""Single shapes of a model: every product with its quantisation, and its share of the roofline."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from sparse_bitnet.bench.gpu_models import (
    bench_device,
    possible_routes,
    ternary_layers,
    ternary_model,
)
from sparse_bitnet.bench.gpu_options import GpuBenchOptions
from sparse_bitnet.bench.gpu_record import OUT_OF_MEMORY, KernelRow
from sparse_bitnet.bench.gpu_timing import (
    CacheFlush,
    GpuRoofline,
    give_back_memory,
    is_out_of_memory,
    measure_roofline,
    medians,
    recorded,
)
from sparse_bitnet.engine.gpu.linear import RoutePolicy, TernaryLinear
from sparse_bitnet.ops.absmean import absmean
from sparse_bitnet.ops.quantize_int8 import quantize_int8
from sparse_bitnet.ops.quantize_windows import quantize_windows
from sparse_bitnet.ops.windows import window_layout

DEFAULT_TOKENS = (1, 8, 64, 512, 4096, 16384)


def run(options: GpuBenchOptions) -> list[KernelRow]:
    """Rows of every shape of the model's blocks (one block is built)."""
    device = bench_device(options)
    options.layers = 1
    model = ternary_model(options, device)
    roofline, flush = measure_roofline(device, options.rounds), CacheFlush(device)
    rows = []
    for layer in ternary_layers(model).values():
        rows.append(_measure_selection(layer, options, device, roofline, flush))
        for tokens in options.tokens or DEFAULT_TOKENS:
            try:
                rows += _measure(layer, tokens, options, device, roofline, flush)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                rows.append(
                    KernelRow(
                        route="all",
                        out_features=layer.out_features,
                        in_features=layer.in_features,
                        tokens=tokens,
                        failed=OUT_OF_MEMORY,
                    )
                )
            give_back_memory(device)
    return rows


def roofline_seconds(
    route: str, layer: TernaryLinear, tokens: int, roofline: GpuRoofline
) -> tuple[float, str]:
    """(least time, what bounds it): bytes moved once, operations at the speed of their kind."""
    rows, columns = layer.out_features, layer.in_features
    width, per_second, operations = columns, roofline.int8_per_second, 2.0 * tokens * rows * columns
    weight_bytes: float = rows * columns
    if route == "bf16":
        weight_bytes, per_second = 2 * rows * columns, roofline.bf16_per_second
    elif route == "sparse":
        width = window_layout(layer.pattern).padded_width(columns)
        assert layer.compressed is not None
        weight_bytes = layer.compressed.numel()
        # Half of the width is multiplied, at twice the dense rate.
        operations, per_second = tokens * rows * width, 2 * per_second
    elif route == "packed":
        assert layer.weight_packed is not None
        weight_bytes = layer.weight_packed.numel()
    moved = weight_bytes + 2.0 * tokens * (columns + rows)
    if route != "bf16":
        # Quantised activations are written and read once.
        moved += 2.0 * tokens * width
    memory, compute = moved / roofline.bytes_per_second, operations / per_second
    return max(memory, compute), "memory" if memory >= compute else "compute"


def _measure_selection(
    layer: TernaryLinear,
    options: GpuBenchOptions,
    device: torch.device,
    roofline: GpuRoofline,
    flush: CacheFlush,
) -> KernelRow:
    """Codes, mask bits and flips from a float32 master: on CUDA one kernel."""
    pattern = layer.pattern
    weight = torch.randn(layer.out_features, layer.in_features, device=device)
    scale = absmean(weight)
    op = torch.ops.sparse_bitnet.select_ternary_bits
    _, bits, _ = op(weight, scale, pattern.n, pattern.m, None)
    # Read the master, write codes, write and read mask.
    least_bytes = 5 * weight.numel() + 2 * bits.nbytes

    def selection() -> Any:
        return op(weight, scale, pattern.n, pattern.m, bits)

    functions = {"select": recorded(selection, device)}
    seconds, spread = medians(functions, device, options.rounds, before=flush)["select"]
    return KernelRow(
        route="select",
        out_features=layer.out_features,
        in_features=layer.in_features,
        tokens=0,
        seconds=seconds,
        spread=spread,
        bound="memory",
        roofline_share=least_bytes / roofline.bytes_per_second / seconds,
    )


def _measure(
    layer: TernaryLinear,
    tokens: int,
    options: GpuBenchOptions,
    device: torch.device,
    roofline: GpuRoofline,
    flush: CacheFlush,
) -> list[KernelRow]:
    x = torch.randn(tokens, layer.in_features, dtype=torch.bfloat16, device=device)
    weight = torch.randn(layer.out_features, layer.in_features, dtype=torch.bfloat16, device=device)
    routes = possible_routes(layer.pattern, options.packed_format, tokens)
    functions: dict[str, Callable[[], Any]] = {"bf16": lambda: F.linear(x, weight)}
    for route in routes:
        policy = RoutePolicy(always=route, packed_format=options.packed_format)

        def whole(policy: RoutePolicy = policy) -> None:
            layer.set_policy_(policy)
            layer(x)

        functions[route] = whole
    functions["quantise"] = lambda: quantize_int8(x)
    if "sparse" in routes:
        functions["quantise windows"] = lambda: quantize_windows(x, layer.pattern)
    graphs = {name: recorded(function, device) for name, function in functions.items()}
    found = medians(graphs, device, options.rounds, before=flush)
    rows = []
    for name in ("bf16", *routes):
        seconds, spread = found[name]
        least, bound = roofline_seconds(name, layer, tokens, roofline)
        quantise = {"bf16": 0.0, "sparse": found.get("quantise windows", (0.0, 0.0))[0]}
        rows.append(
            KernelRow(
                route=name,
                out_features=layer.out_features,
                in_features=layer.in_features,
                tokens=tokens,
                seconds=seconds,
                spread=spread,
                product_seconds=seconds - quantise.get(name, found["quantise"][0]),
                bound=bound,
                roofline_share=least / seconds,
            )
        )
    for name in ("quantise", "quantise windows"):
        if name in found:
            width = layer.in_features
            if name == "quantise windows":
                width = window_layout(layer.pattern).padded_width(width)
            least = tokens * (2 * layer.in_features + width + 4) / roofline.bytes_per_second
            rows.append(
                KernelRow(
                    route=name,
                    out_features=width,
                    in_features=layer.in_features,
                    tokens=tokens,
                    seconds=found[name][0],
                    spread=found[name][1],
                    bound="memory",
                    roofline_share=least / found[name][0],
                )
            )
    return rows
