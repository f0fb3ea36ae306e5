# SPDX-License-Identifier: Apache-2.0
"""Times on a GPU by its own events, interleaved, and the roofline of the machine in the same run."""

import gc
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_bitnet.engine.gpu.measure import interleaved


def medians(
    functions: Mapping[str, Callable[[], object]],
    device: torch.device,
    rounds: int,
    before: Callable[[], object] = lambda: None,
) -> dict[str, tuple[float, float]]:
    """(median seconds, slowest over fastest minus 1) of each function, measured as by `interleaved`."""
    return {
        name: (statistics.median(times), max(times) / min(times) - 1)
        for name, times in interleaved(functions, device, rounds, before).items()
    }


def those_that_fit(
    makers: Mapping[str, Callable[[], Callable[[], object]]], device: torch.device
) -> tuple[dict[str, Callable[[], object]], list[str]]:
    """Functions that could be made and called once, and the names of those that found no memory."""
    fitting: dict[str, Callable[[], object]] = {}
    lacking: list[str] = []
    for name, make in makers.items():
        try:
            function = make()
            function()
            fitting[name] = function
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            lacking.append(name)
        # Here, because the error held on to what its frames had.
        if lacking and lacking[-1] == name:
            give_back_memory(device)
    return fitting, lacking


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether this is what was raised for want of GPU memory, or came of it (recording a graph)."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


def give_back_memory(device: torch.device) -> None:
    """Free what nothing refers to, so that the next variant finds it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@dataclass(frozen=True, kw_only=True)
class GpuRoofline:
    """What the machine does at most, measured: shares of the roofline refer to these."""

    bytes_per_second: float
    """Read plus written by a copy of a large tensor."""
    bf16_per_second: float
    """Operations (two a multiply-add) of a large bf16 product."""
    int8_per_second: float
    """The same of a dense int8 product; sparse ones have twice this speed in the operations they
    do, which are half of those of their width."""


def measure_roofline(device: torch.device, rounds: int = 7) -> GpuRoofline:
    """Copy bandwidth and the two dense products."""
    size, count = (8192, 1 << 28) if device.type == "cuda" else (128, 1 << 16)
    source = torch.zeros(count, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    a = torch.randn(size, size, device=device)
    wide = a.bfloat16()
    small = (a * 40).clamp(-127, 127).to(torch.int8)

    def copy() -> Tensor:
        return target.copy_(source)

    found = medians(
        {
            "copy": copy,
            "bf16": lambda: wide @ wide.t(),
            "int8": lambda: torch._int_mm(small, small.t()),
        },
        device,
        rounds,
    )
    operations = 2 * size**3
    return GpuRoofline(
        bytes_per_second=2 * source.numel() * 4 / found["copy"][0],
        bf16_per_second=operations / found["bf16"][0],
        int8_per_second=operations / found["int8"][0],
    )
