"""The server as a process: its socket, its signals, and an end that leaves no stream hanging."""

import signal
import socket
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from fastapi import FastAPI

from sparse_bitnet.errors import UserError
from sparse_bitnet.generation.scheduler import Scheduler

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LAST_EVENTS_SECONDS = 5
"""For the ends of streams to reach their clients, once the generations have ended."""
_SWITCH_SECONDS = 2e-4


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one. Raises `UserError` if it cannot be had."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise UserError(f"--host {host}: {error}") from error
    family, kind, protocol, _, address = found[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, OverflowError) as error:
        bound.close()
        raise UserError(f"cannot listen on {host} port {port}: {error}; try --port") from error
    return bound


class _Server(uvicorn.Server):
    """The first signal lets running generations end within the grace time, the second ends them at
    once. Either way the process ends in order instead of by the signal."""

    def __init__(self, config: uvicorn.Config, scheduler: Scheduler, grace: float) -> None:
        super().__init__(config)
        self._scheduler, self._grace = scheduler, grace

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        previous = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._scheduler.stop(0 if self.should_exit else self._grace)
        self.should_exit = True


def serve(
    app: FastAPI,
    scheduler: Scheduler,
    bound: socket.socket,
    *,
    grace: float,
    on_ready: Callable[[], None],
) -> None:
    """Serve until SIGINT or SIGTERM; starts the scheduler and ends it. From the main thread.

    Args:
        grace: seconds that running generations get to end after the first signal.
        on_ready: called just before requests are taken.
    """
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=int(grace) + _LAST_EVENTS_SECONDS,
    )
    scheduler.start()
    interval = sys.getswitchinterval()
    # Every write to a socket gives the interpreter's lock away, and the scheduler's thread would keep it
    # for the default of 5 ms.
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        on_ready()
        _Server(config, scheduler, grace).run(sockets=[bound])
    finally:
        scheduler.stop()
        scheduler.join()
        bound.close()
        sys.setswitchinterval(interval)
