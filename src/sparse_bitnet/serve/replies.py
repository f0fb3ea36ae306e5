# SPDX-License-Identifier: Apache-2.0
"""Answers of the server: OpenAI's completions and chats, whole or in chunks, and embeddings."""

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
    """Return JSON in ASCII, so that a proxy cannot split a character. Iterators become lists."""
    return json.dumps(content, separators=(",", ":"), default=list)


def event(content: dict[str, Any]) -> bytes:
    """Return one server-sent event."""
    return f"data: {dumped(content)}\n\n".encode()


def json_blocks(content: dict[str, Any]) -> Iterator[bytes]:
    """Yield JSON in blocks, so that other threads can run in between. Iterators become lists."""
    pieces = json.JSONEncoder(separators=(",", ":"), default=list).iterencode(content)
    while block := "".join(islice(pieces, _PIECES)):
        yield block.encode()


class Choice:
    """One output as it grows, with its log-probabilities that have not been sent.

    Attributes:
        echo: the prompt, if it is to precede the output.
        reader: extracts tool calls; None if there can be none.
        scores: log-probabilities that have not been sent.
        generated: number of tokens up to the last event.
    """

    def __init__(
        self, model: ServedModel, body: Body, generation: Generation, index: int, echo: str
    ) -> None:
        self.generation, self.index, self.echo = generation, index, echo
        self.reader = None
        if isinstance(body, ChatBody) and body.functions and model.tool_syntax is not None:
            names = frozenset(function.name for function in body.functions)
            self.reader = ToolCallReader(model.tool_syntax, names, in_thought=body._in_thought)
        self.scores: list[TokenScore] = []
        self.generated = 0
        self._tokenizer = model.tokenizer
        is_start = bool(echo) or generation.request.strips_start
        self._stream = TextStream(self._tokenizer, is_start=is_start)
        self._place = 0

    def read(self, text: str, is_last: bool) -> list[str | CallPiece]:
        """Divide a piece of text into content and tool calls."""
        if self.reader is None:
            return [text] if text else []
        return self.reader.feed(text) + (self.reader.end() if is_last else [])

    def places(self, scores: Iterable[TokenScore]) -> Iterator[int]:
        """Yield the text offset, in characters, of each token. `scores` follow those of the last call."""
        for score in scores:
            yield self._place
            text = self._stream.feed(score.token)
            if score.token in self._tokenizer.special_tokens:
                # A prompt may spell a special token, but output does not show it.
                name = self._tokenizer.token_bytes(score.token).decode(errors="replace")
                text = name if self.echo.startswith(name, self._place) else text
            self._place += len(text)


