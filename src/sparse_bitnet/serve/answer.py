# SPDX-License-Identifier: Apache-2.0
"""The generations of one request on their way to the client: as one object, as events, or as vectors."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import chain, islice
from typing import TypeVar

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect

from sparse_bitnet.engine.protocol import ContextFull
from sparse_bitnet.errors import UserError
from sparse_bitnet.generation.grammar import FormLost
from sparse_bitnet.generation.request import Generation, GenerationRequest, Output, TokenScore
from sparse_bitnet.generation.scheduler import QueueFull, Stopping, ThreadedScheduler
from sparse_bitnet.serve.api_error import ApiError
from sparse_bitnet.serve.generations import (
    Deliver,
    Prepared,
    ServedModel,
    embedding_requests,
    requests_of,
    try_form,
)
from sparse_bitnet.serve.replies import ChatReply, Choice, Reply, call_reader, vectors_reply
from sparse_bitnet.serve.responses import ResponsesBody, ResponsesReply, own_names
from sparse_bitnet.serve.schema import Body, ChatBody, EmbeddingsBody, parse_body

Result = TypeVar("Result")
Outputs = asyncio.Queue[tuple[int, Output]]
"""Numbers of generations, and what is new of them."""
_LARGE = 1 << 16
"""Bytes of a body; of larger ones one is read at a time, for their memory."""
_LONGEST_WAIT = 30.0
"""Seconds that a request waits until its body is read, or its grammar tried."""
_SCORES_AT_ONCE = 64
"""Maximum number of token scores in one event."""
KEEP_ALIVE_SECONDS = 15.0
"""A stream that waits longer sends a comment, so that no proxy takes the connection for dead."""
_OUTPUTS_AT_ONCE = 64
"""Written before other requests have their turn."""
_FAILURES = ("cancelled", "shutdown", "error")


class Lane:
    """Work in other threads, a few pieces at a time."""

    def __init__(self, at_once: int, most_waiting: int) -> None:
        self._free, self._waiting, self._most_waiting = asyncio.Semaphore(at_once), 0, most_waiting

    async def run(self, request: Request, work: Callable[[], Result]) -> Result:
        """Return the result of `work`. Raises `ApiError` 429 if too many requests wait or this one waited
        too long, and `ClientDisconnect` if the client has gone meanwhile."""
        busy = ApiError(429, "too many requests wait already; try later", code="queue_full")
        if self._waiting >= self._most_waiting:
            raise busy
        self._waiting += 1
        try:
            async with asyncio.timeout(_LONGEST_WAIT):
                await self._free.acquire()
        except TimeoutError:
            raise busy from None
        finally:
            self._waiting -= 1
        try:
            if await request.is_disconnected():
                raise ClientDisconnect
            return await asyncio.to_thread(work)
        finally:
            self._free.release()


class Answering:
    """Answers requests for generations."""

    def __init__(self, model: ServedModel, scheduler: ThreadedScheduler) -> None:
        self._model, self._scheduler = model, scheduler
        self._loop: asyncio.AbstractEventLoop | None = None
        self._undelivered: list[tuple[Outputs, tuple[int, Output]]] = []
        scheduler.delivered = self._deliver
        most = scheduler.max_queue + scheduler.max_running
        # At least one more of asyncio's threads writes answers.
        self._small, self._large, self._untried = Lane(4, most), Lane(1, most), Lane(1, most)

    async def answer(
        self, kind: type[Body | ResponsesBody], raw: bytes, request: Request
    ) -> Response:
        """Start the generations. Raises `ApiError` if they cannot be started or, not streamed, fail."""
        outputs, deliver = self.outputs()

        def start() -> tuple[Body | ResponsesBody, Prepared, list[Generation]]:
            asked = parse_body(kind, raw)
            if isinstance(asked, ResponsesBody):
                with own_names():
                    prepared = requests_of(asked.chat(), self._model, self._scheduler, deliver)
            else:
                prepared = requests_of(asked, self._model, self._scheduler, deliver)
            return asked, prepared, [] if prepared.untried else self.submit(prepared.requests)

        asked, prepared, generations = await self.beside(request, raw, start)
        if prepared.untried is not None:
            # A grammar may take long. One at a time, so that requests without one find a thread.
            prepared = await self._untried.run(request, partial(try_form, prepared, self._model))
            generations = self.submit(prepared.requests)
        # They are cancelled, and logged, once the answer has ended.
        request.scope["generations"] = generations
        body, reply, ignored = prepared.body, Reply(self._model, prepared.body), prepared.ignored
        if isinstance(body, ChatBody) and isinstance(asked, ResponsesBody):
            ignored = asked.named(ignored)
            reply = ResponsesReply(self._model, body, asked)
        elif isinstance(body, ChatBody):
            reply = ChatReply(self._model, body)
        choices = [
            Choice(
                generation,
                index,
                prepared.echo[index // body.choices] if prepared.echo else "",
                call_reader(self._model, body),
            )
            for index, generation in enumerate(generations)
        ]
        response: Response
        if body.stream:
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            events = kept_alive(_events(reply, choices, outputs))
            response = StreamingResponse(events, media_type="text/event-stream", headers=headers)
        else:
            async with cancelled_when_gone(request, self._scheduler, generations):
                await _collect(choices, outputs)
            response = await json_response(reply.whole(choices))
        name_ignored(response, ignored)
        return response

    async def embeddings(self, raw: bytes, request: Request) -> Response:
        """A vector of each text, computed between the steps of others. Raises `ApiError`."""
        outputs, deliver = self.outputs()

        def read() -> tuple[EmbeddingsBody, list[GenerationRequest]]:
            body = parse_body(EmbeddingsBody, raw)
            return body, embedding_requests(body, self._model, self._scheduler, deliver)

        body, requests = await self.beside(request, raw, read)
        generations: list[Generation] = []
        request.scope["generations"] = generations
        # So many at once as can run: what others ask meanwhile comes between them.
        wave = self._scheduler.max_running
        async with cancelled_when_gone(request, self._scheduler, generations):
            for start in range(0, len(requests), wave):
                if generations and generations[0].cancel_asked:
                    raise ApiError(499, "cancelled")
                generations += self.submit(requests[start : start + wave])
                for _ in requests[start : start + wave]:
                    index, output = await outputs.get()
                    if output.finish != "stop":
                        raise failure(generations[index])
        response = await json_response(vectors_reply(self._model.name, body, generations))
        name_ignored(response, body.ignored)
        return response

    async def beside(self, request: Request, raw: bytes, read: Callable[[], Result]) -> Result:
        """Return the result of `read`, run in another thread. Raises as `Lane.run` does."""
        return await (self._small if len(raw) <= _LARGE else self._large).run(request, read)

    def submit(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Queue all of them or none. Raises `ApiError`."""
        try:
            return self._scheduler.submit(requests)
        except ContextFull as error:
            raise ApiError(400, str(error), code="context_length_exceeded") from error
        except QueueFull as error:
            raise ApiError(429, str(error), code="queue_full") from error
        except Stopping as error:
            raise ApiError(503, str(error), code="server_shutdown") from error

    def outputs(self) -> tuple[Outputs, Deliver]:
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
        if given and self._loop is not None:
            with suppress(RuntimeError):  # a loop that has ended has nobody left to tell
                self._loop.call_soon_threadsafe(_put_all, given)


