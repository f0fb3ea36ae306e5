# SPDX-License-Identifier: Apache-2.0
"""Messages and tools of a chat, as clients send them and as chat templates read them."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from sparse_bitnet.data.chat import call_arguments


class StrictModel(BaseModel):
    """A request body or a part of one; unknown fields and other types are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    def check(self) -> None:
        """Raise `ApiError` for a body whose parameters are not supported, or do not fit together."""


class Replayed(StrictModel):
    """A part that clients copy from an earlier answer of any server: unknown fields are ignored."""

    model_config = ConfigDict(extra="allow")


def ignored_below(body: BaseModel) -> set[str]:
    """Return the paths of the unknown fields in the parts of a body."""
    names: set[str] = set()
    for name in type(body).model_fields:
        value = getattr(body, name)
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, Replayed):
                extra = {
                    key for key, given in (part.model_extra or {}).items() if given is not None
                }
                names |= {f"{name}.{inner}" for inner in extra | ignored_below(part)}
    return names


_Thought = Literal["thinking", "redacted_thinking", "reasoning"]


class TextPart(Replayed):
    """A piece of content. Thoughts are ignored; anything but text is refused."""

    type: Literal["text", "input_text", "output_text", "refusal"] | _Thought
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _has_text(self) -> "TextPart":
        if self.type.endswith("text") and self.text is None:
            raise ValueError("text is missing")
        return self

    @property
    def shown(self) -> str:
        """The text; "" for a thought."""
        if self.type == "refusal":
            return self.refusal or ""
        return self.text or "" if self.type.endswith("text") else ""


Parts = Annotated[list[TextPart], Field(max_length=10_000, fail_fast=True)]


class FunctionCall(Replayed):
    """Function call of an assistant, with the arguments as it wrote them."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Replayed):
    """One tool call in an assistant's message."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall

    def plain(self, as_text: bool) -> dict[str, Any]:
        """Return the call for a chat template: arguments as an object, if they are one, or as text."""
        values, text = call_arguments(self.function.arguments)
        arguments = text if as_text or values is None else values
        called = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id or "", "type": "function", "function": called}


class Message(Replayed):
    """A message of any role."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Parts | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=1000, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: Any = None
    refusal: Any = None

    @model_validator(mode="after")
    def _fits_its_role(self) -> "Message":
        if self.role != "assistant" and self.tool_calls:
            raise ValueError("only the role assistant has tool_calls")
        if self.role != "tool" and self.tool_call_id:
            raise ValueError("only the role tool has a tool_call_id")
        if self.content is None and self.role not in ("assistant", "tool"):
            raise ValueError("content is missing")
        # A model that cannot see them would answer wrongly.
        for name in ("images", "videos", "audios"):
            if (self.model_extra or {}).get(name):
                raise ValueError(f"{name} are not supported: this model reads only text")
        return self

    @property
    def text(self) -> str:
        """The content as one string."""
        if self.content is None and isinstance(self.refusal, str):
            return self.refusal
        if isinstance(self.content, list):
            return "".join(part.shown for part in self.content)
        return self.content or ""

    def plain(self, as_text: bool = False) -> dict[str, Any]:
        """Return the message for a chat template, with the arguments of calls as text or as objects.
        Empty optional names are absent, since templates test for their presence."""
        given = {"name": self.name, "tool_call_id": self.tool_call_id}
        if self.role == "assistant" and isinstance(self.reasoning_content, str):
            given["reasoning_content"] = self.reasoning_content
        # Templates know the older name of a developer's message.
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": self.text}
        message |= {name: value for name, value in given.items() if value}
        if self.tool_calls:
            message["tool_calls"] = [call.plain(as_text) for call in self.tool_calls]
        return message


class FunctionTool(Replayed):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def plain(self) -> dict[str, Any]:
        """Return the tool for a chat template."""
        function = self.model_dump(include={"name", "description", "parameters"}, exclude_none=True)
        return {"type": "function", "function": function}


class Tool(Replayed):
    """A function; other kinds of tools do not exist here."""

    type: Literal["function"]
    function: FunctionTool
