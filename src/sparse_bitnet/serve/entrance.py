# SPDX-License-Identifier: Apache-2.0
"""ASGI middleware for every request: checks the allowed hosts, sets the request id, counts and logs the
outcome. Streams pass through untouched."""

import ipaddress
import json
import logging
import re
import socket
import sys
import time
import uuid
from collections.abc import Collection, Iterable
from datetime import UTC, datetime

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sparse_bitnet.errors import UserError
from sparse_bitnet.generation.scheduler import ThreadedScheduler
from sparse_bitnet.serve.api_error import ApiError
from sparse_bitnet.serve.prometheus import ServerMetrics

ANY = "*"
_HOST = re.compile(r"(\[[^][/@\s]+\]|[^][:/@?#\s]+)(:\d*)?")
_ORIGIN = re.compile(rf"[a-z][a-z0-9+.-]*://{_HOST.pattern}|null|\*")
"""Origin as browsers write it; "null" is that of a page opened from a file."""
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_log = logging.getLogger(__name__)


class AllowedHosts:
    """The names and addresses by which a server is called.

    A page of a stranger can point its own name at this machine's address and then read what it likes
    from a server that does not look at the name it was called by. Numbers cannot be pointed elsewhere.
    """

    def __init__(
        self, listening: str, names: Collection[str] = (), origins: Iterable[str] = ()
    ) -> None:
        """
        Args:
            listening: the address of the socket.
            names: further ones, `ANY` for whatever comes.
            origins: of pages elsewhere that may read the answers, such as https://chat.example; `ANY`.

        Raises `UserError` for what is no name, and for an origin that no browser sends.
        """
        for name in names:
            if name != ANY and not _name_in(name):
                raise UserError(f"--allowed-host {name}: give a name or an address alone")
        self.origins = frozenset(origin.rstrip("/").lower() for origin in origins)
        for origin in self.origins:
            if not _ORIGIN.fullmatch(origin):
                raise UserError(f"--cors-origin {origin}: write it as https://chat.example")
        address = ipaddress.ip_address(listening.partition("%")[0])
        self._is_open = ANY in names
        self._takes_numbers = address.is_unspecified
        """Listening on all addresses: any of them may be meant."""
        self._names = {_name_in(name) for name in names} | {str(address)}
        if address.is_loopback or address.is_unspecified:
            self._names |= {"localhost", "127.0.0.1", "::1"}
        if address.is_unspecified:
            self._names.add(_name_in(socket.gethostname()))
        self._names.discard("")

    def check(self, scope: Scope) -> None:
        """Raise `ApiError` for a request that is not meant for this server."""
        headers = [(name, value.decode("latin-1")) for name, value in scope["headers"]]
        host = ", ".join(value for name, value in headers if name == b"host")
        called = _name_in(host)
        if not (self._allows(called) or (self._takes_numbers and _is_address(called))):
            raise _refusal("Host", host)
        for name, origin in headers:
            if name != b"origin" or {origin, ANY} & self.origins:
                continue
            # A stranger's page may stand at a number too: only the one that was called is ours.
            page = _name_in(origin.partition("://")[2])
            if page != called and not self._allows(page):
                raise _refusal("Origin", origin)

    def _allows(self, name: str) -> bool:
        return self._is_open or name in self._names


def _name_in(host: str) -> str:
    """The name or the address of a Host, without its port; "" for what is none."""
    host = f"[{host}]" if _is_address(host) and ":" in host else host
    match = _HOST.fullmatch(host.lower())
    return match[1].strip("[]").rstrip(".") if match else ""


def _is_address(name: str) -> bool:
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def _refusal(header: str, value: str) -> ApiError:
    message = f"{header} {value[:200]!r} is not one of this server's names"
    message += ": start it with --allowed-host NAME"
    return ApiError(403, message, code="host_not_allowed", headers={"Connection": "close"})


class Entrance:
    """Refuses what is not meant for this server; names, counts and logs the others. What an answer fails
    with becomes an error object here, unless the answer has begun. Generations end with it."""

    def __init__(
        self,
        app: ASGIApp,
        scheduler: ThreadedScheduler,
        metrics: ServerMetrics,
        paths: frozenset[str],
        hosts: AllowedHosts,
        log: bool = False,
    ) -> None:
        """`paths`: the server's own; `log`: a line of JSON for each request, without what it says."""
        self._app, self._scheduler, self._metrics = app, scheduler, metrics
        self._paths, self._hosts = paths, hosts
        self._log_file = sys.stderr if log else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Labels and logs must not grow with what clients make up.
        path = scope["path"] if scope["path"] in self._paths else "other"
        began, status = time.perf_counter(), 0
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        request_id = given if _ID.fullmatch(given) else uuid.uuid4().hex

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._metrics.responded(path, status)
                more = [(b"x-request-id", request_id.encode())]
                if status in (429, 503):
                    more.append((b"retry-after", b"1"))
                message["headers"] = [*message.get("headers", ()), *more]
            await send(message)

        try:
            self._hosts.check(scope)
            if {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}:
                # Which of the two counts is where proxies and servers disagree.
                message = "Content-Length and Transfer-Encoding together: send one of them"
                raise ApiError(400, message, headers={"Connection": "close"})
            await self._app(scope, receive, counted)
        except Exception as error:
            if status:
                raise
            if isinstance(error, UserError):
                error = ApiError(400, str(error))
            if not isinstance(error, ApiError):
                _log.error("%s %s failed", scope["method"], path, exc_info=error)
                error = ApiError(500, "internal error; the server's log has more")
            await JSONResponse(error.body, error.status, error.headers)(scope, receive, counted)
        finally:
            if generations := scope.get("generations"):
                self._scheduler.cancel(*generations)
            if self._log_file is not None:
                entry = {
                    "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                    "request_id": request_id,
                    "method": scope["method"],
                    "path": path,
                    "status": status,
                    "seconds": round(time.perf_counter() - began, 4),
                }
                if generations:
                    entry["prompt_tokens"] = sum(g.prompt_tokens for g in generations)
                    entry["generated_tokens"] = sum(g.generated for g in generations)
                print(json.dumps(entry), file=self._log_file, flush=True)
