# SPDX-License-Identifier: Apache-2.0
"""What every request passes: is it meant for this server, what is it called, how did it end. Plain ASGI:
streams pass through untouched."""

import json
import logging
import re
import sys
import time
import uuid
from datetime import UTC, datetime
from typing import TextIO

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sparse_bitnet.errors import UserError
from sparse_bitnet.serve.allowed_hosts import AllowedHosts
from sparse_bitnet.serve.api_error import ApiError
from sparse_bitnet.serve.prometheus import ServerMetrics

_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_log = logging.getLogger(__name__)


class Entrance:
    """Refuses what is not meant for this server; names, counts and logs the others. What an answer fails
    with becomes an error object here, unless the answer has begun."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: ServerMetrics,
        paths: frozenset[str],
        hosts: AllowedHosts,
        log: bool = False,
    ) -> None:
        """`paths`: the server's own; `log`: a line of JSON for each request, without what it says."""
        self._app, self._metrics, self._paths, self._hosts = app, metrics, paths, hosts
        self._log: TextIO | None = sys.stderr if log else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Labels and logs must not grow with what clients make up.
        path = scope["path"] if scope["path"] in self._paths else "other"
        began, status = time.perf_counter(), 0
        scope["request_id"] = _request_id(scope)

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._metrics.responded(path, status)
                more = [(b"x-request-id", scope["request_id"].encode())]
                if status in (429, 503):
                    more.append((b"retry-after", b"1"))
                message["headers"] = [*message.get("headers", ()), *more]
            await send(message)

        try:
            self._hosts.check(scope)
            await self._app(scope, receive, counted)
        except Exception as error:
            if status:
                raise
            found = _answer(error)
            if found.status >= 500 and found is not error:
                _log.error("%s %s failed", scope["method"], path, exc_info=error)
            await JSONResponse(found.body, found.status, found.headers)(scope, receive, counted)
        finally:
            if self._log is not None:
                entry = {
                    "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                    "request_id": scope["request_id"],
                    "method": scope["method"],
                    "path": path,
                    "status": status,
                    "seconds": round(time.perf_counter() - began, 4),
                }
                if generations := scope.get("generations"):
                    entry["prompt_tokens"] = sum(g.prompt_tokens for g in generations)
                    entry["generated_tokens"] = sum(g.generated for g in generations)
                print(json.dumps(entry), file=self._log, flush=True)


def _answer(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UserError):
        return ApiError(400, str(error))
    return ApiError(500, "internal error; the server's log has more")


def _request_id(scope: Scope) -> str:
    """The client's, or a new one."""
    given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"]
    return given[0] if given and _ID.fullmatch(given[0]) else uuid.uuid4().hex