class Reply:
    """The objects of one answer of /v1/completions or /v1/chat/completions, with a common id and time."""

    def __init__(self, model: ServedModel, body: Body) -> None:
        self._body, self._tokenizer = body, model.tokenizer
        self._is_chat = isinstance(body, ChatBody)
        self._kind = "chat.completion" if self._is_chat else "text_completion"
        self._head: dict[str, Any] = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": f"{self._kind}.chunk" if self._is_chat else self._kind,
            "created": int(time.time()),
            "model": model.name,
        }

    def whole(self, choices: Sequence[Choice]) -> Iterator[bytes]:
        """Yield the answer in blocks, for a request without streaming."""
        entries = []
        for choice in choices:
            finish = choice.generation.finish_reason
            entry = self._entry(choice, choice.echo + choice.generation.text, choice.scores, finish)
            if self._is_chat:
                delta = entry.pop("delta")
                calls = delta.get("tool_calls", [])
                for call in calls:
                    del call["index"]
                blank = {"role": "assistant", "content": None if calls else "", "refusal": None}
                entry["message"] = blank | delta
            entries.append(entry)
        content = {"object": self._kind, "choices": entries, "usage": self._usage(choices)}
        yield from json_blocks(self._head | content)

    def opening(self, choice: Choice) -> bytes:
        """Return the event before the first piece of a choice: a role, or the echoed prompt."""
        entry = self._entry(choice, choice.echo)
        if self._is_chat:
            entry["delta"] = {"role": "assistant", "content": ""}
        return self._event(choice, entry) if self._is_chat or choice.echo else b""

    def chunk(
        self, choice: Choice, text: str, scores: list[TokenScore], finish: str | None
    ) -> bytes:
        """Return an event with a piece of one choice; b"" while the piece must be held back."""
        entry = self._entry(choice, text, scores, finish)
        is_empty = not (entry.get("text") or entry.get("delta") or scores or finish)
        return b"" if is_empty else self._event(choice, entry)

    def failure(self, error: ApiError) -> bytes:
        """Return the event for a choice that failed."""
        return event(error.body)

    def end(self, choices: Sequence[Choice]) -> bytes:
        """Return the events after the last piece of all choices: usage, if requested, and [DONE]."""
        options, done = self._body.stream_options, b"data: [DONE]\n\n"
        if options is None or not options.include_usage:
            return done
        return event(self._head | {"choices": [], "usage": self._usage(choices)}) + done

    def _usage(self, choices: Sequence[Choice], generated: int | None = None) -> dict[str, Any]:
        """Return the token usage of ended generations, or of one after `generated` tokens. A prompt
        counts once for all its choices; generated tokens include the one that ends an output."""
        generations = [choice.generation for choice in choices]
        first_choices = generations[:: self._body.n]
        prompt = sum(generation.prompt_tokens for generation in first_choices)
        if generated is None:
            generated = sum(generation.generated for generation in generations)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": sum(g.cached_tokens for g in first_choices)},
        }

    def _event(self, choice: Choice, entry: dict[str, Any]) -> bytes:
        chunk, options = self._head | {"choices": [entry]}, self._body.stream_options
        if options is not None and options.include_usage:
            is_told = options.continuous_usage_stats
            chunk["usage"] = self._usage([choice], choice.generated) if is_told else None
        return event(chunk)

    def _entry(
        self,
        choice: Choice,
        text: str,
        scores: list[TokenScore] | None = None,
        finish: str | None = None,
    ) -> dict[str, Any]:
        """Return a piece of a choice; for a chat, with a `delta` without empty fields."""
        entry: dict[str, Any] = {"index": choice.index}
        if self._is_chat:
            entry["delta"] = _delta(choice.read(text, is_last=finish is not None))
            if finish == "stop" and choice.reader is not None and choice.reader.calls:
                finish = "tool_calls"
        else:
            entry["text"] = text
        logprobs = None
        if scores is not None and self._body.top_scores is not None:
            logprobs = (self._token_scores if self._is_chat else self._logprobs)(choice, scores)
        return entry | {"logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, choice: Choice, scores: list[TokenScore]) -> dict[str, Any]:
        """Return log-probabilities in the format of completions."""
        return {
            "tokens": (self._name(score.token) for score in scores),
            "token_logprobs": (score.logprob for score in scores),
            "top_logprobs": map(self._top, scores) if any(s.packed_top for s in scores) else None,
            "text_offset": choice.places(scores),
        }

    def _top(self, score: TokenScore) -> dict[str, float | None] | None:
        names: dict[str, float | None] = {}
        for token, logprob in (*score.top, (score.token, score.logprob)):
            names.setdefault(self._name(token), logprob)  # two tokens may have one text
        return names if score.packed_top else None

    def _name(self, token: int) -> str:
        """Return the token's text; bytes that are not a character are written as OpenAI does."""
        given = self._tokenizer.token_bytes(token)
        try:
            return given.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in given)

    def _token_scores(self, choice: Choice, scores: list[TokenScore]) -> dict[str, Any]:
        """Return log-probabilities in the format of chats."""

        def named(token: int, logprob: float | None) -> dict[str, Any]:
            given = self._tokenizer.token_bytes(token)
            text = given.decode(errors="replace")
            return {"token": text, "logprob": logprob, "bytes": list(given)}

        entries = (
            named(score.token, score.logprob)
            | {"top_logprobs": (named(*entry) for entry in score.top)}
            for score in scores
        )
        return {"content": entries, "refusal": None}


def _delta(pieces: Iterable[str | CallPiece]) -> dict[str, Any]:
    """Return the content and the tool calls of a piece of a chat."""
    calls: dict[int, dict[str, Any]] = {}
    content = ""
    for piece in pieces:
        if isinstance(piece, str):
            content += piece
            continue
        call = calls.setdefault(piece.index, {"index": piece.index, "function": {"arguments": ""}})
        if piece.name is not None:
            call |= {"id": piece.id, "type": "function"}
            call["function"]["name"] = piece.name
        call["function"]["arguments"] += piece.arguments
    delta = {"content": content, "tool_calls": [*calls.values()]}
    return {name: value for name, value in delta.items() if value}


def vectors_reply(
    name: str, body: EmbeddingsBody, generations: Sequence[Generation]
) -> Iterator[bytes]:
    """Yield the answer of /v1/embeddings in blocks."""

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
