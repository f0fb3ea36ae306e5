# SPDX-License-Identifier: Apache-2.0
"""Times on a GPU by its own events, interleaved, and the roofline of the machine in the same run."""

import gc
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from sparse_bitnet.engine.gpu.measure import interleaved

Times = tuple[float, float] | None
"""Median seconds, and slowest over fastest minus 1; None for what found no memory."""


def measured(
    makers: Mapping[str, Callable[[], Callable[[], object]]],
    device: torch.device,
    rounds: int,
    before: Callable[[], object] = lambda: None,
) -> dict[str, Times]:
    """Times of the functions that `makers` make, in turn, as by `interleaved`."""
    fitting: dict[str, Callable[[], object]] = {}
    for name, make in makers.items():
        lacks = False
        try:
            function = make()
            function()
            fitting[name] = function
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            lacks = True
        if lacks:  # here, because the error held on to what its frames had
            give_back_memory(device)
    found: dict[str, Times] = dict.fromkeys(makers)
    for name, times in interleaved(fitting, device, rounds, before).items():
        found[name] = statistics.median(times), max(times) / min(times) - 1
    return found


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
    wide = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    small = (wide * 40).clamp(-127, 127).to(torch.int8)
    functions: dict[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(source),
        "bf16": lambda: wide @ wide.t(),
        "int8": lambda: torch._int_mm(small, small.t()),
    }
    taken = interleaved(functions, device, rounds)
    copy, bf16, int8 = (statistics.median(taken[name]) for name in functions)
    return GpuRoofline(
        bytes_per_second=2 * source.nbytes / copy,
        bf16_per_second=2 * size**3 / bf16,
        int8_per_second=2 * size**3 / int8,
    )
