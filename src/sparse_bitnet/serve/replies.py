"""What the HTTP server answers: OpenAI's completion and chat objects, whole or as stream chunks."""

import codecs
import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from sparse_bitnet.generation.request import Generation, TokenScore
from sparse_bitnet.generation.text import TextTokenizer

DONE = b"data: [DONE]\n\n"


def event(content: dict[str, Any]) -> bytes:
    """One server-sent event. ASCII: whatever lies in between cannot split a character."""
    return b"data: " + json.dumps(content, separators=(",", ":")).encode("ascii") + b"\n\n"


def usage(generations: Sequence[Generation], prompts: int) -> dict[str, Any]:
    """Tokens of ended generations. The choices of one prompt stand together and count it once;
    generated tokens include the one that ends a text."""
    first_choices = generations[:: len(generations) // prompts]
    prompt = sum(len(generation.request.prompt) for generation in first_choices)
    generated = sum(generation.generated for generation in generations)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(g.cached for g in first_choices)},
    }


PlacedScore = tuple[TokenScore, int]
"""With where in the text the token begins."""


class Choice:
    """One text as it grows, with its log-probabilities."""

    def __init__(self, index: int, tokenizer: TextTokenizer, text: str = "") -> None:
        self.index = index
        self.text = text
        self.scores: list[PlacedScore] = []
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._place = 0

    def add(self, text: str, scores: Sequence[TokenScore]) -> list[PlacedScore]:
        """Append; returns the scores with their places."""
        placed = []
        for score in scores:
            placed.append((score, self._place))
            if score.token not in self._tokenizer.special_tokens:
                piece = self._tokenizer.token_bytes(score.token)
                self._place += len(self._decoder.decode(piece))
        self.text += text
        self.scores += placed
        return placed

    def cut(self) -> None:
        """Drop the scores of tokens that a stop string has taken out of the text."""
        self.scores = [(score, place) for score, place in self.scores if place < len(self.text)]


class Reply:
    """The objects of one response; they share id, time and model."""

    whole_kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, model: str, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        self._head: dict[str, Any] = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "object": self.whole_kind,
            "created": int(time.time()),
            "model": model,
        }

    def whole(
        self, choices: Sequence[Choice], generations: Sequence[Generation], prompts: int
    ) -> dict[str, Any]:
        """The answer that is not streamed."""
        done = [
            self._whole_choice(choice, generation)
            for choice, generation in zip(choices, generations, strict=True)
        ]
        return self._head | {"choices": done, "usage": usage(generations, prompts)}

    def chunk(
        self,
        choice: Choice,
        text: str,
        scores: Sequence[PlacedScore] | None,
        finish: str | None,
        include_usage: bool,
    ) -> bytes:
        """An event with a piece of one choice. `scores` None: log-probabilities were not asked for."""
        content = self._chunk_choice(choice, text, scores, finish)
        return event(self._chunk_head([content]) | ({"usage": None} if include_usage else {}))

    def opening(self, choice: Choice, include_usage: bool) -> bytes:
        """What precedes the first piece of a choice: of a completion, the prompt it repeats."""
        return self.chunk(choice, choice.text, None, None, include_usage) if choice.text else b""

    def usage_chunk(self, generations: Sequence[Generation], prompts: int) -> bytes:
        """The last event where usage is wanted."""
        return event(self._chunk_head([]) | {"usage": usage(generations, prompts)})

    def _chunk_head(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._head | {"object": self.chunk_kind, "choices": choices}

    def _whole_choice(self, choice: Choice, generation: Generation) -> dict[str, Any]:
        wanted = generation.request.top_scores is not None
        return self._chunk_choice(
            choice, choice.text, choice.scores if wanted else None, generation.finish
        )

    def _chunk_choice(
        self, choice: Choice, text: str, scores: Sequence[PlacedScore] | None, finish: str | None
    ) -> dict[str, Any]:
        logprobs = None if scores is None else self._completion_logprobs(scores)
        return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _completion_logprobs(self, scores: Sequence[PlacedScore]) -> dict[str, Any]:
        tops = [
            {self._name(token): logprob for token, logprob in score.top} if score.top else None
            for score, _ in scores
        ]
        return {
            "tokens": [self._name(score.token) for score, _ in scores],
            "token_logprobs": [score.logprob for score, _ in scores],
            "top_logprobs": tops if any(tops) else None,
            "text_offset": [place for _, place in scores],
        }

    def _name(self, token: int) -> str:
        """The token's text; bytes that are none by themselves as OpenAI writes them."""
        found = self.tokenizer.token_bytes(token)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)


class ChatReply(Reply):
    """Of /v1/chat/completions."""

    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def opening(self, choice: Choice, include_usage: bool) -> bytes:
        content = {
            "index": choice.index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return event(self._chunk_head([content]) | ({"usage": None} if include_usage else {}))

    def _whole_choice(self, choice: Choice, generation: Generation) -> dict[str, Any]:
        wanted = generation.request.top_scores is not None
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._chat_logprobs(choice.scores) if wanted else None,
            "finish_reason": generation.finish,
        }

    def _chunk_choice(
        self, choice: Choice, text: str, scores: Sequence[PlacedScore] | None, finish: str | None
    ) -> dict[str, Any]:
        return {
            "index": choice.index,
            "delta": {"content": text} if text else {},
            "logprobs": None if scores is None else self._chat_logprobs(scores),
            "finish_reason": finish,
        }

    def _chat_logprobs(self, scores: Sequence[PlacedScore]) -> dict[str, Any]:
        return {
            "content": [
                self._token(score.token, score.logprob)
                | {"top_logprobs": [self._token(*entry) for entry in score.top]}
                for score, _ in scores
            ],
            "refusal": None,
        }

    def _token(self, token: int, logprob: float | None) -> dict[str, Any]:
        found = self.tokenizer.token_bytes(token)
        text = found.decode(errors="replace")
        return {"token": text, "logprob": logprob, "bytes": list(found)}
