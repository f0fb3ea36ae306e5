# SPDX-License-Identifier: Apache-2.0
"""POST /v1/responses, translated to a chat. Nothing is stored: each request has the whole input. The
answer is output items, whole or as events."""

import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from sparse_bitnet.generation.request import TokenScore
from sparse_bitnet.serve.api_error import ApiError
from sparse_bitnet.serve.generations import ServedModel
from sparse_bitnet.serve.messages import StrictModel
from sparse_bitnet.serve.replies import Choice, Reply, dumped
from sparse_bitnet.serve.schema import Body, ChatBody, ChatLimit, SamplingBody, parse_body
from sparse_bitnet.serve.tool_calls import CallPiece


class TextOptions(StrictModel):
    """Structured output, as in a chat's `response_format`, and verbosity."""

    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesBody(SamplingBody):
    """POST /v1/responses. Items and tools are those of a chat in another format; kinds that only OpenAI
    has are ignored."""

    input: str | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=10_000)]
    instructions: str | None = None
    max_output_tokens: ChatLimit | None = None
    stream_options: dict[Literal["include_obfuscation"], bool | None] | None = None
    """Ignored: nothing is padded."""
    text: TextOptions | None = None
    reasoning: dict[str, Any] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def functions(self) -> list[dict[str, Any]]:
        """The tools that are functions."""
        return [tool for tool in self.tools or () if tool.get("type") in ("function", None)]

    def chat(self) -> ChatBody:
        """Return the request as a chat. Raises `ApiError` if a chat would be refused."""
        same = ("tool_choice", "parallel_tool_calls", "chat_template_kwargs")
        given = {name: getattr(self, name) for name in (*SamplingBody.model_fields, *same)}
        given |= {"messages": self._messages(), "max_tokens": self.max_output_tokens}
        given["reasoning_effort"] = (self.reasoning or {}).get("effort")
        if self.text is not None and self.text.format is not None:
            format = {n: value for n, value in self.text.format.items() if value is not None}
            if format.get("type") == "json_schema":
                format = {"type": format.pop("type"), "json_schema": format}
            given["response_format"] = format
        given["tools"] = [
            {"type": tool.get("type"), "function": {n: tool[n] for n in tool if n != "type"}}
            for tool in self.functions
        ]
        return parse_body(ChatBody, given)

    def _messages(self) -> list[dict[str, Any]]:
        """Return the messages of the chat. Ids and states copied from an earlier answer are ignored."""
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for item in self.input:
            match item.get("type"):
                case "message" | None:
                    messages.append({name: item.get(name) for name in ("role", "content")})
                case "function_call":
                    # In a chat, calls and the text before them are one message.
                    if not messages or messages[-1]["role"] != "assistant":
                        messages.append({"role": "assistant", "content": None})
                    call = {name: item[name] for name in ("name", "arguments") if name in item}
                    calls = messages[-1].setdefault("tool_calls", [])
                    calls.append({"id": item.get("call_id"), "function": call})
                case "function_call_output":
                    answer = {"tool_call_id": item.get("call_id"), "content": item.get("output")}
                    messages.append({"role": "tool"} | answer)
                case "item_reference":
                    message = "input: this server stores no items: send the item itself"
                    raise ApiError(400, message, param="input")
        return messages

    def named(self, ignored: set[str]) -> set[str]:
        """Return the names, as in this request, of the parameters that the chat ignored, and the ignored
        kinds of items and tools."""
        # Templates drop the thoughts of earlier turns.
        known = ("message", "function_call", "function_call_output", "reasoning", None)
        items = [] if isinstance(self.input, str) else self.input
        kinds = {f"input.{item['type']}" for item in items if item.get("type") not in known}
        kinds |= {
            f"tools.{tool['type']}" for tool in self.tools or () if tool not in self.functions
        }
        thinking = {**(self.reasoning or {}), "effort": None}
        kinds |= {f"reasoning.{key}" for key, value in thinking.items() if value is not None}
        limit = {"max_output_tokens"} if "max_tokens" in ignored else set()
        return kinds | limit | self.ignored


class ResponsesReply(Reply):
    """One answer of /v1/responses; it has one choice."""

    def __init__(self, model: ServedModel, body: Body, asked: ResponsesBody) -> None:
        super().__init__(model, body)
        self._output: list[dict[str, Any]] = []
        self._number = 0
        format = asked.text.format if asked.text is not None else None
        absent = dict.fromkeys(("description", "parameters", "strict"))
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
            "metadata": (asked.model_extra or {}).get("metadata") or {},
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": (asked.reasoning or {}).get("effort"), "summary": None},
            "store": False,
            "temperature": asked.temperature,
            "text": {"format": format or {"type": "text"}},
            "tool_choice": asked.tool_choice or "auto",
            "tools": [absent | tool for tool in asked.functions],
            "top_p": asked.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def whole(self, choices: Sequence[Choice]) -> Iterator[bytes]:
        [choice] = choices
        for _ in self._grow(choice, choice.generation.text, choice.generation.finish_reason):
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
        failed = {"code": "server_error", "message": str(error)}
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
        """Yield the events of a piece of text, and of the end."""
        for piece in choice.read(text, is_last=finish is not None):
            yield from self._say(piece) if isinstance(piece, str) else self._call(piece)
        if finish is None:
            return
        if not self._output:
            yield from self._say("")
        status = "completed" if finish == "stop" else "incomplete"
        yield from self._close(status)
        usage = self._usage([choice])
        self._response |= {
            "status": status,
            "incomplete_details": None if finish == "stop" else {"reason": "max_output_tokens"},
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }
        yield {"type": f"response.{status}", "response": self._response}

    def _at(self, kind: str, **more: Any) -> dict[str, Any]:
        """Return an event about the last item."""
        item, place = self._output[-1], len(self._output) - 1
        more = more if "item" in more else more | {"item_id": item["id"]}
        return {"type": f"response.{kind}", "output_index": place} | more

    def _is_open(self, kind: str | None = None) -> bool:
        """Whether the last item, of that kind if given, still grows."""
        item = self._output[-1] if self._output else {"status": None}
        return item["status"] == "in_progress" and kind in (None, item["type"])

    def _add(self, prefix: str, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._close("completed")
        self._output.append({"id": f"{prefix}_{uuid.uuid4().hex}", "status": "in_progress"} | item)
        yield self._at("output_item.added", item=self._output[-1])

    def _say(self, text: str) -> Iterator[dict[str, Any]]:
        if not self._is_open("message"):
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield from self._add("msg", {"type": "message", "role": "assistant", "content": []})
            self._output[-1]["content"].append(part)
            yield self._at("content_part.added", part=part, content_index=0)
        if text:
            self._output[-1]["content"][0]["text"] += text
            yield self._at("output_text.delta", delta=text, logprobs=[], content_index=0)

    def _call(self, piece: CallPiece) -> Iterator[dict[str, Any]]:
        if piece.name is not None:
            call = {"call_id": piece.id, "name": piece.name, "arguments": ""}
            yield from self._add("fc", {"type": "function_call"} | call)
        if piece.arguments:
            self._output[-1]["arguments"] += piece.arguments
            yield self._at("function_call_arguments.delta", delta=piece.arguments)

    def _close(self, status: str) -> Iterator[dict[str, Any]]:
        if not self._is_open():
            return
        item = self._output[-1]
        if item["type"] == "message":
            [part] = item["content"]
            yield self._at("output_text.done", text=part["text"], logprobs=[], content_index=0)
            yield self._at("content_part.done", part=part, content_index=0)
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._at("function_call_arguments.done", **done)
        item["status"] = status
        yield self._at("output_item.done", item=item)
