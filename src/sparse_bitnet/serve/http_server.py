# SPDX-License-Identifier: Apache-2.0
"""Listening: uvicorn with bounds for what a client can hold, and an end in order on SIGINT or SIGTERM."""

import gc
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from sparse_bitnet.errors import UserError
from sparse_bitnet.generation.scheduler import ThreadedScheduler
from sparse_bitnet.host import most_open_files

_LAST_EVENTS_SECONDS = 5
"""Seconds for the ends of streams to reach their clients after the generations have ended."""
_SWITCH_SECONDS = 2e-4
_HEADER_SECONDS = 10.0
"""Time limit from a connection's start, or its last answer, to the end of the next request's headers."""
_STALL_SECONDS = 60.0
"""A client that reads nothing for so long while there is more for it is given up."""
_BACKLOG = 2048
_ACCEPTED_AT_ONCE = 16
"""asyncio accepts this many connections before the first of them can be counted."""
_MOST_CONNECTIONS = 1000
_OTHER_FILES = 96
"""Descriptors kept free for the model, for new connections until they are counted, and the like."""


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one. Raises `UserError` if it cannot be had."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise UserError(f"--host {host}: {error}") from error
    family, kind, protocol, _, address = addresses[0]
    bound = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":  # on Windows it would share the port with another server
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, OverflowError) as error:
        bound.close()
        raise UserError(f"cannot listen on {host} port {port}: {error}; try --port") from error
    return bound


class HttpServer(uvicorn.Server):
    """Connections that wait too long for their client are closed. The first signal lets running
    generations end within the grace time, the second ends them at once."""

    def __init__(self, app: FastAPI, scheduler: ThreadedScheduler, grace: float = 0.0) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=self._connect,  # type: ignore[arg-type]
                log_level="warning",
                access_log=False,
                server_header=False,
                lifespan="off",
                ws="none",
                backlog=_ACCEPTED_AT_ONCE,
                timeout_graceful_shutdown=int(grace) + _LAST_EVENTS_SECONDS,
            )
        )
        files = most_open_files() or _MOST_CONNECTIONS + _OTHER_FILES
        self._most = min(_MOST_CONNECTIONS, max(files - _OTHER_FILES, 1))
        self._scheduler, self._grace = scheduler, grace
        self._waiting: dict[Any, float] = {}
        """Connections with what they wait for, and since when."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start like uvicorn's server, with a longer queue of connections."""
        await super().startup(sockets)
        for bound in sockets or ():
            bound.listen(_BACKLOG)

    def _connect(self, **options: Any) -> H11Protocol:
        """A new connection, of uvicorn's kind."""
        if len(self.server_state.connections) >= self._most:
            self._close_waiting()
        return H11Protocol(**options)

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second."""
        self._close_waiting()
        return await super().on_tick(counter)

    def _close_waiting(self) -> None:
        """Close connections that wait for their client: too long, or the longest where there are too
        many. Whoever sends half requests only shuts out themselves."""
        now, waiting = time.monotonic(), {}
        connections: set[Any] = self.server_state.connections
        for connection in connections:
            cycle, unread = connection.cycle, connection.transport.get_write_buffer_size()
            # Another request, or more that has been read, is a new beginning.
            if connection.flow.write_paused:
                key = (connection, cycle, unread, _STALL_SECONDS)
            elif cycle is None or cycle.response_complete:
                key = (connection, cycle, 0, _HEADER_SECONDS)
            elif cycle.more_body:  # for which the application sets a limit
                key = (connection, cycle, 0, float("inf"))
            else:
                continue
            waiting[key] = self._waiting.get(key, now)
        self._waiting = waiting
        for (connection, _, _, most), since in sorted(waiting.items(), key=lambda entry: entry[1]):
            if now - since > most or len(connections) >= self._most:
                connections.discard(connection)
                # Not `close`, which waits for what has been written to be read.
                connection.transport.abort()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal lets generations end, the second stops them. The process ends in order
        instead of by the signal, which uvicorn would raise again."""
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
