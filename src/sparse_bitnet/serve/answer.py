"""From a validated request to its generations, and from their output to the response."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from sparse_bitnet.engine.protocol import ContextFull
from sparse_bitnet.generation.chat_template import ChatTemplate
from sparse_bitnet.generation.request import GeneratedText, Generation, GenerationRequest, Output
from sparse_bitnet.generation.sampling import Sampler
from sparse_bitnet.generation.scheduler import QueueFull, Scheduler, Stopping
from sparse_bitnet.generation.text import TextTokenizer
from sparse_bitnet.serve.replies import DONE, ChatReply, Choice, Reply, event
from sparse_bitnet.serve.schema import ApiError, GenerationBody

_RETRY = {"Retry-After": "1"}


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """What is served, and the limits."""

    name: str
    tokenizer: TextTokenizer
    template: ChatTemplate | None
    """None: the model has none, and chat requests are refused."""
    end_tokens: frozenset[int]
    vocab_size: int
    api_key: str | None = None
    max_tokens: int | None = None
    """Most tokens that a request may ask for; None: what the context holds."""
    max_body_bytes: int = 1 << 20


@dataclass(frozen=True)
class Work:
    """A validated request: the prompts' tokens, their texts where they are repeated."""

    body: GenerationBody
    prompts: Sequence[Sequence[int]]
    echo: Sequence[str]
    max_tokens: int | None
    top_scores: int | None
    score_prompt: bool = False
    is_chat: bool = False


async def answer(
    request: Request, work: Work, model: ServedModel, scheduler: Scheduler
) -> Response:
    """Start the generations. Raises `ApiError` if they cannot be started or, not streamed, fail."""
    loop = asyncio.get_running_loop()
    outputs: asyncio.Queue[tuple[int, Output]] = asyncio.Queue()

    def receiver(index: int) -> Callable[[Generation, Output], None]:
        def deliver(generation: Generation, output: Output) -> None:
            loop.call_soon_threadsafe(outputs.put_nowait, (index, output))

        return deliver

    generations = _submit(_requests(work, model, scheduler.capacity, receiver), scheduler)
    answer = _Answer(work, model, scheduler, generations, outputs)
    if work.body.stream:
        return _EventStream(answer)
    return await answer.whole(request)


def _requests(
    work: Work,
    model: ServedModel,
    capacity: int,
    receiver: Callable[[int], Callable[[Generation, Output], None]],
) -> list[GenerationRequest]:
    body = work.body
    most = model.max_tokens or capacity
    if work.max_tokens is not None and work.max_tokens > most:
        raise ApiError(
            400,
            f"max_tokens {work.max_tokens} is above this server's limit of {most}",
            param="max_tokens",
            code="context_length_exceeded" if model.max_tokens is None else None,
        )
    seed = secrets.randbits(64) if body.seed is None else body.seed
    requests: list[GenerationRequest] = []
    for prompt in work.prompts:
        wanted = work.max_tokens
        if wanted is None:
            wanted = max(min(most, capacity - len(prompt)), 1)
        for choice in range(body.choices):
            requests.append(
                GenerationRequest(
                    prompt=prompt,
                    max_tokens=wanted,
                    sampler=Sampler(body.sampling(seed + choice), prompt),
                    text=GeneratedText(model.tokenizer, body.stop_strings, is_start=work.is_chat),
                    stop_tokens=model.end_tokens,
                    top_scores=work.top_scores,
                    score_prompt=work.score_prompt,
                    deliver=receiver(len(requests)),
                )
            )
    return requests


def _submit(requests: list[GenerationRequest], scheduler: Scheduler) -> list[Generation]:
    most = scheduler.max_queue + scheduler.max_running
    if len(requests) > most:
        raise ApiError(400, f"{len(requests)} choices at once: this server takes {most}", param="n")
    try:
        return scheduler.submit(requests)
    except ContextFull as error:
        raise ApiError(400, str(error), code="context_length_exceeded") from error
    except QueueFull as error:
        raise ApiError(429, str(error), code="queue_full", headers=_RETRY) from error
    except Stopping as error:
        raise ApiError(503, str(error), code="server_shutdown", headers=_RETRY) from error


