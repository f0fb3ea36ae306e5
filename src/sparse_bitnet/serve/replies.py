# SPDX-License-Identifier: Apache-2.0
"""Response bodies of the server: OpenAI's completions and chats, whole or in chunks, and embeddings."""

import base64
import json
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from sparse_bitnet.generation.request import Generation, TokenScore
from sparse_bitnet.generation.text import TextStream
from sparse_bitnet.serve.api_error import ApiError
from sparse_bitnet.serve.generations import ServedModel
from sparse_bitnet.serve.schema import Body, ChatBody, EmbeddingsBody
from sparse_bitnet.serve.tool_calls import CallPiece, ToolCallReader

_PIECES = 1 << 12
"""Names, values and commas of an answer that are written at once."""


def dumped(content: Any) -> str:
    """JSON in ASCII: whatever lies in between cannot split a character. Iterators become lists."""
    return json.dumps(content, separators=(",", ":"), default=list)


def event(content: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return f"data: {dumped(content)}\n\n".encode()


def json_blocks(content: dict[str, Any]) -> Iterator[bytes]:
    """JSON in blocks, made as they are asked for: other threads have their turn in between. Iterators
    become lists one by one."""
    pieces = json.JSONEncoder(separators=(",", ":"), default=list).iterencode(content)
    while block := "".join(islice(pieces, _PIECES)):
        yield block.encode()


class Choice:
    """One text as it grows, with the log-probabilities that have not been sent."""

    def __init__(
        self,
        generation: Generation,
        index: int,
        echo: str = "",
        reader: ToolCallReader | None = None,
    ) -> None:
        """`echo` precedes the text; `reader` is for one that may hold calls."""
        self.generation, self.index, self.echo = generation, index, echo
        self.reader = reader
        self.scores: list[TokenScore] = []
        self.generated = 0
        """Tokens up to the last event."""
        self.lacks_prompt_scores = True
        request = generation.request
        assert request.tokenizer is not None
        self._tokenizer = request.tokenizer
        self._stream = TextStream(self._tokenizer, is_start=bool(echo) or request.strips_start)
        self._place = 0

    @property
    def text(self) -> str:
        """All of it, when the generation has ended."""
        return self.echo + self.generation.text

    def take_prompt_scores(self) -> None:
        """Those of an echoed prompt come before all others."""
        if self.lacks_prompt_scores:
            self.scores += self.generation.prompt_scores
            self.lacks_prompt_scores = False

    def read(self, text: str, is_last: bool) -> list[str | CallPiece]:
        """Divide a piece of text into content and calls."""
        if self.reader is None:
            return [text] if text else []
        return self.reader.feed(text) + (self.reader.end() if is_last else [])

    def places(self, scores: Iterable[TokenScore]) -> Iterator[int]:
        """Yield the text offset, in characters, of each token. `scores` follow those of the last call."""
        for score in scores:
            yield self._place
            text = self._stream.feed(score.token)
            if score.token in self._tokenizer.special_tokens:
                # Which a prompt may spell out, and a generated text does not show.
                name = self._tokenizer.token_bytes(score.token).decode(errors="replace")
                text = name if self.echo.startswith(name, self._place) else text
            self._place += len(text)


class Reply:
    """The objects of one response; they share id, time and model. Those of /v1/completions."""

    whole_kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, model: ServedModel, body: Body) -> None:
        self._body, self._tokenizer = body, model.tokenizer
        self._head: dict[str, Any] = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "object": self.chunk_kind,
            "created": int(time.time()),
            "model": model.name,
        }

    def whole(self, choices: Sequence[Choice]) -> Iterator[bytes]:
        """The answer that is not streamed, in blocks."""
        yield from json_blocks(
            self._head
            | {
                "object": self.whole_kind,
                "choices": [self._whole_choice(choice) for choice in choices],
                "usage": self._usage(choices),
            }
        )

    def opening(self, choice: Choice) -> bytes:
        """Return the event before the first piece of a choice: the prompt, if a completion echoes it."""
        if not choice.echo:
            return b""
        return self._chunk_event(self._entry(choice, None, text=choice.echo), choice)

    def chunk(
        self, choice: Choice, text: str, scores: list[TokenScore], finish: str | None
    ) -> bytes:
        """An event with a piece of one choice; empty while it has to be held back."""
        return self._chunk_event(self._choice(choice, text, scores, finish), choice)

    def failure(self, error: ApiError) -> bytes:
        """The event of a choice that has failed."""
        return event(error.body)

    def end(self, choices: Sequence[Choice]) -> bytes:
        """Return the events after the last piece of all choices: usage, if requested, and [DONE]."""
        options, done = self._body.stream_options, b"data: [DONE]\n\n"
        if options is None or not options.include_usage:
            return done
        return event(self._head | {"choices": [], "usage": self._usage(choices)}) + done

    def _usage(self, choices: Sequence[Choice], generated: int | None = None) -> dict[str, Any]:
        """Return the token usage of ended generations, or of one after `generated` tokens. A prompt
        counts once for all its choices; generated tokens include the one that ends a text."""
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

    def _chunk_event(self, entry: dict[str, Any], choice: Choice) -> bytes:
        chunk, options = self._head | {"choices": [entry]}, self._body.stream_options
        if options is not None and options.include_usage:
            is_told = options.continuous_usage_stats
            chunk["usage"] = self._usage([choice], choice.generated) if is_told else None
        return event(chunk)

    def _entry(self, choice: Choice, finish: str | None, **more: Any) -> dict[str, Any]:
        return {"index": choice.index, "logprobs": None, "finish_reason": finish} | more

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        return self._choice(choice, choice.text, choice.scores, choice.generation.finish_reason)

    def _choice(
        self, choice: Choice, text: str, scores: list[TokenScore], finish: str | None
    ) -> dict[str, Any]:
        return self._entry(choice, finish, text=text, logprobs=self._logprobs(choice, scores))

    def _logprobs(self, choice: Choice, scores: list[TokenScore]) -> dict[str, Any] | None:
        if self._body.top_scores is None:
            return None
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
        given = self._tokenizer.token_bytes(token)
        try:
            return given.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in given)


