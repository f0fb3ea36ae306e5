# SPDX-License-Identifier: Apache-2.0
"""What the server answers: OpenAI's completion and chat objects, whole or as stream chunks."""

import json
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from sparse_bitnet.generation.request import Generation, TokenScore
from sparse_bitnet.generation.text import TextStream
from sparse_bitnet.serve.api_error import ApiError
from sparse_bitnet.serve.generations import ServedModel
from sparse_bitnet.serve.schema import Body, ChatBody
from sparse_bitnet.serve.tool_calls import CallPiece, ToolCallReader

_DONE = b"data: [DONE]\n\n"
_BLOCK = 1 << 16
_PIECE, _ENTRIES_AT_ONCE = 1 << 14, 64
"""Characters and entries of a list that are written at once."""


def dumped(content: Any) -> str:
    """JSON in ASCII: whatever lies in between cannot split a character. Iterators become lists."""
    return json.dumps(content, separators=(",", ":"), default=list)


def event(content: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return f"data: {dumped(content)}\n\n".encode()


def _pieces(content: Any) -> Iterator[str]:
    """JSON in small pieces: other threads have their turn in between."""
    if isinstance(content, dict):
        for place, (key, value) in enumerate(content.items()):
            yield f"{',' if place else '{'}{dumped(key)}:"
            yield from _pieces(value)
        yield "}"
    elif isinstance(content, list):
        for place, value in enumerate(content):
            yield "," if place else "["
            yield from _pieces(value)
        yield "]"
    elif isinstance(content, Iterator):
        yield "["
        comma, at_once = "", 1
        while some := list(islice(content, at_once)):
            text = dumped(some)[1:-1]
            yield comma + text
            # Vectors one by one: nothing else runs meanwhile.
            comma, fitting = ",", _PIECE * len(some) // len(text)
            at_once = min(max(fitting, 1), _ENTRIES_AT_ONCE)
        yield "]"
    else:
        yield dumped(content)


def json_blocks(content: dict[str, Any]) -> Iterator[bytes]:
    """JSON in blocks, made as they are asked for. Nothing in it is empty but strings and what
    iterators give."""
    held: list[str] = []
    size = 0
    for piece in _pieces(content):
        held.append(piece)
        size += len(piece)
        if size > _BLOCK:
            yield "".join(held).encode()
            held, size = [], 0
    yield "".join(held).encode()


class Choice:
    """One text as it grows, with the log-probabilities that have not been sent."""

    def __init__(
        self,
        generation: Generation,
        index: int,
        echo: str = "",
        reader: ToolCallReader | None = None,
    ) -> None:
        """`reader`: where the text may hold calls."""
        self.generation, self.index, self.echo = generation, index, echo
        self.reader = reader
        self.scores: list[TokenScore] = []
        self.generated = 0
        """Tokens up to the last event."""
        self._prompt_taken = False
        request = generation.request
        assert request.tokenizer is not None
        self._tokenizer = request.tokenizer
        is_start = bool(echo) or request.strips_start
        self._stream = TextStream(self._tokenizer, is_start=is_start)
        self._place = 0

    @property
    def text(self) -> str:
        """All of it, when the generation has ended."""
        return self.echo + self.generation.text

    def take_prompt_scores(self) -> None:
        """Those of an echoed prompt come before all others."""
        if not self._prompt_taken:
            self.scores += self.generation.prompt_scores
            self._prompt_taken = True

    def places(self, scores: Iterable[TokenScore]) -> Iterator[int]:
        """Where in the text each token begins. `scores` follow those of the last call."""
        for score in scores:
            yield self._place
            text = self._stream.feed(score.token)
            if score.token in self._tokenizer.special_tokens:
                # Which a prompt may spell out, and a generated text does not show.
                name = self._tokenizer.token_bytes(score.token).decode(errors="replace")
                text = name if self.echo.startswith(name, self._place) else text
            self._place += len(text)


class Reply:
    """The objects of one response; they share id, time and model."""

    whole_kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, model: ServedModel, body: Body) -> None:
        self.tokenizer, self._syntax = model.tokenizer, model.tool_syntax
        self._body = body
        self._head: dict[str, Any] = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "object": self.whole_kind,
            "created": int(time.time()),
            "model": model.name,
        }

    def whole(self, choices: Sequence[Choice]) -> Iterator[bytes]:
        """The answer that is not streamed, in blocks."""
        content = self._head | {
            "choices": [self._whole_choice(choice) for choice in choices],
            "usage": self._usage(choices),
        }
        yield from json_blocks(content)

    def chunk(
        self, choice: Choice, text: str, scores: list[TokenScore], finish: str | None
    ) -> bytes:
        """An event with a piece of one choice; empty while it has to be held back."""
        return self._chunk_event(self._choice(choice, text, scores, finish), choice)

    def reader(self) -> ToolCallReader | None:
        """For one text; None where it holds no calls."""
        body, syntax = self._body, self._syntax
        if not isinstance(body, ChatBody) or not body.functions or syntax is None:
            return None
        names = frozenset(function.name for function in body.functions)
        return ToolCallReader(syntax, names, in_thought=body._in_thought)

    def opening(self, choice: Choice) -> bytes:
        """What precedes the first piece of a choice: of a completion, the prompt it repeats."""
        if not choice.echo:
            return b""
        content = {"text": choice.echo, "logprobs": None, "finish_reason": None}
        return self._chunk_event({"index": choice.index} | content, choice)

    def failure(self, error: ApiError) -> bytes:
        """The event of a choice that has failed."""
        return event(error.body)

    def end(self, choices: Sequence[Choice]) -> bytes:
        """What follows the last piece of all choices."""
        if not self._body.include_usage:
            return _DONE
        return event(self._chunk_head([]) | {"usage": self._usage(choices)}) + _DONE

    def _usage(self, choices: Sequence[Choice], generated: int | None = None) -> dict[str, Any]:
        """Of ended generations, or of one that has got so far. The choices of one prompt count it once;
        generated tokens include the one that ends a text."""
        generations = [choice.generation for choice in choices]
        first_choices = generations[:: self._body.choices]
        prompt = sum(len(generation.request.prompt) for generation in first_choices)
        if generated is None:
            generated = sum(generation.generated for generation in generations)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": sum(g.cached_tokens for g in first_choices)},
        }

    def _chunk_event(self, content: dict[str, Any], choice: Choice) -> bytes:
        usage = self._usage([choice], choice.generated) if self._body.continuous_usage else None
        more = {"usage": usage} if self._body.include_usage else {}
        return event(self._chunk_head([content]) | more)

    def _chunk_head(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._head | {"object": self.chunk_kind, "choices": choices}

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        return self._choice(choice, choice.text, choice.scores, choice.generation.finish_reason)

    def _choice(
        self, choice: Choice, text: str, scores: list[TokenScore], finish: str | None
    ) -> dict[str, Any]:
        wanted = self._body.top_scores is not None
        return {
            "index": choice.index,
            "text": text,
            "logprobs": self._logprobs(choice, scores) if wanted else None,
            "finish_reason": finish,
        }

    def _logprobs(self, choice: Choice, scores: list[TokenScore]) -> dict[str, Any]:
        tops = (
            {self._name(token): logprob for token, logprob in score.top}
            if score.packed_top
            else None
            for score in scores
        )
        return {
            "tokens": (self._name(score.token) for score in scores),
            "token_logprobs": (score.logprob for score in scores),
            "top_logprobs": tops if any(score.packed_top for score in scores) else None,
            "text_offset": choice.places(scores),
        }

    def _name(self, token: int) -> str:
        """The token's text; bytes that are none by themselves as OpenAI writes them."""
        found = self.tokenizer.token_bytes(token)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)


