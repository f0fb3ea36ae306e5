# SPDX-License-Identifier: Apache-2.0
"""The product of each layer for each number of tokens, by times measured with the model's own layers."""

import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import nn

from sparse_bitnet.engine.gpu.decode import WARM_UP, recorded
from sparse_bitnet.engine.gpu.linear import RoutePolicy, TernaryLinear, possible_routes
from sparse_bitnet.ops.backends import choice_of_kernel
from sparse_bitnet.ops.tuning_cache import (
    TOKENS,
    LayerShape,
    Route,
    TuningCache,
    cache_path,
    machine_name,
)

ASKED_FOR: dict[str, Route] = {"triton": "packed", "cusparselt": "sparse", "reference": "dense"}
"""The product that a value of SPARSE_BITNET_KERNEL names."""

Name = TypeVar("Name", bound=str)
_FLUSH_BYTES = 256 << 20


def _all_layers(model: nn.Module) -> list[TernaryLinear]:
    return [module for module in model.modules() if isinstance(module, TernaryLinear)]


def ternary_layers(model: nn.Module) -> dict[LayerShape, TernaryLinear]:
    """One layer of every shape of a prepared model, in the model's order."""
    layers: dict[LayerShape, TernaryLinear] = {}
    for layer in _all_layers(model):
        layers.setdefault(layer.shape, layer)
    return layers


def set_policy_(model: nn.Module, policy: RoutePolicy) -> None:
    """Give every layer of a prepared model the policy."""
    for layer in _all_layers(model):
        layer.set_policy_(policy)


def measured_policy(model: nn.Module) -> RoutePolicy:
    """The policy of a prepared model on its GPU, which its layers then have, with the forms that they use
    and no others: what SPARSE_BITNET_KERNEL asks for, or by `measured_table`."""
    policy = RoutePolicy(always=ASKED_FOR.get(choice_of_kernel()))
    if policy.always is None:
        policy = RoutePolicy(table=measured_table(model))
    set_policy_(model, policy)
    for layer in _all_layers(model):
        layer.drop_unused_()
    return policy


def measured_table(model: nn.Module) -> TuningCache:
    """What is stored of this GPU; those of the model's shapes that it lacks are measured and stored too.
    Empty on a CPU, where all products are one."""
    machine = machine_name()
    if next(model.parameters()).device.type != "cuda":
        return TuningCache(machine=machine)
    table = TuningCache.load(cache_path(machine), machine)
    if measure_(table, model):
        table.save(cache_path(machine))
    return table


@torch.no_grad()
def measure_(
    table: TuningCache, model: nn.Module, counts: Sequence[int] = TOKENS, rounds: int = 5
) -> bool:
    """Add the shapes of a prepared model that a table lacks, measured with a layer of each, quantisation
    included, on its device; returns whether there were any."""
    layers = ternary_layers(model)
    missing = layers.keys() - table.fastest.keys()
    for shape, tokens in itertools.product(missing, counts):
        layer = layers[shape]
        device = layer.codes.device
        x = torch.randn(tokens, shape.in_features, dtype=torch.bfloat16, device=device)
        graphs: dict[Route, Callable[[], object]] = {}
        for route in possible_routes(shape.pattern, tokens):
            layer.set_policy_(RoutePolicy(always=route))
            graphs[route] = recorded(functools.partial(layer, x), device)[0]
        table.add(shape, tokens, interleaved(graphs, device, rounds, cache_flush(device)))
    return bool(missing)


def cache_flush(device: torch.device) -> Callable[[], object]:
    """Writes more bytes than any GPU's cache holds, so that the next kernel reads from memory."""
    count = _FLUSH_BYTES if device.type == "cuda" else 1
    return functools.partial(torch.zeros(count, dtype=torch.uint8, device=device).fill_, 1)


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
    functions: Mapping[Name, Callable[[], object]],
    device: torch.device,
    rounds: int,
    before: Callable[[], object] = lambda: None,
) -> dict[Name, list[float]]:
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
    taken: dict[Name, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            before()
            taken[name].append(seconds_of(function, device))
    return taken
