# SPDX-License-Identifier: Apache-2.0
"""The listening server: checks that a request is meant for it, and ends gracefully on a signal."""

import gc
import ipaddress
import logging
import re
import socket
import sys
from collections.abc import Collection, Iterable
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from uvicorn.protocols.http.h11_impl import H11Protocol

from sparse_bitnet.errors import UserError, library_errors_as
from sparse_bitnet.serve.api_error import ApiError
from sparse_bitnet.serve.threaded_scheduler import ThreadedScheduler

ANY = "*"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/@?#\s]+|null|\*")
"""Origin as browsers write it; "null" is that of a page opened from a file."""
_MOST_CONNECTIONS = 512
"""Half of the files that most systems let a process open."""
_BACKLOG = 128
"""Connections that wait; asyncio accepts as many before the first of them is counted."""


class AllowedHosts:
    """Host names of requests that are meant for this server: localhost, this machine's, and those of the
    options.

    With DNS rebinding, a hostile page points its own host name at this machine, and can read a server
    that ignores the Host header. IP addresses are allowed: they cannot be pointed elsewhere.
    """

    def __init__(self, names: Collection[str] = (), origins: Iterable[str] = ()) -> None:
        """`names`: other host names; `origins`: other sites whose pages may read the answers; `ANY` for
        all. Raises `UserError` for an invalid one."""
        for name in names:
            if name != ANY and not re.fullmatch(r"[\w.-]+", name) and not _is_address(name):
                raise UserError(f"--allowed-host {name}: give only a host name or an IP address")
        self._names = {name.lower() for name in ("localhost", socket.gethostname(), *names)}
        self.origins = {origin.rstrip("/").lower() for origin in origins}
        for origin in self.origins:
            if not _ORIGIN.fullmatch(origin):
                raise UserError(f"--cors-origin {origin}: write it as https://chat.example")

    def check(self, headers: Headers) -> None:
        """Raise `ApiError` for a request that is not meant for this server."""
        host, origin = ", ".join(headers.getlist("host")), headers.get("origin")
        called = _name_in(host)
        if not _is_address(called) and not {called, ANY} & self._names:
            raise _refusal("Host", host, "--allowed-host NAME")
        if origin is not None and not {origin, ANY} & self.origins:
            # A hostile page may have an address too: only the called one is ours.
            page = _name_in(origin.partition("://")[2])
            if page != called and not {page, ANY} & self._names:
                raise _refusal("Origin", origin, "--cors-origin ORIGIN")


def _name_in(host: str) -> str:
    """Return the name or address in a Host header, without its port; "" for an invalid one."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def _refusal(header: str, value: str, option: str) -> ApiError:
    message = f"{header} {value[:200]!r} is not allowed: start the server with {option}"
    return ApiError(403, message, code="host_not_allowed")


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 picks a free one. Raises `UserError` if that fails."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    with library_errors_as(f"cannot listen on --host {host} --port {port}"):
        bound = socket.create_server(
            (host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=both
        )
    # Declared as TCP's: asyncio then sends small events at once, without Nagle's 40 ms.
    return socket.socket(family, bound.type, socket.IPPROTO_TCP, bound.detach())


class HttpServer(uvicorn.Server):
    """uvicorn's server. The first signal lets running generations end within the grace time, the second
    ends them at once."""

    def __init__(self, app: Starlette, scheduler: ThreadedScheduler, grace: float = 0.0) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=self._connect,  # type: ignore[arg-type]
                log_level="warning",
                access_log=False,
                server_header=False,
                lifespan="off",
                ws="none",
                backlog=_BACKLOG,
                # Five more, for the ends of streams to reach their clients.
                timeout_graceful_shutdown=int(grace) + 5,
            )
        )
        self._app, self._scheduler, self._grace = app, scheduler, grace

    def _connect(self, **options: Any) -> H11Protocol:
        """Return a new connection. If there are too many, close those that have not sent a whole
        request: clients that send half requests shut out only themselves."""
        if len(self.server_state.connections) >= _MOST_CONNECTIONS:
            connections: list[Any] = list(self.server_state.connections)
            for connection in connections:
                connection.shutdown()  # as at the server's end: answers are completed
            for limit in self._app.state.body_limits:
                if not limit.expired():
                    limit.reschedule(0)
        return H11Protocol(**options)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Let generations finish on the first signal, and stop them on the second. The process then ends
        normally instead of by the signal, which uvicorn would raise again."""
        self._scheduler.stop(0 if self.should_exit else self._grace)
        self.should_exit = True


def serve(app: Starlette, scheduler: ThreadedScheduler, bound: socket.socket, grace: float) -> None:
    """Serve on a listening socket until SIGINT or SIGTERM; starts the scheduler and ends it. Call it in
    the main thread. Running generations get `grace` seconds to end after the first signal."""
    server = HttpServer(app, scheduler, grace)
    # asyncio warns of every write to a client that has gone.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    scheduler.start()
    # Garbage collections that scan permanent objects would delay the streams.
    gc.collect()
    gc.freeze()
    # Every write to a socket releases the GIL, and the scheduler's thread would keep it
    # for the default of 5 ms.
    sys.setswitchinterval(2e-4)
    try:
        server.run(sockets=[bound])
    finally:
        scheduler.stop()
        scheduler.join()