class ChatReply(Reply):
    """Those of /v1/chat/completions."""

    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def opening(self, choice: Choice) -> bytes:
        delta = {"role": "assistant", "content": ""}
        return self._chunk_event(self._entry(choice, None, delta=delta), choice)

    def chunk(
        self, choice: Choice, text: str, scores: list[TokenScore], finish: str | None
    ) -> bytes:
        entry = self._choice(choice, text, scores, finish)
        return self._chunk_event(entry, choice) if entry["delta"] or scores or finish else b""

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        entry = super()._whole_choice(choice)
        delta = entry.pop("delta")
        calls = delta.get("tool_calls", [])
        message = {"role": "assistant", "content": None if calls else "", "refusal": None} | delta
        for call in calls:
            del call["index"]
        return entry | {"message": message}

    def _choice(
        self, choice: Choice, text: str, scores: list[TokenScore], finish: str | None
    ) -> dict[str, Any]:
        pieces = choice.read(text, is_last=finish is not None)
        content = "".join(piece for piece in pieces if isinstance(piece, str))
        calls: dict[int, dict[str, Any]] = {}
        for piece in pieces:
            if isinstance(piece, CallPiece):
                blank = {"index": piece.index, "function": {"arguments": ""}}
                call = calls.setdefault(piece.index, blank)
                if piece.name is not None:
                    call |= {"id": piece.id, "type": "function"}
                    call["function"]["name"] = piece.name
                call["function"]["arguments"] += piece.arguments
        # Nothing in it is empty.
        delta = {"content": content, "tool_calls": [*calls.values()]}
        delta = {name: value for name, value in delta.items() if value}
        if finish == "stop" and choice.reader is not None and choice.reader.calls:
            finish = "tool_calls"
        return self._entry(choice, finish, delta=delta, logprobs=self._logprobs(choice, scores))

    def _logprobs(self, choice: Choice, scores: list[TokenScore]) -> dict[str, Any] | None:
        if self._body.top_scores is None:
            return None
        entries = (
            self._token(score.token, score.logprob)
            | {"top_logprobs": (self._token(*entry) for entry in score.top)}
            for score in scores
        )
        return {"content": entries, "refusal": None}

    def _token(self, token: int, logprob: float | None) -> dict[str, Any]:
        given = self._tokenizer.token_bytes(token)
        return {"token": given.decode(errors="replace"), "logprob": logprob, "bytes": list(given)}


def call_reader(model: ServedModel, body: Body) -> ToolCallReader | None:
    """Return a reader for one text; None where it holds no calls."""
    if not isinstance(body, ChatBody) or not body.functions or model.tool_syntax is None:
        return None
    names = frozenset(function.name for function in body.functions)
    return ToolCallReader(model.tool_syntax, names, in_thought=body._in_thought)


def vectors_reply(
    name: str, body: EmbeddingsBody, generations: Sequence[Generation]
) -> Iterator[bytes]:
    """The answer of /v1/embeddings, in blocks."""

    def entry(index: int, vector: np.ndarray) -> dict[str, Any]:
        vector = vector[: body.dimensions].astype("<f4")
        vector /= max(float(np.linalg.norm(vector)), 1e-12)
        embedding: Any = map(float, vector)
        if body.encoding_format == "base64":
            embedding = base64.b64encode(vector.tobytes()).decode()
        return {"object": "embedding", "index": index, "embedding": embedding}

    tokens = sum(generation.prompt_tokens for generation in generations)
    vectors = [generation.embedding for generation in generations]
    yield from json_blocks(
        {
            "object": "list",
            "data": (entry(index, v) for index, v in enumerate(vectors) if v is not None),
            "model": name,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
    )
