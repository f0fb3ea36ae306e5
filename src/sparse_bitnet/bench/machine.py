# SPDX-License-Identifier: Apache-2.0
"""Measuring on a machine that others share: turns, what the machine can do at most, and what others used.

Decode reads every weight once a step, so memory bounds it; prefill multiplies every weight with every
token, so the int8 multiply-adds of the instruction set bound it. This roofline (csrc/roofline.h) is
measured in the same minutes as the speeds.
"""

import os
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

READ_BYTES = 512 << 20
"""More than any cache holds."""

_PREFETCH_BYTES = (0, 2048, 4096, 16384)
"""Distances of the software prefetch that are tried; 0 leaves it to the hardware."""

_LOOP_SECONDS = 0.02
_IDLE_FIELDS = (3, 4)
"""Places in the line "cpu" of /proc/stat: idle, and waiting for a disk."""

T = TypeVar("T")


def turns(groups: Iterable[Sequence[T]], rounds: int) -> Iterator[tuple[int, T]]:
    """(round, job) for every job of every round: groups in order, their jobs in another order each time.

    So a neighbour that takes the machine for a moment disturbs one value of each job, not one job's only.
    """
    shuffle, orders = random.Random(0).shuffle, [list(group) for group in groups]
    for turn in range(rounds):
        for jobs in orders:
            shuffle(jobs)
            for job in jobs:
                yield turn, job


class RooflineMeter:
    """Measures the roofline of one thread count, a visit at a time, between other measurements."""

    def __init__(self, threads: int, isas: Sequence[str], read_bytes: int = READ_BYTES) -> None:
        """`isas`: names of matmul.h."""
        from sparse_bitnet import _cpu

        self.threads = threads
        self._meter = _cpu.Roofline(threads, read_bytes)
        self._read = 0.0
        self._int8 = dict.fromkeys(isas, 0.0)

    def visit(self) -> None:
        """Measure everything once, in less than a tenth of a second; a neighbour can only lower it."""
        self._read = max(self._read, *map(self._meter.read_rate, _PREFETCH_BYTES))
        for isa, best in self._int8.items():
            self._int8[isa] = max(best, self._meter.int8_rate(isa, _LOOP_SECONDS))

    def result(self, isa: str) -> dict[str, Any]:
        """The best of the visits so far; a multiply-add is two operations."""
        speeds = {"read_bytes_per_second": self._read, "int8_ops_per_second": self._int8[isa]}
        return {"threads": self.threads, "isa": isa, **speeds}


class Contention:
    """Counts the processor time of others from its making on; Linux only."""

    def __init__(self, pids: Iterable[int] = ()) -> None:
        """`pids`: children that live on; those that end meanwhile are ours without being named."""
        self._pids = list(pids)
        self._began = self._seconds()

    def others_share(self) -> float | None:
        """Processor time that other processes used, of all there was; None where that is unknown."""
        now = self._seconds()
        if now is None or self._began is None:
            return None
        total, busy, ours = (end - start for end, start in zip(now, self._began, strict=True))
        # The three are read one after another and rounded to ticks: sums may pass what there was.
        return min(1.0, max(0.0, busy - ours) / total) if total > 0 else None

    def _seconds(self) -> tuple[float, float, float] | None:
        """All time of all processors, the busy time of it, and ours."""
        try:
            line = Path("/proc/stat").read_text().split("\n")[0]
            fields = [int(text) for text in line.split()[1:9]]
            tick = os.sysconf("SC_CLK_TCK")
            ours = sum(os.times()[:4])
            for pid in self._pids:
                # The name, in parentheses, may hold anything; user and system time are fields 14 and 15.
                stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ours += (int(stat[11]) + int(stat[12])) / tick
        except (OSError, ValueError, IndexError):
            return None
        idle = sum(fields[place] for place in _IDLE_FIELDS)
        return sum(fields) / tick, (sum(fields) - idle) / tick, ours


def warning(share: float | None) -> str | None:
    """A line for the user where others used more than a twentieth of the machine."""
    if share is None or share < 0.05:
        return None
    return (
        f"other processes used {share:.0%} of the processors meanwhile: measure again on an idle "
        "machine"
    )
