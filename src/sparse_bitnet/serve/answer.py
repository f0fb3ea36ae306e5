# SPDX-License-Identifier: Apache-2.0
"""The generations of one request on their way to the client: as one object, or as events."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import chain, islice
from typing import TypeVar

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from sparse_bitnet.engine.protocol import ContextFull
from sparse_bitnet.errors import UserError
from sparse_bitnet.generation.grammar import FormLost
from sparse_bitnet.generation.request import Generation, GenerationRequest, Output, TokenScore
from sparse_bitnet.generation.scheduler_thread import QueueFull, Stopping, ThreadedScheduler
from sparse_bitnet.serve.api_error import ApiError
from sparse_bitnet.serve.generations import Prepared, ServedModel, prepare, try_form
from sparse_bitnet.serve.outbox import Outbox
from sparse_bitnet.serve.replies import ChatReply, Choice, Reply
from sparse_bitnet.serve.responses import ResponsesBody
from sparse_bitnet.serve.responses_reply import ResponsesReply
from sparse_bitnet.serve.schema import Body, ChatBody

Result = TypeVar("Result")
_LARGE = 1 << 16
"""Bytes of a body; of larger ones one is read at a time, for their memory."""
_THREADS = 4
"""Smaller bodies that are read at a time; at least one more thread writes answers."""
_LONGEST_WAIT = 30.0
"""Seconds that a request waits until its body is read, or its grammar tried."""
_SCORES_AT_ONCE = 64
"""In one event."""
KEEP_ALIVE_SECONDS = 15.0
"""A stream that waits longer sends a comment, so that no proxy takes the connection for dead."""
_OUTPUTS_AT_ONCE = 64
"""Written before other requests have their turn."""
_MOST_NAMES = 40
"""Of ignored parameters."""
_FAILURES = ("cancelled", "shutdown", "error")


class Turns:
    """Work in other threads, a few pieces at a time. The newest goes first: a request waits for the work
    in progress, and not for all that came before it."""

    def __init__(self, at_once: int, most_waiting: int) -> None:
        self._free, self._most_waiting = at_once, most_waiting
        self._waiting: list[asyncio.Future[None]] = []

    async def take(self, request: Request, work: Callable[[], Result]) -> Result:
        """What `work` returns. Raises `ApiError` 429 where too many wait, or this one has waited too
        long, and `ClientDisconnect` if the client has gone meanwhile."""
        if self._free:
            self._free -= 1
        else:
            turn = asyncio.get_running_loop().create_future()
            if len(self._waiting) < self._most_waiting:
                self._waiting.append(turn)
                await asyncio.wait([turn], timeout=_LONGEST_WAIT)
            if not turn.done():
                self._waiting = [other for other in self._waiting if other is not turn]
                raise ApiError(429, "too many requests wait already; try later", code="queue_full")
        try:
            if await request.is_disconnected():
                raise ClientDisconnect
            return await asyncio.to_thread(work)
        finally:
            if self._waiting:
                self._waiting.pop().set_result(None)
            else:
                self._free += 1


class Answering:
    """Answers requests for generations, one `Answer` each."""

    def __init__(self, model: ServedModel, scheduler: ThreadedScheduler) -> None:
        self._model, self._scheduler = model, scheduler
        self.outbox = Outbox()
        scheduler.delivered = self.outbox.send
        most = scheduler.max_queue + scheduler.max_running
        self._small = Turns(_THREADS, most)
        self._large, self._untried = Turns(1, most), Turns(1, most)

    async def answer(
        self, kind: type[Body | ResponsesBody], raw: bytes, request: Request
    ) -> Response:
        """Start the generations. Raises `ApiError` if they cannot be started or, not streamed, fail."""
        loop = asyncio.get_running_loop()
        outputs: asyncio.Queue[tuple[int, Output]] = asyncio.Queue()

        def deliver(index: int, output: Output) -> None:
            if output.text or output.scores or output.finish is not None:
                self.outbox.add(loop, outputs.put_nowait, (index, output))

        def start() -> tuple[Prepared, list[Generation]]:
            prepared = prepare(kind, raw, self._model, self._scheduler, deliver)
            return prepared, [] if prepared.untried else self.submit(prepared.requests)

        prepared, generations = await self.beside(request, raw, start)
        if prepared.untried is not None:
            # A grammar may take long. One at a time, so that requests without one find a thread.
            prepared = await self._untried.take(request, partial(try_form, prepared, self._model))
            generations = self.submit(prepared.requests)
        answer = _Answer(prepared, generations, self._model, self._scheduler, outputs)
        # The log's, once the answer has ended.
        request.scope["generations"] = generations
        response = _EventStream(answer) if answer.body.stream else await answer.whole(request)
        name_ignored(response, prepared.ignored)
        return response

    async def beside(self, request: Request, raw: bytes, read: Callable[[], Result]) -> Result:
        """What `read` makes of a body, in another thread. Raises as `Turns.take` does."""
        return await (self._small if len(raw) <= _LARGE else self._large).take(request, read)

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


def name_ignored(response: Response, names: Iterable[str]) -> None:
    """Name in a header what had no effect. The names are the client's: as many as fit, in ASCII."""
    shown = [re.sub(r"[^\w.-]", "?", name, flags=re.ASCII)[:64] for name in sorted(names)]
    if shown:
        response.headers["X-Ignored-Parameters"] = ", ".join(shown[:_MOST_NAMES])


