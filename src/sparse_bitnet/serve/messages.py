# SPDX-License-Identifier: Apache-2.0
"""The messages and the tools of a chat as clients write them, and as chat templates read them."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from sparse_bitnet.data.chat import call_arguments


class StrictModel(BaseModel):
    """A body or a part of one: nothing unknown, nothing converted."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    def check(self) -> None:
        """Raise `ApiError` for a body whose parameters are not supported, or do not fit together."""


class Replayed(StrictModel):
    """A part as clients dump it, whatever server gave it to them: unknown names are ignored."""

    model_config = ConfigDict(extra="allow")

    @property
    def unused(self) -> set[str]:
        """Names of what is given here and has no effect."""
        return {name for name, value in (self.model_extra or {}).items() if value is not None}


def ignored_below(body: BaseModel) -> set[str]:
    """Return the names, with their places, of what has no effect in the parts of a body."""
    return {
        f"{name}.{inner}"
        for name in type(body).model_fields
        if isinstance(given := getattr(body, name), list | Replayed)
        for part in (given if isinstance(given, list) else [given])
        if isinstance(part, Replayed)
        for inner in part.unused | ignored_below(part)
    }


class TextPart(Replayed):
    """A piece of content. Thoughts are ignored; other kinds than text are refused."""

    # fmt: off
    type: Literal[
        "text", "input_text", "output_text", "refusal", "thinking", "redacted_thinking", "reasoning"
    ]
    # fmt: on
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _has_text(self) -> "TextPart":
        if self.type.endswith("text") and self.text is None:
            raise ValueError("text is missing")
        return self

    @property
    def shown(self) -> str | None:
        """The text; None for a thought."""
        if self.type == "refusal":
            return self.refusal or ""
        return self.text if self.type.endswith("text") else None

    @property
    def unused(self) -> set[str]:
        return super().unused if self.shown is not None else {self.type}


Parts = Annotated[list[TextPart], Field(max_length=10_000, fail_fast=True)]


class FunctionCall(Replayed):
    """Function call of an assistant, with the arguments as it wrote them."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Replayed):
    """One call of an assistant's message."""

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
            raise ValueError("tool_calls are an assistant's")
        if self.role != "tool" and self.tool_call_id:
            raise ValueError("tool_call_id belongs to role tool")
        if self.content is None and self.role not in ("assistant", "tool"):
            raise ValueError("content is missing")
        # A model that does not see them would answer wrong.
        for name in ("images", "videos", "audios"):
            if (self.model_extra or {}).get(name):
                raise ValueError(f"{name} are not supported: this model reads text")
        return self

    @property
    def _thoughts(self) -> str | None:
        """Those that a template may show."""
        is_shown = self.role == "assistant" and isinstance(self.reasoning_content, str)
        return self.reasoning_content if is_shown else None

    @property
    def text(self) -> str:
        """The content as one text."""
        if self.content is None and isinstance(self.refusal, str):
            return self.refusal
        if isinstance(self.content, list):
            return "".join(part.shown or "" for part in self.content)
        return self.content or ""

    @property
    def unused(self) -> set[str]:
        names = super().unused
        if self.reasoning_content is not None and self._thoughts is None:
            names.add("reasoning_content")
        if self.refusal is not None and self.text is not self.refusal:
            names.add("refusal")
        return names

    def plain(self, as_text: bool = False) -> dict[str, Any]:
        """Return the message for a chat template, with the arguments of calls as text or as objects.
        Empty optional names are absent, since templates test for their presence."""
        given = {"name": self.name, "tool_call_id": self.tool_call_id}
        given["reasoning_content"] = self._thoughts
        # Templates know the older name of a developer's message.
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": self.text}
        message |= {name: value for name, value in given.items() if value}
        if self.tool_calls:
            message["tool_calls"] = [call.plain(as_text) for call in self.tool_calls]
        return message


class FunctionTool(Replayed):
    """A function and its arguments."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("parameters", mode="before")
    @classmethod
    def _is_schema(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, dict | None):
            raise ValueError(f"the schema of {info.data.get('name')!r} is not a JSON object")
        return value

    def plain(self) -> dict[str, Any]:
        """Return the tool for a chat template."""
        shown = {"name", "description", "parameters"}
        function = self.model_dump(include=shown, exclude_none=True)
        return {"type": "function", "function": function}


class Tool(Replayed):
    """A function; there are no other tools."""

    type: Literal["function"]
    function: FunctionTool
