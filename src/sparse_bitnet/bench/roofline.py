# SPDX-License-Identifier: Apache-2.0
"""What the machine can do at most: speeds are shares of the roofline.

Decode reads every weight once a step, so memory bounds it; prefill multiplies every weight with every
token, so the int8 multiply-adds of the instruction set bound it. The roofline (csrc/roofline.h) is
measured in the same minutes as the speeds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

READ_BYTES = 512 << 20
"""More than any cache holds."""

PREFETCH_BYTES = (0, 2048, 4096, 16384)
"""Distances of the software prefetch that are tried; 0 leaves it to the hardware."""

_LOOP_SECONDS = 0.02


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """The best of a run."""

    threads: int
    isa: str
    read_bytes_per_second: float
    int8_ops_per_second: float
    """A multiply-add is two operations."""


class RooflineMeter:
    """Measures the roofline of one thread count, a visit at a time, between other measurements."""

    def __init__(self, threads: int, isas: Sequence[str], read_bytes: int = READ_BYTES) -> None:
        """`isas`: names of matmul.h."""
        from sparse_bitnet import _cpu

        self.threads = threads
        self._meter = _cpu.Roofline(threads, read_bytes)
        self._read: list[float] = []
        self._int8: dict[str, list[float]] = {isa: [] for isa in isas}

    def visit(self) -> None:
        """Measure everything once, in less than a tenth of a second."""
        self._read.append(max(self._meter.read_rate(distance) for distance in PREFETCH_BYTES))
        for isa in self._int8:
            self._int8[isa].append(self._meter.int8_rate(isa, _LOOP_SECONDS))

    def result(self, isa: str) -> Roofline:
        """The best of the visits so far, at least one: a neighbour can only lower what is seen."""
        return Roofline(
            threads=self.threads,
            isa=isa,
            read_bytes_per_second=max(self._read),
            int8_ops_per_second=max(self._int8[isa]),
        )
