# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-compatible HTTP server over the scheduler: completions, chat, embeddings, models, metrics,
and tokenisation under the names of vLLM (prompt, messages) and llama.cpp (content)."""

import asyncio
import hmac
import json
import logging
import re
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sparse_bitnet.errors import UserError
from sparse_bitnet.generation.request import Generation
from sparse_bitnet.generation.scheduler import Observer
from sparse_bitnet.serve.answer import Answering
from sparse_bitnet.serve.api_error import ApiError
from sparse_bitnet.serve.generations import ServedModel, detokenize, tokenize
from sparse_bitnet.serve.http_server import AllowedHosts
from sparse_bitnet.serve.responses import ResponsesBody
from sparse_bitnet.serve.schema import ChatBody, CompletionBody
from sparse_bitnet.serve.threaded_scheduler import Load, ThreadedScheduler

_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""Headers of the chat page: even unescaped output of a model cannot reach beyond this server."""
_BODY_SECONDS = 60.0
"""Time limit for a request body to arrive."""
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_log = logging.getLogger(__name__)
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_METRICS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "requests": (Counter, "Generations ended, by outcome", {"labelnames": ["outcome"]}),
    "http_responses": (Counter, "HTTP responses", {"labelnames": ["path", "status"]}),
    "prompt_tokens": (Counter, "Prompt tokens", {}),
    "cached_tokens": (Counter, "Prompt tokens taken from the KV cache", {}),
    "generated_tokens": (Counter, "Tokens generated", {}),
    "draft_tokens": (Counter, "Draft tokens computed", {}),
    "accepted_tokens": (Counter, "Draft tokens accepted", {}),
    "preemptions": (Counter, "Generations paused because the cache was full", {}),
    "queue_length": (Gauge, "Generations waiting", {}),
    "running": (Gauge, "Generations running", {}),
    "cache_tokens": (Gauge, "Tokens the KV cache has room for", {}),
    "cache_used_tokens": (Gauge, "Tokens of the KV cache in use", {}),
    "kept_prefixes": (Gauge, "Ended sequences kept for prefix reuse", {}),
    "time_to_first_token_seconds": (Histogram, "Arrival to first token", {"buckets": _SECONDS}),
    "time_per_token_seconds": (Histogram, "Between tokens", {"buckets": _TOKEN_SECONDS}),
    "request_seconds": (Histogram, "Arrival to end", {"buckets": _SECONDS}),
}


class ServerMetrics(Observer):
    """Metrics of one scheduler in their own registry, so that two servers in a process do not mix."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._metrics = {
            name: kind(f"sparse_bitnet_{name}", text, registry=registry, **options)
            for name, (kind, text, options) in _METRICS.items()
        }

    def token(self, seconds: float, first: bool) -> None:
        self._metrics["generated_tokens"].inc()
        name = "time_to_first_token_seconds" if first else "time_per_token_seconds"
        self._metrics[name].observe(seconds)

    def ended(self, generation: Generation) -> None:
        self._metrics["requests"].labels(generation.finish_reason).inc()
        self._metrics["request_seconds"].observe(time.perf_counter() - generation.arrived)
        for name, tokens in (
            ("prompt_tokens", generation.prompt_tokens if generation.started else 0),
            ("cached_tokens", generation.cached_tokens),
            ("draft_tokens", generation.draft_tokens),
            ("accepted_tokens", generation.accepted_tokens),
            ("preemptions", generation.pauses),
        ):
            self._metrics[name].inc(tokens)

    def responded(self, path: str, status: int) -> None:
        """Count an HTTP response that has begun; `path` is one of the server's own."""
        self._metrics["http_responses"].labels(path, str(status)).inc()

    def text(self, load: Load) -> bytes:
        """Return the exposition, with the gauges set to `load`."""
        self._metrics["queue_length"].set(load.waiting)
        self._metrics["running"].set(load.running)
        self._metrics["cache_tokens"].set(load.cache_tokens)
        self._metrics["cache_used_tokens"].set(load.cache_tokens - load.free_tokens)
        self._metrics["kept_prefixes"].set(load.kept_prefixes)
        return generate_latest(self._registry)


