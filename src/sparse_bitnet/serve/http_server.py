# SPDX-License-Identifier: Apache-2.0
"""Listening: uvicorn with bounds for what a client can hold, and an end in order on SIGINT or SIGTERM."""

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from sparse_bitnet.errors import UserError
from sparse_bitnet.generation.scheduler_thread import ThreadedScheduler
from sparse_bitnet.host import most_open_files
from sparse_bitnet.serve.entrance import Entrance

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LAST_EVENTS_SECONDS = 5
"""For the ends of streams to reach their clients, once the generations have ended."""
_SWITCH_SECONDS = 2e-4
_HEADER_SECONDS = 10.0
"""From a connection's start, or its last answer, to the end of the next request's headers."""
_STALL_SECONDS = 60.0
"""A client that reads nothing for so long while there is more for it is given up."""
_BACKLOG = 2048
_ACCEPTED_AT_ONCE = 16
"""asyncio accepts this many connections before the first of them can be counted."""
_MOST_CONNECTIONS = 1000
_OTHER_FILES = 96
"""Descriptors kept free for the model, for new connections until they are counted, and the like."""
_LOG_SECONDS = 60.0


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one. Raises `UserError` if it cannot be had."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise UserError(f"--host {host}: {error}") from error
    family, kind, protocol, _, address = found[0]
    bound = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":  # on Windows it would share the port with another server
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, OverflowError) as error:
        bound.close()
        raise UserError(f"cannot listen on {host} port {port}: {error}; try --port") from error
    return bound


class _Connection(H11Protocol):
    """One that waits too long for its client is closed. Where there are too many, the one goes that has
    waited longest for the rest of a request: whoever sends half requests only shuts out themselves."""

    most = 1
    _waiting_since: float = 0.0
    _deadline: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()
        if len(self.connections) > self.most:
            # This one is among them.
            idle = [c for c in self.connections if isinstance(c, _Connection) and c._is_idle]
            min(idle, key=lambda connection: connection._waiting_since)._drop()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._deadline, self._stall):
            if timer is not None:
                timer.cancel()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall = self.loop.call_later(_STALL_SECONDS, self._drop)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    @property
    def _awaits_headers(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def _is_idle(self) -> bool:
        """Nothing is being answered."""
        return self._awaits_headers or self.cycle.more_body

    def _watch(self) -> None:
        """The time for headers runs from when they are awaited, whatever trickles in meanwhile."""
        if not self._awaits_headers:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None
        elif self._deadline is None:
            self._waiting_since = self.loop.time()
            self._deadline = self.loop.call_later(_HEADER_SECONDS, self._drop)

    def _drop(self) -> None:
        self.connections.discard(self)
        # Not `close`, which waits for what has been written to be read.
        self.transport.abort()


class _OnceAMinute(logging.Filter):
    """Lets a message through if the same has not been written within a minute."""

    def __init__(self) -> None:
        super().__init__()
        self._written: dict[tuple[str, str], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        key, now = (str(record.msg).partition("\n")[0], repr(error)[:200]), time.monotonic()
        if now - self._written.get(key, -_LOG_SECONDS) < _LOG_SECONDS:
            return False
        if len(self._written) > 1000:
            self._written.clear()
        self._written[key] = now
        return True


class HttpServer(uvicorn.Server):
    """The first signal lets running generations end within the grace time, the second ends them at
    once. Either way the process ends in order instead of by the signal."""

    def __init__(self, app: FastAPI, scheduler: ThreadedScheduler, grace: float = 0.0) -> None:
        files, most = most_open_files(), _MOST_CONNECTIONS
        if files is not None:
            most = min(most, max(files - _OTHER_FILES, 1))
        config = uvicorn.Config(
            app,
            http=type("Connection", (_Connection,), {"most": most}),
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            backlog=_ACCEPTED_AT_ONCE,
            timeout_graceful_shutdown=int(grace) + _LAST_EVENTS_SECONDS,
        )
        super().__init__(config)
        self._scheduler, self._grace = scheduler, grace

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, with a longer queue of connections."""
        await super().startup(sockets)
        for bound in sockets or ():
            bound.listen(_BACKLOG)

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """As uvicorn's, without raising the signals again at the end."""
        previous = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal lets generations end, the second stops them."""
        self._scheduler.stop(0 if self.should_exit else self._grace)
        self.should_exit = True


def serve(
    app: FastAPI,
    scheduler: ThreadedScheduler,
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
    server = HttpServer(app, scheduler, grace)
    # It warns of every write to a client that has gone.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    calm = _OnceAMinute()
    for name in ("asyncio", "uvicorn.error", ThreadedScheduler.__module__, Entrance.__module__):
        logging.getLogger(name).addFilter(calm)
    scheduler.start()
    # What is there stays: collections that went through it again and again would hold up the streams.
    gc.collect()
    gc.freeze()
    interval = sys.getswitchinterval()
    # Every write to a socket gives the interpreter's lock away, and the scheduler's thread would keep it
    # for the default of 5 ms.
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        # Whoever connects at the word of `on_ready` waits in the queue and is not refused.
        bound.listen(server.config.backlog)
        on_ready()
        server.run(sockets=[bound])
    finally:
        scheduler.stop()
        scheduler.join()
        bound.close()
        sys.setswitchinterval(interval)
        gc.unfreeze()