class _Answer:
    """The generations of one request on their way to the client."""

    def __init__(
        self,
        work: Work,
        model: ServedModel,
        scheduler: Scheduler,
        generations: list[Generation],
        outputs: "asyncio.Queue[tuple[int, Output]]",
    ) -> None:
        self._work, self._scheduler = work, scheduler
        self._generations, self._outputs = generations, outputs
        kind = ChatReply if work.is_chat else Reply
        self._reply = kind(model.name, model.tokenizer)
        echo = work.echo or [""] * len(work.prompts)
        self._choices = [
            Choice(index, model.tokenizer, echo[index // work.body.choices])
            for index in range(len(generations))
        ]

    def cancel(self) -> None:
        """End what has not ended."""
        for generation in self._generations:
            self._scheduler.cancel(generation)

    async def whole(self, request: Request) -> Response:
        """One JSON object when all have ended; a client that goes away ends them."""
        gone = asyncio.create_task(self._cancel_when_gone(request))
        try:
            failed: ApiError | None = None
            async for index, output in self._all_outputs():
                choice = self._choices[index]
                choice.add("", self._prompt_scores(choice))
                choice.add(output.text, output.scores)
                if output.finish in ("cancelled", "shutdown", "error"):
                    failed = failed or self._failure(index, output.finish)
                    self.cancel()
            if failed is not None:
                raise failed
        finally:
            gone.cancel()
            self.cancel()
        for choice, generation in zip(self._choices, self._generations, strict=True):
            if generation.request.text.stopped:
                choice.cut()
        prompts = len(self._work.prompts)
        return JSONResponse(self._reply.whole(self._choices, self._generations, prompts))

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events. What goes wrong after the start is an event too: then come the others."""
        body, reply = self._work.body, self._reply
        wanted = self._work.top_scores is not None
        for choice in self._choices:
            if opening := reply.opening(choice, body.include_usage):
                yield opening
        async for index, output in self._all_outputs():
            choice = self._choices[index]
            scores = choice.add("", self._prompt_scores(choice))
            scores += choice.add(output.text, output.scores)
            failed = output.finish in ("cancelled", "shutdown", "error")
            if output.text or scores or not failed:
                yield reply.chunk(
                    choice,
                    output.text,
                    scores if wanted else None,
                    None if failed else output.finish,
                    body.include_usage,
                )
            if output.finish is not None and failed:
                yield event(self._failure(index, output.finish).body)
        if body.include_usage:
            yield reply.usage_chunk(self._generations, len(self._work.prompts))
        yield DONE

    async def _all_outputs(self) -> AsyncIterator[tuple[int, Output]]:
        left = len(self._generations)
        while left:
            index, output = await self._outputs.get()
            ready = {index: output}
            # Where tokens come faster than they can be sent, one event takes several.
            while not self._outputs.empty():
                index, output = self._outputs.get_nowait()
                ready[index] = ready[index].then(output) if index in ready else output
            for index, output in ready.items():
                left -= output.finish is not None
                yield index, output

    def _prompt_scores(self, choice: Choice) -> Sequence:
        """Of an echoed prompt, once, before anything else."""
        return () if choice.scores else self._generations[choice.index].prompt_scores

    def _failure(self, index: int, finish: str) -> ApiError:
        if finish == "shutdown":
            return ApiError(503, "the server is shutting down", code="server_shutdown")
        if finish == "cancelled":
            return ApiError(499, "cancelled")
        error = self._generations[index].error
        return ApiError(500, f"the generation failed: {error}", code="generation_failed")

    async def _cancel_when_gone(self, request: Request) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.cancel()


class _EventStream(StreamingResponse):
    """Ends the generations however the response ends, even before its first event."""

    def __init__(self, answer: _Answer) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(answer.events(), media_type="text/event-stream", headers=headers)
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.cancel()
