# SPDX-License-Identifier: Apache-2.0
"""What /v1/responses answers: output items, whole or as the events by which they grow."""

import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sparse_bitnet.generation.request import TokenScore
from sparse_bitnet.serve.api_error import ApiError
from sparse_bitnet.serve.generations import ServedModel
from sparse_bitnet.serve.replies import Choice, Reply, dumped
from sparse_bitnet.serve.responses import FlatTool, ResponsesBody
from sparse_bitnet.serve.schema import ChatBody
from sparse_bitnet.serve.tool_calls import CallPiece


class ResponsesReply(Reply):
    """One response; there is one choice."""

    def __init__(self, model: ServedModel, body: ChatBody, asked: ResponsesBody) -> None:
        super().__init__(model, body)
        self._output: list[dict[str, Any]] = []
        self._number = 0
        self._response: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "model": model.name,
            "output": self._output,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning_effort, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [
                tool.model_dump() for tool in asked.tools or () if isinstance(tool, FlatTool)
            ],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
        }
        if asked.text is not None and asked.text.format is not None:
            form = asked.text.format.model_dump(by_alias=True, exclude_none=True)
            self._response["text"] = {"format": form}
        if asked.tool_choice is not None:
            choice = asked.tool_choice
            self._response["tool_choice"] = (
                choice if isinstance(choice, str) else choice.model_dump()
            )

    def whole(self, choices: Sequence[Choice]) -> Iterator[bytes]:
        [choice] = choices
        for _ in self._grow(choice, choice.text, choice.generation.finish_reason):
            pass
        yield dumped(self._response).encode()

    def opening(self, choice: Choice) -> bytes:
        kinds = ("response.created", "response.in_progress")
        return self._events({"type": kind, "response": self._response} for kind in kinds)

    def chunk(
        self, choice: Choice, text: str, scores: list[TokenScore], finish: str | None
    ) -> bytes:
        return self._events(self._grow(choice, text, finish))

    def failure(self, error: ApiError) -> bytes:
        found = error.body["error"]
        failed = {"code": "server_error", "message": found["message"]}
        self._response |= {"status": "failed", "error": failed}
        return self._events([{"type": "response.failed", "response": self._response}])

    def end(self, choices: Sequence[Choice]) -> bytes:
        return b""

    def _events(self, events: Iterable[dict[str, Any]]) -> bytes:
        lines = []
        for content in events:
            content = {"type": content["type"], "sequence_number": self._number} | content
            self._number += 1
            lines.append(f"event: {content['type']}\ndata: {dumped(content)}\n\n")
        return "".join(lines).encode()

    def _grow(self, choice: Choice, text: str, finish: str | None) -> Iterator[dict[str, Any]]:
        pieces: list[str | CallPiece] = [text] if text else []
        if choice.reader is not None:
            pieces = choice.reader.feed(text) + (choice.reader.end() if finish else [])
        for piece in pieces:
            if isinstance(piece, str):
                yield from self._say(piece)
            else:
                yield from self._call(piece)
        if finish is None:
            return
        if not self._output:
            yield from self._say("")
        is_whole = finish == "stop"
        yield from self._close("completed" if is_whole else "incomplete")
        usage = self._usage([choice])
        self._response |= {
            "status": "completed" if is_whole else "incomplete",
            "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }
        yield {"type": f"response.{self._response['status']}", "response": self._response}

    @property
    def _open(self) -> dict[str, Any] | None:
        """The item that still grows."""
        if self._output and self._output[-1]["status"] == "in_progress":
            return self._output[-1]
        return None

    def _at(self, **more: Any) -> dict[str, Any]:
        item = self._output[-1]
        return {"item_id": item["id"], "output_index": len(self._output) - 1} | more

    def _say(self, text: str) -> Iterator[dict[str, Any]]:
        if self._open is None or self._open["type"] != "message":
            yield from self._close("completed")
            yield self._add("msg", {"type": "message", "role": "assistant", "content": []})
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self._output[-1]["content"].append(part)
            yield {"type": "response.content_part.added", "part": part} | self._at(content_index=0)
        if text:
            self._output[-1]["content"][0]["text"] += text
            delta = {"type": "response.output_text.delta", "delta": text, "logprobs": []}
            yield delta | self._at(content_index=0)

    def _call(self, piece: CallPiece) -> Iterator[dict[str, Any]]:
        if piece.name is not None:
            yield from self._close("completed")
            call = {"call_id": piece.id, "name": piece.name, "arguments": ""}
            yield self._add("fc", {"type": "function_call"} | call)
        if piece.arguments:
            self._output[-1]["arguments"] += piece.arguments
            delta = {"type": "response.function_call_arguments.delta", "delta": piece.arguments}
            yield delta | self._at()

    def _add(self, prefix: str, item: dict[str, Any]) -> dict[str, Any]:
        self._output.append({"id": f"{prefix}_{uuid.uuid4().hex}", "status": "in_progress"} | item)
        at = {"output_index": len(self._output) - 1}
        return {"type": "response.output_item.added", "item": self._output[-1]} | at

    def _close(self, status: str) -> Iterator[dict[str, Any]]:
        item = self._open
        if item is None:
            return
        if item["type"] == "message":
            [part] = item["content"]
            text = {"type": "response.output_text.done", "text": part["text"], "logprobs": []}
            yield text | self._at(content_index=0)
            yield {"type": "response.content_part.done", "part": part} | self._at(content_index=0)
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield {"type": "response.function_call_arguments.done"} | done | self._at()
        item["status"] = status
        at = {"output_index": len(self._output) - 1}
        yield {"type": "response.output_item.done", "item": item} | at
