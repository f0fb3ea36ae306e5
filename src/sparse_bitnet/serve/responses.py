# SPDX-License-Identifier: Apache-2.0
"""POST /v1/responses, as a chat. Nothing is stored: each request has the whole input."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, field_validator

from sparse_bitnet.serve.messages import Parts, Replayed, StrictModel, plain_text
from sparse_bitnet.serve.response_format import NamedSchema
from sparse_bitnet.serve.schema import ChatBody, Limit, TolerantBody, parse_body
from sparse_bitnet.serve.tools import FunctionTool, NamedFunction


class _Item(StrictModel):
    """Of an input. Ids and states that come back from an earlier answer say nothing here."""

    model_config = ConfigDict(extra="ignore")


class MessageItem(_Item):
    """A message of any role."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Parts | None = None


class CallItem(_Item):
    """What the model has called."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class OutputItem(_Item):
    """What came of it."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Parts | None = None


class ReasoningItem(_Item):
    """Passed over: templates drop the thoughts of earlier turns."""

    type: Literal["reasoning"]


class Other(Replayed):
    """An item or a tool of a kind that there is only at OpenAI's: it is ignored."""

    type: str

    @field_validator("type")
    @classmethod
    def _is_here(cls, value: str) -> str:
        if value == "item_reference":
            raise ValueError("nothing is stored here: send the item itself")
        return value

    def ignored(self) -> set[str]:
        """The kind alone."""
        return {self.type}


def _among(*kinds: str) -> Discriminator:
    """Chooses by the type; the first kind where there is none."""

    def kind(given: Any) -> str:
        found = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
        found = kinds[0] if found is None else found
        return found if found in kinds else "other"

    return Discriminator(kind)


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[OutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[Other, Tag("other")],
    _among("message", "function_call", "function_call_output", "reasoning"),
]


class StreamPadding(StrictModel):
    """What pads a stream; nothing does."""

    include_obfuscation: bool | None = None


class TextFormat(NamedSchema):
    """The form of the text."""

    type: Literal["text", "json_object", "json_schema"]


class TextOptions(StrictModel):
    """About the text of the answer."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(StrictModel):
    """About thoughts."""

    effort: str | None = None
    summary: str | None = None


class FlatTool(FunctionTool):
    """A function."""

    type: Literal["function"]


AnyTool = Annotated[
    Annotated[FlatTool, Tag("function")] | Annotated[Other, Tag("other")], _among("function")
]


class FlatChoice(NamedFunction):
    """The one that is to be called."""

    type: Literal["function"]


class ResponsesBody(TolerantBody):
    """POST /v1/responses"""

    input: str | Annotated[list[Item], Field(min_length=1, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: Limit | None = None
    stream: bool | None = False
    stream_options: StreamPadding | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    tools: Annotated[list[AnyTool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatChoice | None = None

    @property
    def others(self) -> dict[str, Any]:
        """But for those that a chat has, too."""
        return {name: value for name, value in super().others.items() if name not in _COMMON}

    @property
    def neutral(self) -> dict[str, tuple[Any, ...]]:
        return super().neutral | _NEUTRAL

    def chat(self) -> ChatBody:
        """The same as a chat. Raises `ApiError` for what a chat would refuse."""
        others, neutral = self.model_extra or {}, self.neutral
        given: dict[str, Any] = {n: value for n, value in others.items() if n not in neutral}
        given |= {"model": self.model, "messages": self._messages(), "stream": self.stream}
        given["max_tokens"] = self.max_output_tokens
        if self.reasoning is not None:
            given["reasoning_effort"] = self.reasoning.effort
        if self.text is not None and self.text.format is not None:
            form = self.text.format.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
            form = {"json_schema": form} if self.text.format.type == "json_schema" else form
            given["response_format"] = {"type": self.text.format.type} | form
        shown = set(FunctionTool.model_fields)
        given["tools"] = [
            {"type": "function", "function": tool.model_dump(include=shown)}
            for tool in self.tools or ()
            if isinstance(tool, FlatTool)
        ]
        choice = self.tool_choice
        if isinstance(choice, FlatChoice):
            given["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        else:
            given["tool_choice"] = choice
        return parse_body(ChatBody, given)

    def _messages(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        if self.instructions:
            found.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*found, {"role": "user", "content": self.input}]
        for item in self.input:
            match item:
                case MessageItem():
                    content = None if item.content is None else plain_text(item.content)
                    found.append({"role": item.role, "content": content})
                case CallItem():
                    # Calls, and what is said before them, are one message of a chat.
                    if not found or found[-1]["role"] != "assistant":
                        found.append({"role": "assistant", "content": None})
                    call = {"name": item.name, "arguments": item.arguments}
                    calls = found[-1].setdefault("tool_calls", [])
                    calls.append({"id": item.call_id, "function": call})
                case OutputItem():
                    answer = {"tool_call_id": item.call_id, "content": plain_text(item.output)}
                    found.append({"role": "tool"} | answer)
        return found


PARAMETERS = {"max_tokens": "max_output_tokens", "messages": "input", "response_format": "text"}
"""A chat's by their names here, where they have others."""

_COMMON = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "repetition_penalty"),
        *("frequency_penalty", "presence_penalty", "logit_bias", "chat_template_kwargs"),
        "parallel_tool_calls",
    }
)
"""Parameters of a chat that mean the same here."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "background": (False,),
    "truncation": ("disabled",),
    "top_logprobs": (0,),
}
"""Values that change nothing, as None does, of parameters that are not supported."""
