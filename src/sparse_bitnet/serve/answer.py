# SPDX-License-Identifier: Apache-2.0
"""The generations of one request on their way to the client: as one object, as events, or as vectors."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from sparse_bitnet.engine.protocol import ContextFull
from sparse_bitnet.errors import UserError
from sparse_bitnet.generation.grammar import GrammarFailed
from sparse_bitnet.generation.request import Generation, GenerationRequest, Output
from sparse_bitnet.generation.scheduler import QueueFull, Stopping, ThreadedScheduler
from sparse_bitnet.serve.api_error import ApiError
from sparse_bitnet.serve.generations import (
    Deliver,
    Prepared,
    ServedModel,
    embedding_requests,
    requests_of,
)
from sparse_bitnet.serve.replies import Choice, Reply, vectors_reply
from sparse_bitnet.serve.responses import ResponsesBody, ResponsesReply
from sparse_bitnet.serve.schema import Body, EmbeddingsBody, parse_body

Result = TypeVar("Result")
Outputs = asyncio.Queue[tuple[int, Output]]
"""Numbers of generations, and what is new of them."""
_SCORES_AT_ONCE = 64
"""Maximum number of token scores in one event."""
KEEP_ALIVE_SECONDS = 5.0
"""A stream that waits longer sends a comment, so that no proxy takes the connection for dead; whether
the client of another answer is still there is looked at as often."""
_NOTHING = Output("")
_FAILURES = ("cancelled", "shutdown", "error")


class Answering:
    """Answers requests for generations."""

    def __init__(self, model: ServedModel, scheduler: ThreadedScheduler) -> None:
        self._model, self._scheduler = model, scheduler
        self._loop: asyncio.AbstractEventLoop | None = None
        self._undelivered: list[tuple[Outputs, tuple[int, Output]]] = []
        scheduler.delivered = self._deliver
        # A grammar may take long. One at a time, so that requests without one find a thread.
        self._reading, self._compiling = asyncio.Semaphore(4), asyncio.Semaphore(1)

    async def answer(
        self, kind: type[Body | ResponsesBody], raw: bytes, request: Request
    ) -> Response:
        """Start the generations. Raises `ApiError` if they cannot be started or, not streamed, fail."""
        outputs, deliver = self._outputs()

        def read() -> tuple[Body | ResponsesBody, Prepared]:
            asked = parse_body(kind, raw)
            body = asked.chat() if isinstance(asked, ResponsesBody) else asked
            return asked, requests_of(body, self._model, self._scheduler, deliver)

        asked, prepared = await self.in_thread(read)
        requests, body, ignored = prepared.requests, prepared.body, prepared.ignored
        if prepared.untried is not None:
            async with self._compiling:
                matcher = await asyncio.to_thread(self._model.grammars.start, prepared.untried)
            requests = [replace(one, grammar=matcher) for one in requests]
        generations = self._submit(requests)
        # They are cancelled, and logged, once the answer has ended.
        request.scope["generations"] = generations
        reply = Reply(self._model, body)
        if isinstance(asked, ResponsesBody):
            reply, ignored = ResponsesReply(self._model, body, asked), asked.named(ignored)
        choices = [
            Choice(self._model, body, generation, index, prepared.echo[index // body.n])
            for index, generation in enumerate(generations)
        ]
        response: Response
        if body.stream:
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            events = _events(reply, choices, outputs)
            response = StreamingResponse(events, media_type="text/event-stream", headers=headers)
        else:
            async for choice, output in _new_outputs(choices, outputs):
                await _check_connected(request)
                choice.scores += output.scores
                if output.finish in _FAILURES:
                    raise _failure(choice.generation)
            response = await _json_response(reply.whole(choices))
        _name_ignored(response, ignored)
        return response

    async def embeddings(self, raw: bytes, request: Request) -> Response:
        """Return a vector of each text, computed between the steps of others. Raises `ApiError`."""
        outputs, deliver = self._outputs()

        def read() -> tuple[EmbeddingsBody, list[GenerationRequest]]:
            body = parse_body(EmbeddingsBody, raw)
            return body, embedding_requests(body, self._model, self._scheduler, deliver)

        body, requests = await self.in_thread(read)
        generations: list[Generation] = []
        request.scope["generations"] = generations
        # So many at once as can run: what others ask meanwhile comes between them.
        wave = self._scheduler.max_running
        for start in range(0, len(requests), wave):
            generations += self._submit(requests[start : start + wave])
            for _ in requests[start : start + wave]:
                index, output = await outputs.get()
                await _check_connected(request)
                if output.finish != "stop":
                    raise _failure(generations[index])
        response = await _json_response(vectors_reply(self._model.name, body, generations))
        _name_ignored(response, body.ignored)
        return response

    async def in_thread(self, read: Callable[[], Result]) -> Result:
        """Return the result of `read`, which runs in another thread; four at a time, so that at least one
        of asyncio's threads writes answers."""
        async with self._reading:
            return await asyncio.to_thread(read)

    def _submit(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Queue all of them or none. Raises `ApiError`."""
        try:
            return self._scheduler.submit(requests)
        except ContextFull as error:
            raise ApiError(400, str(error), code="context_length_exceeded") from error
        except QueueFull as error:
            raise ApiError(429, str(error), code="queue_full") from error
        except Stopping as error:
            raise ApiError(503, str(error), code="server_shutdown") from error

    def _outputs(self) -> tuple[Outputs, Deliver]:
        """Return a queue, and what puts outputs into it from the scheduler's thread."""
        self._loop = asyncio.get_running_loop()
        outputs: Outputs = asyncio.Queue()

        def deliver(index: int, generation: Generation, output: Output) -> None:
            if output.text or output.scores or output.finish is not None:
                self._undelivered.append((outputs, (index, output)))

        return outputs, deliver

    def _deliver(self) -> None:
        """Pass on what a step of the scheduler has brought, in its thread.

        Each call across wakes the loop, which then takes the interpreter from the scheduler while that
        still chooses tokens: of 32 streams, 32 times a step. Woken once, the loop writes while the
        engine computes.
        """
        given, self._undelivered = self._undelivered, []

        def put() -> None:
            for outputs, output in given:
                outputs.put_nowait(output)

        if given and self._loop is not None:
            with suppress(RuntimeError):  # a loop that has ended has nobody left to tell
                self._loop.call_soon_threadsafe(put)


async def _check_connected(request: Request) -> None:
    """Raise `ClientDisconnect` once the client has gone; the generations then end with the request."""
    if await request.is_disconnected():
        raise ClientDisconnect


def _name_ignored(response: Response, names: Iterable[str]) -> None:
    """Name in a header what had no effect. The names are the client's: as many as fit, in ASCII."""
    shown = [re.sub(r"[^\w.-]", "?", name, flags=re.ASCII)[:64] for name in sorted(names)]
    if shown:
        response.headers["X-Ignored-Parameters"] = ", ".join(shown[:40])


async def _json_response(blocks: Iterator[bytes]) -> Response:
    """Many megabytes, such as log-probabilities of many tokens, are written as they are sent."""
    first = await asyncio.to_thread(lambda: list(islice(blocks, 2)))
    if len(first) == 1:
        return Response(first[0], media_type="application/json")
    return StreamingResponse(chain(first, blocks), media_type="application/json")


async def _new_outputs(
    choices: Sequence[Choice], outputs: Outputs
) -> AsyncIterator[tuple[Choice, Output]]:
    """Yield what is new until all have ended, and `_NOTHING` when that takes a while. The
    log-probabilities of a prompt are in its choice before the first."""
    left = len(choices)
    while left:
        try:
            async with asyncio.timeout(KEEP_ALIVE_SECONDS):
                index, output = await outputs.get()
        except TimeoutError:
            yield choices[0], _NOTHING
            continue
        ready = {index: output}
        # Where tokens come faster than they can be sent, one event takes several.
        for _ in range(outputs.qsize()):
            index, output = outputs.get_nowait()
            ready[index] = ready[index].then(output) if index in ready else output
        for index, output in ready.items():
            left -= output.finish is not None
            choice = choices[index]
            if not choice.generated:
                choice.scores += choice.generation.prompt_scores
            choice.generated = max(choice.generated, output.generated)
            yield choice, output
        # Neither the queue nor the client may have made it wait.
        await asyncio.sleep(0)


async def _events(
    reply: Reply, choices: Sequence[Choice], outputs: Outputs
) -> AsyncIterator[bytes]:
    """Server-sent events. What goes wrong after the start is an event too: then come the others."""
    for choice in choices:
        if opening := reply.opening(choice):
            yield opening
    async for choice, output in _new_outputs(choices, outputs):
        if output == _NOTHING:
            yield b": keep-alive\n\n"
            continue
        finish = output.finish if output.finish not in _FAILURES else None
        scores = choice.scores + list(output.scores)
        choice.scores = []
        while len(scores) > _SCORES_AT_ONCE:
            yield reply.chunk(choice, "", scores[:_SCORES_AT_ONCE], None)
            scores = scores[_SCORES_AT_ONCE:]
            await asyncio.sleep(0)  # a long prompt's scores: other requests have their turn
        if chunk := reply.chunk(choice, output.text, scores, finish):
            yield chunk
        if output.finish in _FAILURES:
            yield reply.failure(_failure(choice.generation))
    if end := reply.end(choices):
        yield end


def _failure(generation: Generation) -> ApiError:
    """Return the error to answer for a generation that did not finish."""
    if generation.finish_reason == "shutdown":
        return ApiError(503, "the server is shutting down", code="server_shutdown")
    if generation.finish_reason == "cancelled":
        return ApiError(499, "cancelled")
    error = generation.failure
    if isinstance(error, GrammarFailed):
        return ApiError(400, str(error))
    reason = error if isinstance(error, UserError) else type(error).__name__
    return ApiError(500, f"the generation failed: {reason}", code="generation_failed")
