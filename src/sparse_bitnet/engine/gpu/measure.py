# SPDX-License-Identifier: Apache-2.0
"""The product of each layer for each number of tokens, by times measured with the model's own layers."""

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from sparse_bitnet.engine.gpu.decode import WARM_UP, recorded
from sparse_bitnet.engine.gpu.linear import RoutePolicy, TernaryLinear, possible_routes
from sparse_bitnet.ops.tuning_cache import (
    TOKENS,
    LayerShape,
    Route,
    TuningCache,
    cache_path,
    machine_name,
)

_FLUSH_BYTES = 256 << 20


def ternary_layers(model: nn.Module) -> dict[LayerShape, TernaryLinear]:
    """One layer of every shape of a prepared model, in the model's order."""
    layers: dict[LayerShape, TernaryLinear] = {}
    for module in model.modules():
        if isinstance(module, TernaryLinear):
            layers.setdefault(module.shape, module)
    return layers


def set_policy_(model: nn.Module, policy: RoutePolicy) -> None:
    """Give every layer of a prepared model the policy."""
    for module in model.modules():
        if isinstance(module, TernaryLinear):
            module.set_policy_(policy)


def measured_policy(model: nn.Module) -> RoutePolicy:
    """The policy of a prepared model on its GPU, which its layers then have, with the forms that they use
    and no others: what SPARSE_BITNET_KERNEL asks for, or by `measured_table`."""
    layers = ternary_layers(model)
    device = next(iter(layers.values())).codes.device
    policy = RoutePolicy.from_environment(TuningCache(machine=""))
    if policy.always is None:
        policy = RoutePolicy(table=measured_table(layers, device))
    set_policy_(model, policy)
    for module in model.modules():
        if isinstance(module, TernaryLinear):
            module.drop_unused_()
    return policy


def measured_table(
    layers: dict[LayerShape, TernaryLinear], device: torch.device, rounds: int = 5
) -> TuningCache:
    """The stored times of this GPU, with those of the shapes that it lacks, measured and stored. Empty on
    a CPU, where all products are one."""
    machine = machine_name()
    if device.type != "cuda":
        return TuningCache(machine=machine)
    table = TuningCache.load(cache_path(machine), machine)
    missing = {shape: layer for shape, layer in layers.items() if shape not in table.seconds}
    for shape, layer in missing.items():
        measure_layer(table, shape, layer, rounds, device)
    if missing:
        table.save(cache_path(machine))
    return table


def measure_layer(
    table: TuningCache,
    shape: LayerShape,
    layer: TernaryLinear,
    rounds: int,
    device: torch.device,
) -> None:
    """Add the times of every product of a layer, quantisation included, to the table."""
    flush = CacheFlush(device)
    for tokens in TOKENS if device.type == "cuda" else TOKENS[:2]:
        x = torch.randn(tokens, shape.in_features, dtype=torch.bfloat16, device=device)

        def product(route: Route, x: Tensor = x) -> Callable[[], object]:
            layer.set_policy_(RoutePolicy(always=route))
            return recorded(lambda: layer(x), device)[0]

        with torch.no_grad():
            routes: dict[str, Callable[[], object]] = {}
            for route in possible_routes(shape.pattern, tokens):
                routes[route] = product(route)
            table.add_rounds(shape, tokens, interleaved(routes, device, rounds, flush))


class CacheFlush:
    """Writes more bytes than any GPU's cache holds, so that the next kernel reads from memory."""

    def __init__(self, device: torch.device) -> None:
        count = _FLUSH_BYTES if device.type == "cuda" else 1
        self._bytes = torch.zeros(count, dtype=torch.uint8, device=device)

    def __call__(self) -> None:
        self._bytes.fill_(1)


def seconds_of(function: Callable[[], object], device: torch.device) -> float:
    """How long a call takes on the device: between two events, or by the clock on a CPU."""
    if device.type != "cuda":
        began = time.perf_counter()
        function()
        return time.perf_counter() - began
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    function()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3


def interleaved(
    functions: Mapping[str, Callable[[], object]],
    device: torch.device,
    rounds: int,
    before: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds of each function in each round; in turn, so that drift of the clock meets all alike.

    Args:
        functions: by name; each is called a few times untimed first.
        device: that they run on.
        rounds: measurements of each.
        before: called untimed before each measurement, to empty caches for example.
    """
    for function in functions.values():
        for _ in range(WARM_UP):
            function()
    taken: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            before()
            taken[name].append(seconds_of(function, device))
    return taken