def _delta(choice: Choice, text: str, is_last: bool) -> dict[str, Any]:
    """Content and calls in a piece of text; nothing that is empty."""
    if choice.reader is None:
        return {"content": text} if text else {}
    pieces = choice.reader.feed(text) + (choice.reader.end() if is_last else [])
    content = "".join(piece for piece in pieces if isinstance(piece, str))
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        if isinstance(piece, CallPiece):
            call = calls.setdefault(piece.index, {"index": piece.index, "function": {}})
            if piece.name is not None:
                call |= {"id": piece.id, "type": "function"}
                call["function"]["name"] = piece.name
            call["function"].setdefault("arguments", "")
            call["function"]["arguments"] += piece.arguments
    found: dict[str, Any] = {"content": content} if content else {}
    return found | ({"tool_calls": [*calls.values()]} if calls else {})


class ChatReply(Reply):
    """Of /v1/chat/completions."""

    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def opening(self, choice: Choice) -> bytes:
        delta = {"role": "assistant", "content": ""}
        content = {"delta": delta, "logprobs": None, "finish_reason": None}
        return self._chunk_event({"index": choice.index} | content, choice)

    def chunk(
        self, choice: Choice, text: str, scores: list[TokenScore], finish: str | None
    ) -> bytes:
        found = self._choice(choice, text, scores, finish)
        return self._chunk_event(found, choice) if found["delta"] or scores or finish else b""

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        found = super()._whole_choice(choice)
        delta = found.pop("delta")
        message = {"role": "assistant", "content": delta.get("content"), "refusal": None}
        if calls := delta.get("tool_calls"):
            message["tool_calls"] = [
                {name: value for name, value in call.items() if name != "index"} for call in calls
            ]
        elif message["content"] is None:
            message["content"] = ""
        return found | {"message": message}

    def _choice(
        self, choice: Choice, text: str, scores: list[TokenScore], finish: str | None
    ) -> dict[str, Any]:
        found = super()._choice(choice, text, scores, finish)
        del found["text"]
        found["delta"] = _delta(choice, text, finish is not None)
        if finish == "stop" and choice.reader is not None and choice.reader.calls:
            found["finish_reason"] = "tool_calls"
        return found

    def _logprobs(self, choice: Choice, scores: list[TokenScore]) -> dict[str, Any]:
        entries = (
            self._token(score.token, score.logprob)
            | {"top_logprobs": [self._token(*entry) for entry in score.top]}
            for score in scores
        )
        return {"content": entries, "refusal": None}

    def _token(self, token: int, logprob: float | None) -> dict[str, Any]:
        found = self.tokenizer.token_bytes(token)
        return {"token": found.decode(errors="replace"), "logprob": logprob, "bytes": list(found)}
