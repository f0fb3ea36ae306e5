# SPDX-License-Identifier: Apache-2.0
"""How much of the machine others used while something was measured: whether to believe the numbers."""

import os
from collections.abc import Iterable
from pathlib import Path

_IDLE_FIELDS = (3, 4)
"""Of the line "cpu" in /proc/stat: idle, and waiting for a disk."""


class Contention:
    """Counts from its making on; Linux only."""

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
        """Of all processors: all time, busy time, time of ours."""
        try:
            line = Path("/proc/stat").read_text().split("\n")[0]
            fields = [int(text) for text in line.split()[1:9]]
            tick = os.sysconf("SC_CLK_TCK")
            ours = sum(map(_process_ticks, self._pids)) / tick
            ours += sum(os.times()[:4])
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


def _process_ticks(pid: int) -> int:
    text = Path(f"/proc/{pid}/stat").read_text()
    # The name, in parentheses, may hold anything; user and system time are fields 14 and 15.
    fields = text.rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