def _put_all(given: list[tuple[Outputs, tuple[int, Output]]]) -> None:
    for outputs, output in given:
        outputs.put_nowait(output)


def name_ignored(response: Response, names: Iterable[str]) -> None:
    """Name in a header what had no effect. The names are the client's: as many as fit, in ASCII."""
    shown = [re.sub(r"[^\w.-]", "?", name, flags=re.ASCII)[:64] for name in sorted(names)]
    if shown:
        response.headers["X-Ignored-Parameters"] = ", ".join(shown[:40])


@asynccontextmanager
async def cancelled_when_gone(
    request: Request, scheduler: ThreadedScheduler, generations: Sequence[Generation]
) -> AsyncIterator[None]:
    """Inside, the generations end when the client goes away."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        scheduler.cancel(*generations)

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()


async def json_response(blocks: Iterator[bytes]) -> Response:
    """Many megabytes, such as log-probabilities of many tokens, are written as they are sent."""
    first = await asyncio.to_thread(lambda: list(islice(blocks, 2)))
    if len(first) == 1:
        return Response(first[0], media_type="application/json")
    return StreamingResponse(chain(first, blocks), media_type="application/json")


async def _new_outputs(
    choices: Sequence[Choice], outputs: Outputs
) -> AsyncIterator[tuple[Choice, Output]]:
    """Until all have ended. The log-probabilities of a prompt are in its choice before the first."""
    left = len(choices)
    while left:
        index, output = await outputs.get()
        ready = {index: output}
        # Where tokens come faster than they can be sent, one event takes several.
        for _ in range(min(outputs.qsize(), _OUTPUTS_AT_ONCE)):
            index, output = outputs.get_nowait()
            ready[index] = ready[index].then(output) if index in ready else output
        for index, output in ready.items():
            left -= output.finish is not None
            choice = choices[index]
            choice.take_prompt_scores()
            choice.generated = max(choice.generated, output.generated)
            yield choice, output
        # Neither the queue nor the client may have made it wait.
        await asyncio.sleep(0)


async def _collect(choices: Sequence[Choice], outputs: Outputs) -> None:
    """Wait until all have ended. Raises `ApiError` for the first that fails."""
    async for choice, output in _new_outputs(choices, outputs):
        choice.scores += output.scores
        if output.finish in _FAILURES:
            raise failure(choice.generation)


async def _events(
    reply: Reply, choices: Sequence[Choice], outputs: Outputs
) -> AsyncIterator[bytes]:
    """Server-sent events. What goes wrong after the start is an event too: then come the others."""
    for choice in choices:
        if opening := reply.opening(choice):
            yield opening
    async for choice, output in _new_outputs(choices, outputs):
        finish = output.finish if output.finish not in _FAILURES else None
        scores: list[TokenScore] = choice.scores + list(output.scores)
        choice.scores = []
        while len(scores) > _SCORES_AT_ONCE:
            yield reply.chunk(choice, "", scores[:_SCORES_AT_ONCE], None)
            scores = scores[_SCORES_AT_ONCE:]
        if (output.text or scores or finish) and (
            chunk := reply.chunk(choice, output.text, scores, finish)
        ):
            yield chunk
        if output.finish in _FAILURES:
            yield reply.failure(failure(choice.generation))
    if end := reply.end(choices):
        yield end


def failure(generation: Generation) -> ApiError:
    """Return the error to answer for a generation that did not finish."""
    if generation.finish_reason == "shutdown":
        return ApiError(503, "the server is shutting down", code="server_shutdown")
    if generation.finish_reason == "cancelled":
        return ApiError(499, "cancelled")
    error = generation.failure
    if isinstance(error, FormLost):
        return ApiError(400, str(error), code="invalid_grammar")
    reason = error if isinstance(error, UserError) else type(error).__name__
    return ApiError(500, f"the generation failed: {reason}", code="generation_failed")


async def kept_alive(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The events, and a comment whenever none has come for `KEEP_ALIVE_SECONDS`. Other requests have
    their turn before each: every event is a task of its own."""
    following = asyncio.ensure_future(anext(events, None))
    try:
        while True:
            while not (await asyncio.wait({following}, timeout=KEEP_ALIVE_SECONDS))[0]:
                yield b": keep-alive\n\n"
            if (event := following.result()) is None:
                return
            yield event
            following = asyncio.ensure_future(anext(events, None))
    finally:
        following.cancel()
