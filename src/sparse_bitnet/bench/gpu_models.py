"""The compared models: random weights of a preset's shape, dense bf16 and ternary with all its forms."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from sparse_bitnet.bench.gpu_options import GpuBenchOptions
from sparse_bitnet.bench.gpu_timing import CacheFlush, recorded, seconds_of
from sparse_bitnet.checkpoint.models import preset_config
from sparse_bitnet.engine.gpu.fused import fuse_
from sparse_bitnet.engine.gpu.linear import PACKED_TOKENS, RoutePolicy, TernaryLinear
from sparse_bitnet.engine.gpu.merge import MERGED, prepare_, put_merged_
from sparse_bitnet.errors import UserError
from sparse_bitnet.nn.convert import convert_
from sparse_bitnet.nn.layer import SparseBitConfig
from sparse_bitnet.ops.tuning_cache import (
    TOKENS,
    LayerShape,
    Route,
    TuningCache,
    cache_path,
    machine_name,
    measure,
)
from sparse_bitnet.ops.windows import has_windows
from sparse_bitnet.packing.formats import holds_pattern
from sparse_bitnet.pattern import NMPattern


def bench_device(options: GpuBenchOptions) -> torch.device:
    """Raises `UserError` where CUDA is asked for and absent."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("bench: torch sees no CUDA device; --device cpu tests the benchmark itself")
    return torch.device(options.device)


def bench_config(options: GpuBenchOptions) -> Any:
    """The transformers config of the preset, with fewer layers if asked for."""
    config: Any = preset_config(options.model)
    if options.layers is not None:
        config.num_hidden_layers = options.layers
        config.layer_types = config.layer_types[: options.layers]
    return config


def random_model(options: GpuBenchOptions, device: torch.device) -> Any:
    """A bf16 transformers model of the preset's shape, in evaluation mode."""
    from transformers import Qwen2ForCausalLM

    config = bench_config(options)
    torch.manual_seed(0)
    with device:
        model: Any = Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16)
    return model.eval().requires_grad_(False)


def dense_model(options: GpuBenchOptions, device: torch.device) -> Any:
    """The bf16 baseline, with the same projections merged as in the ternary models."""
    model = random_model(options, device)
    for parent in list(model.modules()):
        children = dict(parent.named_children())
        for names in MERGED:
            if all(type(children.get(name)) is nn.Linear for name in names):
                parts = [children[name] for name in names]
                put_merged_(parent, names, _merged_dense(parts), parts)
    return model


def ternary_model(options: GpuBenchOptions, device: torch.device) -> Any:
    """Random ternary weights within the pattern, in every form that it has."""
    model = convert_(
        random_model(options, device), SparseBitConfig.parse(f"ternary-{options.pattern}")
    )
    routes: frozenset[Route] = frozenset(("sparse", "packed"))
    policy = RoutePolicy(also=routes, packed_format=options.packed_format)
    return fuse_(prepare_(model, policy))


def set_policy_(model: nn.Module, policy: RoutePolicy) -> None:
    """Give every layer of a model the policy."""
    for module in model.modules():
        if isinstance(module, TernaryLinear):
            module.set_policy_(policy)


def ternary_layers(model: nn.Module) -> dict[LayerShape, TernaryLinear]:
    """One layer of every shape of a prepared model, in the model's order."""
    layers: dict[LayerShape, TernaryLinear] = {}
    for module in model.modules():
        if isinstance(module, TernaryLinear):
            layers.setdefault(module.shape, module)
    return layers


def tuning_cache(options: GpuBenchOptions, model: nn.Module, device: torch.device) -> TuningCache:
    """The stored table of this GPU, or one measured with the model's own layers, and stored."""
    machine = machine_name()
    path = cache_path(machine)
    table = TuningCache.load(path, machine)
    if options.tuning_cache == "measure":
        flush = CacheFlush(device)
        for shape, layer in ternary_layers(model).items():
            _measure_layer(table, shape, layer, options, device, flush)
        # The stored times of packed products are those of the format that models use by default.
        if device.type == "cuda" and options.packed_format == RoutePolicy().packed_format:
            table.save(path)
    return table


def possible_routes(pattern: NMPattern, packed_format: str, tokens: int) -> list[Route]:
    """The products that a pattern and a token count allow."""
    routes: list[Route] = ["dense"]
    routes += ["sparse"] if has_windows(pattern) else []
    packed = tokens <= PACKED_TOKENS and holds_pattern(packed_format, pattern)
    return [*routes, "packed"] if packed else routes


def _measure_layer(
    table: TuningCache,
    shape: LayerShape,
    layer: TernaryLinear,
    options: GpuBenchOptions,
    device: torch.device,
    flush: CacheFlush,
) -> None:
    def products(tokens: int) -> dict[str, Callable[[], object]]:
        x = torch.randn(tokens, shape.in_features, dtype=torch.bfloat16, device=device)

        def product(route: Route) -> Callable[[], object]:
            policy = RoutePolicy(always=route, packed_format=options.packed_format)

            def run() -> None:
                layer.set_policy_(policy)
                layer(x)

            return recorded(run, device)

        routes = possible_routes(shape.pattern, options.packed_format, tokens)
        return {route: product(route) for route in routes}

    def timed(function: Callable[[], object]) -> float:
        flush()
        return seconds_of(function, device)

    counts: Iterable[int] = TOKENS if device.type == "cuda" else TOKENS[:2]
    measure(table, shape, products, timed, tokens=counts, repeats=options.rounds)


def _merged_dense(parts: list[Any]) -> nn.Linear:
    rows = sum(part.out_features for part in parts)
    first = parts[0]
    has_bias = first.bias is not None
    merged = nn.Linear(
        first.in_features,
        rows,
        bias=has_bias,
        device=first.weight.device,
        dtype=first.weight.dtype,
    ).requires_grad_(False)
    merged.weight.copy_(torch.cat([part.weight for part in parts]))
    if has_bias:
        merged.bias.copy_(torch.cat([part.bias for part in parts]))
    return merged
