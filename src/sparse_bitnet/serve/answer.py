# SPDX-License-Identifier: Apache-2.0
"""Sends the generations of a request to the client: as one object, as events, or as vectors."""

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
from sparse_bitnet.serve.threaded_scheduler import QueueFull, Stopping, ThreadedScheduler

Result = TypeVar("Result")
Outputs = asyncio.Queue[tuple[int, Output]]
"""New outputs, each with the index of its generation."""
_SCORES_AT_ONCE = 64
"""Maximum number of token scores in one event."""
KEEP_ALIVE_SECONDS = 5.0
"""Seconds after which a stream without output sends a comment, so that no proxy closes the connection.
Other answers check as often whether the client is still connected."""
_NOTHING = Output("")
_FAILURES = ("cancelled", "shutdown", "error")


class Answering:
    """Answers requests for generations."""

    def __init__(self, model: ServedModel, scheduler: ThreadedScheduler) -> None:
        self._model, self._scheduler = model, scheduler
        self._loop: asyncio.AbstractEventLoop | None = None
        self._undelivered: list[tuple[Outputs, tuple[int, Output]]] = []
        scheduler.delivered = self._deliver
        # Grammars can take long: one at a time, so that other requests get a thread.
        self._reading, self._compiling = asyncio.Semaphore(4), asyncio.Semaphore(1)

    async def answer(
        self, kind: type[Body | ResponsesBody], raw: bytes, request: Request
    ) -> Response:
        """Start the generations and return their answer. Raises `ApiError` if they cannot be started or,
        unless streamed, fail."""
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
        # `Entrance` cancels and logs them once the answer has ended.
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
        """Return a vector per text, computed between the steps of other requests. Raises `ApiError`."""
        outputs, deliver = self._outputs()

        def read() -> tuple[EmbeddingsBody, list[GenerationRequest]]:
            body = parse_body(EmbeddingsBody, raw)
            return body, embedding_requests(body, self._model, self._scheduler, deliver)

        body, requests = await self.in_thread(read)
        generations: list[Generation] = []
        request.scope["generations"] = generations
        # As many at once as can run, so that other requests come between them.
        wave = min(self._scheduler.max_running, max(self._scheduler.max_queue, 1))
        for start in range(0, len(requests), wave):
            while len(generations) == start:
                try:
                    generations += self._submit(requests[start : start + wave])
                except ApiError as error:
                    if start == 0 or error.status != 429:
                        raise
                    await _check_connected(request)
                    await asyncio.sleep(0.1)
            for _ in requests[start : start + wave]:
                while outputs.empty():
                    await _check_connected(request)
                    with suppress(TimeoutError):
                        async with asyncio.timeout(KEEP_ALIVE_SECONDS):
                            outputs.put_nowait(await outputs.get())
                index, output = outputs.get_nowait()
                if output.finish != "stop":
                    raise _failure(generations[index])
        response = await _json_response(vectors_reply(self._model.name, body, generations))
        _name_ignored(response, body.ignored)
        return response

    async def in_thread(self, read: Callable[[], Result]) -> Result:
        """Return the result of `read`, which runs in another thread; four at a time, so that at least
        one of asyncio's threads can write answers."""
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
        """Return a queue, and a function that puts outputs into it from the scheduler's thread."""
        self._loop = asyncio.get_running_loop()
        outputs: Outputs = asyncio.Queue()

        def deliver(index: int, generation: Generation, output: Output) -> None:
            if output.text or output.scores or output.finish is not None:
                self._undelivered.append((outputs, (index, output)))

        return outputs, deliver

    def _deliver(self) -> None:
        """Pass on the outputs of a scheduler's step; called in its thread.

        Every call into the event loop wakes it, and it then takes the GIL from the scheduler, which is
        still sampling: with 32 streams, 32 times per step. Woken once, the loop writes while the engine
        computes.
        """
        given, self._undelivered = self._undelivered, []

        def put() -> None:
            for outputs, output in given:
                outputs.put_nowait(output)

        if given and self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(put)


async def _check_connected(request: Request) -> None:
    """Raise `ClientDisconnect` once the client has gone; the generations then end with the request."""
    if await request.is_disconnected():
        raise ClientDisconnect


def _name_ignored(response: Response, names: Iterable[str]) -> None:
    """Name ignored parameters in a header: as many as fit, in ASCII, since clients choose the names."""
    shown = [re.sub(r"[^\w.-]", "?", name, flags=re.ASCII)[:64] for name in sorted(names)]
    if shown:
        response.headers["X-Ignored-Parameters"] = ", ".join(shown[:40])


async def _json_response(blocks: Iterator[bytes]) -> Response:
    """Return an answer that is written as it is sent: log-probabilities of many tokens take megabytes."""
    first = await asyncio.to_thread(lambda: list(islice(blocks, 2)))
    if len(first) == 1:
        return Response(first[0], media_type="application/json")
    return StreamingResponse(chain(first, blocks), media_type="application/json")


async def _new_outputs(
    choices: Sequence[Choice], outputs: Outputs
) -> AsyncIterator[tuple[Choice, Output]]:
    """Yield new outputs until all generations have ended, and `_NOTHING` when none comes for a while.
    The log-probabilities of a prompt are in its choice before the first output."""
    left = len(choices)
    while left:
        try:
            async with asyncio.timeout(KEEP_ALIVE_SECONDS):
                index, output = await outputs.get()
        except TimeoutError:
            yield choices[0], _NOTHING
            continue
        ready = {index: output}
        # If tokens come faster than they can be sent, one event holds several.
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
        # Let other requests run, in case neither queue nor client blocked.
        await asyncio.sleep(0)


async def _events(
    reply: Reply, choices: Sequence[Choice], outputs: Outputs
) -> AsyncIterator[bytes]:
    """Yield server-sent events. An error after the start is an event; other choices continue."""
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
