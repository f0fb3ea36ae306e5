# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-compatible HTTP server over the scheduler: completions, chat, embeddings, models, metrics,
and tokens of texts under the names of vLLM (prompt, messages) and llama.cpp (content)."""

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from sparse_bitnet.generation.scheduler import ThreadedScheduler
from sparse_bitnet.serve.answer import Answering
from sparse_bitnet.serve.api_error import ApiError
from sparse_bitnet.serve.entrance import AllowedHosts, Entrance
from sparse_bitnet.serve.generations import ServedModel, chat_text, encode
from sparse_bitnet.serve.messages import StrictModel
from sparse_bitnet.serve.prometheus import CONTENT_TYPE, ServerMetrics
from sparse_bitnet.serve.responses import ResponsesBody
from sparse_bitnet.serve.schema import ChatBody, CompletionBody, parse_body

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
"""A body that takes longer to arrive is given up."""


def create_app(
    model: ServedModel,
    scheduler: ThreadedScheduler,
    metrics: ServerMetrics,
    hosts: AllowedHosts,
    *,
    page: bool = True,
    log_requests: bool = False,
) -> FastAPI:
    """The application. The scheduler must have been started, with `metrics` as its observer.

    Args:
        page: a chat for browsers at /.
        log_requests: a line of JSON for each, on standard error, without what it says.
    """
    app = FastAPI(title="sparse-bitnet", openapi_url=None)
    answering = Answering(model, scheduler)
    created = int(time.time())

    async def check_key(request: Request) -> None:
        given = request.headers.get("authorization", "").encode("latin-1")
        wanted = f"Bearer {model.api_key}".encode(errors="surrogateescape")
        if model.api_key and not hmac.compare_digest(given, wanted):
            raise ApiError(
                401,
                "the API key is missing or wrong: send Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    router = APIRouter(dependencies=[Depends(check_key)])

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

    @app.get("/health")
    async def health() -> Response:
        status, load = scheduler.status, scheduler.load()
        return JSONResponse(
            {
                "status": status,
                "running": load.running,
                "waiting": load.waiting,
            },
            200 if status == "ok" else 503,
        )

    @router.get("/metrics")
    async def show_metrics() -> Response:
        return Response(metrics.text(scheduler.load()), media_type=CONTENT_TYPE)

    @router.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [entry(model.name)]})

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        return JSONResponse(entry(name))

    def answer_posts(path: str, answer: Callable[[bytes, Request], Awaitable[Response]]) -> None:
        # FastAPI would take a further parameter, even one with a default, from the query.
        async def read_and_answer(request: Request) -> Response:
            return await answer(await _read_body(request, model.max_body_bytes), request)

        router.post(path)(read_and_answer)

    async def converted(convert: Any, raw: bytes, request: Request) -> Response:
        work = partial(convert, raw, model, scheduler.capacity)
        return JSONResponse(await answering.beside(request, raw, work))

    answer_posts("/v1/completions", partial(answering.answer, CompletionBody))
    answer_posts("/v1/chat/completions", partial(answering.answer, ChatBody))
    answer_posts("/v1/responses", partial(answering.answer, ResponsesBody))
    answer_posts("/v1/embeddings", answering.embeddings)
    answer_posts("/tokenize", partial(converted, tokenize))
    answer_posts("/detokenize", partial(converted, detokenize))

    if page:
        content = (Path(__file__).parent / "page.html").read_bytes()

        # Without a key: the page asks for it.
        @app.api_route("/", methods=["GET", "HEAD"])
        async def chat_page() -> Response:
            return Response(content, media_type="text/html", headers=_PAGE_HEADERS)

    app.include_router(router)
    paths = {route.path for route in [*app.routes, *router.routes] if hasattr(route, "path")}
    app.add_middleware(
        Entrance,
        scheduler=scheduler,
        metrics=metrics,
        paths=frozenset(paths),
        hosts=hosts,
        log=log_requests,
    )
    if hosts.origins:
        # Added last, it comes first: pages read errors, too.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=sorted(hosts.origins),
            allow_methods=["GET", "POST"],
            # Clients in browsers send many of their own, such as X-Stainless-Lang.
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "X-Ignored-Parameters", "Retry-After"],
        )

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        body = ApiError(error.status_code, message).body
        return JSONResponse(body, error.status_code, error.headers)

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)

    return app


async def _read_body(request: Request, most: int) -> bytes:
    """The body, refused as soon as it is known to be too large."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Also keeps web pages of others out: browsers ask before they send this type across origins.
        raise ApiError(415, "send the body with Content-Type: application/json")
    too_large = ApiError(413, f"the body is larger than {most} bytes", code="body_too_large")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > most:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    raise too_large
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {_BODY_SECONDS:.0f} s") from None
    return bytes(body)


class TokenizeBody(StrictModel):
    """POST /tokenize: a text, or a chat that becomes one."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    add_special_tokens: bool = True
    add_special: bool = True


def tokenize(raw: bytes, model: ServedModel, most: int) -> dict[str, Any]:
    """Tokens of a text, those of a whole context at most. Raises `ApiError`."""
    body = parse_body(TokenizeBody, raw)
    model.check_name(model.name if body.model is None else body.model)
    chat = {name: value for name, value in (body.model_extra or {}).items() if value is not None}
    if chat and "messages" not in chat:
        name = next(iter(chat))
        message = f"unknown parameter: {name:.200}"
        raise ApiError(400, message, param=name[:200], code="unknown_parameter")
    if sum(text is not None for text in (body.prompt, body.content, chat.get("messages"))) != 1:
        raise ApiError(400, "give one of prompt, content and messages", param="prompt")
    if chat:
        text = chat_text(parse_body(ChatBody, chat | {"model": model.name}), model)
    else:
        text = body.prompt or body.content or ""
    adds = not chat and body.add_special_tokens and body.add_special
    tokens = encode(text, model, most, add_special_tokens=adds)
    return {"tokens": tokens, "count": len(tokens), "max_model_len": most}


class DetokenizeBody(StrictModel):
    """POST /detokenize"""

    model: str | None = None
    tokens: Annotated[
        list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=1 << 20, fail_fast=True)
    ]


def detokenize(raw: bytes, model: ServedModel, most: int) -> dict[str, Any]:
    """The text of tokens, special ones written out. Raises `ApiError`."""
    body = parse_body(DetokenizeBody, raw)
    model.check_name(model.name if body.model is None else body.model)
    model.check_tokens(body.tokens, "tokens")
    text = model.tokenizer.decode(body.tokens, skip_special_tokens=False)
    return {"prompt": text, "content": text}