@asynccontextmanager
async def cancelled_when_gone(
    request: Request, scheduler: ThreadedScheduler, generations: Sequence[Generation]
) -> AsyncIterator[None]:
    """Inside, the generations end when the client goes away; they end at its end in any case."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        scheduler.cancel(*generations)

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        scheduler.cancel(*generations)


async def json_response(blocks: Iterator[bytes]) -> Response:
    """Many megabytes, such as log-probabilities of many tokens, are written as they are sent."""
    first = await asyncio.to_thread(lambda: list(islice(blocks, 2)))
    if len(first) == 1:
        return Response(first[0], media_type="application/json")
    return StreamingResponse(chain(first, blocks), media_type="application/json")


class _Answer:
    def __init__(
        self,
        prepared: Prepared,
        generations: list[Generation],
        model: ServedModel,
        scheduler: ThreadedScheduler,
        outputs: "asyncio.Queue[tuple[int, Output]]",
    ) -> None:
        self.body = prepared.body
        self._scheduler, self._generations, self._outputs = scheduler, generations, outputs
        self._reply = _reply(prepared, model)
        self._choices = [
            Choice(
                generation,
                index,
                prepared.echo[index // self.body.choices] if prepared.echo else "",
                self._reply.reader(),
            )
            for index, generation in enumerate(generations)
        ]

    def cancel(self) -> None:
        """End what has not ended."""
        self._scheduler.cancel(*self._generations)

    async def whole(self, request: Request) -> Response:
        """One JSON object when all have ended; a client that goes away ends them."""
        failed: ApiError | None = None
        async with cancelled_when_gone(request, self._scheduler, self._generations):
            async for choice, output in self._all_outputs():
                choice.scores += output.scores
                if output.finish in _FAILURES:
                    failed = failed or failure(choice.generation)
                    self.cancel()
        if failed is not None:
            raise failed
        return await json_response(self._reply.whole(self._choices))

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events. What goes wrong after the start is an event too: then come the others."""
        for choice in self._choices:
            if opening := self._reply.opening(choice):
                yield opening
                await asyncio.sleep(0)
        async for choice, output in self._all_outputs():
            finish = output.finish if output.finish not in _FAILURES else None
            *parts, last = _slices(choice.scores + list(output.scores))
            choice.scores = []
            for part in parts:
                yield self._reply.chunk(choice, "", part, None)
                await asyncio.sleep(0)
            if (output.text or last or finish) and (
                chunk := self._reply.chunk(choice, output.text, last, finish)
            ):
                yield chunk
            if output.finish in _FAILURES:
                yield self._reply.failure(failure(choice.generation))
        if end := self._reply.end(self._choices):
            yield end

    async def _all_outputs(self) -> AsyncIterator[tuple[Choice, Output]]:
        """Until all have ended. The log-probabilities of a prompt are in its choice before the first."""
        left = len(self._choices)
        while left:
            index, output = await self._outputs.get()
            ready = {index: output}
            # Where tokens come faster than they can be sent, one event takes several.
            for _ in range(min(self._outputs.qsize(), _OUTPUTS_AT_ONCE)):
                index, output = self._outputs.get_nowait()
                ready[index] = ready[index].then(output) if index in ready else output
            for index, output in ready.items():
                left -= output.finish is not None
                choice = self._choices[index]
                choice.take_prompt_scores()
                choice.generated = max(choice.generated, output.generated)
                yield choice, output
            # Neither the queue nor the client may have made it wait.
            await asyncio.sleep(0)


def _reply(prepared: Prepared, model: ServedModel) -> Reply:
    body = prepared.body
    if not isinstance(body, ChatBody):
        return Reply(model, body)
    asked = prepared.asked
    return ChatReply(model, body) if asked is None else ResponsesReply(model, body, asked)


def _slices(scores: list[TokenScore]) -> Iterator[list[TokenScore]]:
    """At least one."""
    for start in range(0, max(len(scores), 1), _SCORES_AT_ONCE):
        yield scores[start : start + _SCORES_AT_ONCE]


def failure(generation: Generation) -> ApiError:
    """What to answer for one that has not come to its end."""
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
    """The events, and a comment whenever none has come for `KEEP_ALIVE_SECONDS`."""
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


class _EventStream(StreamingResponse):
    """Ends the generations however the response ends, even before its first event."""

    def __init__(self, answer: _Answer) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(
            kept_alive(answer.events()), media_type="text/event-stream", headers=headers
        )
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.cancel()
