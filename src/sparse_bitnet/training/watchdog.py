"""Who is still there: heartbeats of all processes, and an end to waiting for one that is not.

Each process counts up a number in the launcher's key-value store from a thread of its own, beside the
step it has reached. When a collective fails, or no step ends within the limit, the others read the
numbers twice: one that stands still belongs to a process that died or lost its network, a smaller step
to one that is slow. No clocks of different machines are compared.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from sparse_bitnet.errors import UserError

EXIT_CODE = 75
"""Of a process that gave up waiting ("temporary failure": the same command may go on)."""


class ProcessLost(UserError):
    """Another process of the run cannot be reached; the message names it."""


class Watchdog:
    """Heartbeats of one process of a run, while the `with` block lasts."""

    def __init__(
        self,
        rank: int,
        size: int,
        timeout_seconds: float,
        *,
        give_up: Callable[[str], None] | None = None,
    ) -> None:
        """Prepare.

        Args:
            rank, size: of this process, and of the run.
            timeout_seconds: longest time without `progress`.
            give_up: called with the diagnosis when it is over, from the thread; default: print it
                and end the process, since a collective that hangs cannot be called off.
        """
        self.rank, self.size, self.timeout = rank, size, timeout_seconds
        self.interval = min(5.0, max(0.1, timeout_seconds / 20))
        self._give_up = give_up or self._end_process
        self._stop = threading.Event()
        self._step, self._last = 0, time.monotonic()
        self._store: dist.Store | None = None
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        # A connection of its own: the main thread may be blocked inside the group's.
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=max(1.0, min(30.0, self.timeout))),
        )
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = dist.PrefixStore(f"heartbeat/{attempt}", store)
        self.progress(0)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join(timeout=2 * self.interval)

    def progress(self, step: int | None = None) -> None:
        """This process gets on (and has finished `step`): the time starts anew."""
        self._last = time.monotonic()
        if step is not None:
            self._step = step

    def diagnose(self) -> str:
        """Which processes are gone or behind, as far as the store tells; empty when none is."""
        try:
            first = self._read()
            time.sleep(3 * self.interval)
            second = self._read()
        except RuntimeError as error:
            return (
                f"rank {self.rank}: the key-value store at {os.environ.get('MASTER_ADDR')} does not "
                f"answer ({_first_line(error)}): its machine, of rank 0, is down or unreachable"
            )
        missing = [rank for rank in range(self.size) if rank not in second]
        gone = [
            rank
            for rank, beat in second.items()
            if rank != self.rank and first.get(rank, {}).get("count") == beat["count"]
        ]
        ahead = max(beat["step"] for beat in second.values())
        slow = [
            rank
            for rank, beat in second.items()
            if rank not in gone and beat["step"] < ahead and rank != self.rank
        ]
        parts = [f"rank {rank} never appeared" for rank in missing]
        parts += [
            f"{_name(rank, second[rank])} died or lost its network, last heard of at step "
            f"{second[rank]['step']}"
            for rank in gone
        ]
        parts += [
            f"{_name(rank, second[rank])} is slow: at step {second[rank]['step']}, others at {ahead}"
            for rank in slow
        ]
        return "; ".join(parts)

    def _read(self) -> dict[int, dict[str, Any]]:
        assert self._store is not None
        beats = {}
        for rank in range(self.size):
            if self._store.check([str(rank)]):
                beats[rank] = json.loads(self._store.get(str(rank)))
        return beats

    def _run(self) -> None:
        assert self._store is not None
        count = 0
        host, pid = socket.gethostname(), os.getpid()
        while not self._stop.is_set():
            count += 1
            beat = {"count": count, "step": self._step, "host": host, "pid": pid}
            with contextlib.suppress(RuntimeError):  # the diagnosis says so when it matters
                self._store.set(str(self.rank), json.dumps(beat))
            if time.monotonic() - self._last > self.timeout:
                found = self.diagnose() or "all processes are alive, at the same step"
                self._give_up(f"rank {self.rank}: no step ended for {self.timeout:.0f} s: {found}")
                return
            self._stop.wait(self.interval)

    def _end_process(self, message: str) -> None:
        print(f"sparse-bitnet: {message}; start the run again", file=sys.stderr, flush=True)
        os._exit(EXIT_CODE)


def is_communication_error(error: BaseException) -> bool:
    """Whether an exception of torch means that processes cannot reach each other."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    words = ("gloo", "nccl", "connection", "timed out", "socket")
    return isinstance(error, RuntimeError) and any(word in text for word in words)


def _name(rank: int, beat: dict[str, Any]) -> str:
    return f"rank {rank} ({beat['host']}, process {beat['pid']})"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
