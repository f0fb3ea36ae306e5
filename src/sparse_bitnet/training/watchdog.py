# SPDX-License-Identifier: Apache-2.0
"""Who is still there: heartbeats of all processes, and an end to waiting for one that is not.

torchrun starts all processes again when one of them ends. It does not see one that hangs, is slow or has
lost its network, and says of none of them which it was; that is what this file is for. Each process
counts up a number in the launcher's key-value store from a thread of its own, beside the step it has
reached. When a collective fails, or no step ends within the limit, the others read the numbers twice:
one that stands still belongs to a process that died or lost its network, a smaller step to one that is
slow. No clocks of different machines are compared.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from sparse_bitnet.errors import UserError, reason_of

EXIT_CODE = 75
"""Of a process that gave up waiting ("temporary failure": the same command may go on)."""


class ProcessLost(UserError):
    """Another process of the run cannot be reached; the message names it."""


@dataclass(frozen=True, kw_only=True)
class _Found:
    """What the beats of the others tell; texts are empty where there is nothing to say."""

    lost: str = ""
    slow: str = ""
    busy: bool = False

    def __str__(self) -> str:
        return "; ".join(part for part in (self.lost, self.slow) if part)


class Watchdog:
    """Heartbeats of one process of a run, while the `with` block lasts."""

    def __init__(
        self,
        rank: int,
        size: int,
        timeout_seconds: float,
        *,
        name: str,
        give_up: Callable[[str], None] | None = None,
    ) -> None:
        """Prepare.

        Args:
            rank, size: of this process, and of the run.
            timeout_seconds: longest time without `progress`.
            name: of their rendezvous, so that no beat of a dead process is heard.
            give_up: called with the diagnosis when it is over, from the thread; default: print it
                and end the process, since a collective that hangs cannot be called off.
        """
        self.rank, self.size, self.timeout, self.name = rank, size, timeout_seconds, name
        self.interval = min(1.0, max(0.1, timeout_seconds / 20))
        self._give_up = give_up or self._end_process
        self._stop = threading.Event()
        self._step, self._last, self._busy = 0, time.monotonic(), 0
        self._store: dist.Store | None = None
        # The second waits for nothing but the clock: the first may hang in a connection that is gone.
        self._threads = [
            threading.Thread(target=self._beat, name="heartbeat", daemon=True),
            threading.Thread(target=self._watch, name="watchdog", daemon=True),
        ]

    def __enter__(self) -> "Watchdog":
        # A connection of its own: the main thread may be blocked inside the group's.
        store = launcher_store(self._store_seconds)
        self._store = dist.PrefixStore(f"heartbeat/{self.name}", store)
        self.progress(0)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=2 * self.interval)

    @property
    def _store_seconds(self) -> float:
        """Longest wait for an answer of the store."""
        return max(1.0, min(10.0, self.timeout))

    @property
    def _diagnosis_seconds(self) -> float:
        return 4 * self.interval + self._store_seconds

    @property
    def longest_silence(self) -> float:
        """Seconds within which this gives up for sure, its diagnosis included."""
        return self.timeout + self.interval + 2 * self._diagnosis_seconds

    def progress(self, step: int | None = None) -> None:
        """This process gets on (and has finished `step`): the time starts anew."""
        self._last = time.monotonic()
        if step is not None:
            self._step = step

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Work of this process alone that may take any time, such as an export: as long as its beat
        goes on, nobody gives up."""
        self._busy += 1
        try:
            yield
        finally:
            self.progress()
            self._busy -= 1

    def diagnose(self) -> str:
        """Which processes are gone or behind, as far as the store tells; empty when none is.

        Takes no longer than a few heartbeats and an answer of the store.
        """
        return str(self._asked())

    def lost(self) -> str:
        """As `diagnose`, of processes that are gone."""
        return self._asked().lost

    def _asked(self) -> "_Found":
        found: list[_Found] = []
        asking = threading.Thread(target=lambda: found.append(self._ask()), daemon=True)
        asking.start()
        asking.join(timeout=self._diagnosis_seconds)
        return found[0] if found else _Found(lost=self._no_answer("no answer"))

    def _no_answer(self, reason: str) -> str:
        where = os.environ.get("MASTER_ADDR")
        return (
            f"the key-value store at {where} does not answer ({reason}): the machine of rank 0 is "
            "down, or this one has lost its network"
        )

    def _ask(self) -> "_Found":
        try:
            first = self._read()
            time.sleep(3 * self.interval)
            second = self._read()
        except RuntimeError as error:
            return _Found(lost=self._no_answer(reason_of(error)))
        lost = [f"rank {rank} never appeared" for rank in range(self.size) if rank not in second]
        others = {rank: beat for rank, beat in second.items() if rank != self.rank}
        ahead = max(beat["step"] for beat in second.values())
        slow, busy = [], False
        for rank, beat in others.items():
            if first.get(rank, {}).get("count") == beat["count"]:
                lost.append(
                    f"{_name(rank, beat)} died or lost its network, last heard of at step "
                    f"{beat['step']}"
                )
            else:
                busy = busy or beat["busy"]
                if beat["step"] < ahead:
                    slow.append(
                        f"{_name(rank, beat)} is slow: at step {beat['step']}, others at {ahead}"
                    )
        return _Found(lost="; ".join(lost), slow="; ".join(slow), busy=busy)

    def _read(self) -> dict[int, dict[str, Any]]:
        """The last beat of every rank that has appeared, in one or two round trips."""
        assert self._store is not None
        names = [str(rank) for rank in range(self.size)]
        if not self._store.check(names):
            names = [name for name in names if self._store.check([name])]
        beats = self._store.multi_get(names) if names else []
        return {int(name): json.loads(beat) for name, beat in zip(names, beats, strict=True)}

    def _beat(self) -> None:
        assert self._store is not None
        count = 0
        host, pid = socket.gethostname(), os.getpid()
        while not self._stop.is_set():
            count += 1
            beat = {
                "count": count,
                "step": self._step,
                "busy": self._busy > 0,
                "host": host,
                "pid": pid,
            }
            with contextlib.suppress(RuntimeError):  # the diagnosis says so when it matters
                self._store.set(str(self.rank), json.dumps(beat))
            self._stop.wait(self.interval)

    def _watch(self) -> None:
        while not self._stop.wait(self.interval):
            if not self._is_late():
                continue
            said = self._asked()
            if said.busy and not said.lost:
                self.progress()
            # The step may have ended while the others were asked, or all be over.
            elif self._is_late() and not self._stop.is_set():
                found = str(said) or "all processes are alive, at the same step"
                self._give_up(f"rank {self.rank}: no step ended for {self.timeout:.0f} s: {found}")
                return

    def _is_late(self) -> bool:
        return not self._busy and time.monotonic() - self._last > self.timeout

    def _end_process(self, message: str) -> None:
        print(f"sparse-bitnet: {message}; start the run again", file=sys.stderr, flush=True)
        os._exit(EXIT_CODE)


def launcher_store(seconds: float, *, is_master: bool = False) -> dist.Store:
    """A connection to the key-value store that the processes of a run share; the master makes it.

    `seconds` is the longest wait for an answer."""
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=is_master,
        wait_for_workers=False,
        timeout=timedelta(seconds=seconds),
    )


def is_communication_error(error: BaseException) -> bool:
    """Whether an exception of torch means that processes cannot reach each other."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    words = ("gloo", "nccl", "connection", "timed out", "socket")
    return isinstance(error, RuntimeError) and any(word in text for word in words)


def _name(rank: int, beat: dict[str, Any]) -> str:
    return f"rank {rank} ({beat['host']}, process {beat['pid']})"