def create_app(
    model: ServedModel,
    scheduler: ThreadedScheduler,
    metrics: ServerMetrics,
    hosts: AllowedHosts,
    log_requests: bool = False,
) -> Starlette:
    """Return the application. The scheduler must have been started, with `metrics` as its observer.
    `log_requests` as in `ServeConfig`."""
    answering = Answering(model, scheduler)
    created = int(time.time())
    body_limits: set[asyncio.Timeout] = set()

    async def health(request: Request) -> Response:
        status, load = scheduler.status, scheduler.load()
        content = {"status": status, "running": load.running, "waiting": load.waiting}
        return JSONResponse(content, 200 if status == "ok" else 503)

    async def chat_page(request: Request) -> Response:
        return FileResponse(Path(__file__).parent / "page.html", headers=_PAGE_HEADERS)

    async def show_metrics(request: Request) -> Response:
        return Response(metrics.text(scheduler.load()), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    def entry(name: str) -> dict[str, Any]:
        model.check_name(name)
        return {
            "id": model.name,
            "object": "model",
            "created": created,
            "owned_by": "sparse-bitnet",
            "max_model_len": scheduler.capacity,
            "embedding_pooling": model.pooling,
        }

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [entry(model.name)]})

    async def one_model(request: Request) -> Response:
        return JSONResponse(entry(request.path_params["name"]))

    async def converted(convert: Any, raw: bytes, request: Request) -> Response:
        work = partial(convert, raw, model, scheduler.capacity)
        return JSONResponse(await answering.in_thread(work))

    def posted(path: str, answer: Callable[[bytes, Request], Awaitable[Response]]) -> Route:
        async def read_and_answer(request: Request) -> Response:
            raw = await _read_body(request, model.max_body_bytes, body_limits)
            return await answer(raw, request)

        return Route(path, read_and_answer, methods=["POST"])

    routes = [
        Route("/", chat_page),
        Route("/health", health),
        Route("/metrics", show_metrics),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", one_model),
        posted("/v1/completions", partial(answering.answer, CompletionBody)),
        posted("/v1/chat/completions", partial(answering.answer, ChatBody)),
        posted("/v1/responses", partial(answering.answer, ResponsesBody)),
        posted("/v1/embeddings", answering.embeddings),
        posted("/tokenize", partial(converted, tokenize)),
        posted("/detokenize", partial(converted, detokenize)),
    ]
    paths = frozenset(route.path for route in routes)
    middleware = [Middleware(Entrance, model, scheduler, metrics, hosts, paths, log_requests)]
    if hosts.origins:
        # First, so that web pages can read errors too.
        cors = Middleware(
            CORSMiddleware,
            allow_origins=sorted(hosts.origins),
            allow_methods=["GET", "POST"],
            # Browser clients send headers of their own, such as X-Stainless-Lang.
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "X-Ignored-Parameters", "Retry-After"],
        )
        middleware.insert(0, cors)
    handlers = {HTTPException: _http_error}
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
    app.state.body_limits = body_limits
    return app


async def _http_error(request: Request, error: Any) -> Response:
    message = f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse(ApiError(error.status_code, message).body, error.status_code, error.headers)


async def _read_body(request: Request, most: int, limits: set[asyncio.Timeout]) -> bytes:
    """Return the body. `limits` holds the time limits of the bodies that are being read."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Also keeps foreign web pages out: browsers send this type across origins only if allowed.
        raise ApiError(415, "send the body with Content-Type: application/json")
    body, limit = bytearray(), asyncio.timeout(_BODY_SECONDS)
    limits.add(limit)
    try:
        async with limit:
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    message = f"the body is larger than {most} bytes"
                    raise ApiError(413, message, code="body_too_large")
    except TimeoutError:
        raise ApiError(408, "the body did not arrive in time") from None
    finally:
        limits.discard(limit)
    return bytes(body)


@dataclass
class Entrance:
    """ASGI middleware: refuses requests that are not meant for this server, and gives the others an id,
    counts and logs them. An exception becomes an error object here, unless the answer has begun.
    Generations end with their request."""

    app: ASGIApp
    model: ServedModel
    scheduler: ThreadedScheduler
    metrics: ServerMetrics
    hosts: AllowedHosts
    paths: frozenset[str]
    """Paths that the server answers."""
    log: bool
    """Write a line of JSON for each request to standard error, without its text."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Clients must not be able to add labels to metrics.
        path = scope["path"] if scope["path"] in self.paths else "other"
        began, status, headers = time.perf_counter(), 0, Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _ID.fullmatch(given) else uuid.uuid4().hex

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self.metrics.responded(path, status)
                more = [(b"x-request-id", request_id.encode())]
                if status in (429, 503):
                    more.append((b"retry-after", b"1"))
                if status == 401:
                    more.append((b"www-authenticate", b"Bearer"))
                message["headers"] = [*message.get("headers", ()), *more]
            await send(message)

        try:
            self.hosts.check(headers)
            if path not in ("/", "/health"):  # the page itself asks for the key
                self._check_key(headers)
            await self.app(scope, receive, counted)
        except Exception as error:
            if status:
                raise
            if isinstance(error, UserError):
                error = ApiError(400, str(error))
            elif isinstance(error, ClientDisconnect):
                error = ApiError(499, "the client has disconnected")
            elif not isinstance(error, ApiError):
                _log.error("%s %s failed", scope["method"], path, exc_info=error)
                error = ApiError(500, "internal error; the server's log has more")
            await JSONResponse(error.body, error.status)(scope, receive, counted)
        finally:
            if generations := scope.get("generations"):
                self.scheduler.cancel(*generations)
            if self.log:
                entry = {
                    "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                    "request_id": request_id,
                    "method": scope["method"],
                    "path": path,
                    "status": status,
                    "seconds": round(time.perf_counter() - began, 4),
                }
                if generations:
                    prompts = {id(g.request.prompt): g.prompt_tokens for g in generations}
                    entry["prompt_tokens"] = sum(prompts.values())  # n answers share one
                    entry["generated_tokens"] = sum(g.generated for g in generations)
                print(json.dumps(entry), file=sys.stderr, flush=True)

    def _check_key(self, headers: Headers) -> None:
        key, given = self.model.api_key, headers.get("authorization", "").encode("latin-1")
        if key and not hmac.compare_digest(given, f"Bearer {key}".encode(errors="surrogateescape")):
            message = "the API key is missing or wrong: send Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key")
