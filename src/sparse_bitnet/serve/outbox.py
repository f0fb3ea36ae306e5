# SPDX-License-Identifier: Apache-2.0
"""From the scheduler's thread to the event loop: what a step brings goes over at once.

Each call across wakes the loop, which then takes the interpreter from the scheduler while that still
chooses tokens: of 32 streams, 32 times a step. Woken once, the loop writes while the engine computes.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class Outbox:
    """Calls for event loops, kept until they are sent. Of one thread alone, the scheduler's."""

    def __init__(self) -> None:
        self._kept: dict[asyncio.AbstractEventLoop, list[tuple[Callable[..., Any], Any]]] = {}

    def add(self, loop: asyncio.AbstractEventLoop, take: Callable[[Any], Any], what: Any) -> None:
        """`take(what)` is to be called in the loop."""
        self._kept.setdefault(loop, []).append((take, what))

    def send(self) -> None:
        """Pass all on, in order. A loop that has ended has nobody left to tell."""
        kept, self._kept = self._kept, {}
        for loop, calls in kept.items():
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_call_all, calls)


def _call_all(calls: list[tuple[Callable[..., Any], Any]]) -> None:
    for take, what in calls:
        take(what)
