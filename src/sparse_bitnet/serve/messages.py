# SPDX-License-Identifier: Apache-2.0
"""The messages of a chat as clients write them, and as chat templates read them."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from sparse_bitnet.data.chat import call_arguments

_MEDIA = ("images", "videos", "audios")
"""Of a message: a model that does not see them would answer wrong."""


class StrictModel(BaseModel):
    """A body or a part of one: nothing unknown, nothing converted."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    def check(self) -> None:
        """Of a body: raises `ApiError` for parameters that do not fit together, or are not supported."""


class Replayed(StrictModel):
    """A part of a chat as clients dump it, whatever server gave it to them: unknown names are ignored."""

    model_config = ConfigDict(extra="allow")

    def ignored(self) -> set[str]:
        """Names of what is given here and below, and has no effect."""
        extra = self.model_extra or {}
        return {name for name, value in extra.items() if value is not None} | ignored_below(self)


def ignored_below(body: BaseModel) -> set[str]:
    """Names, with their places, of what is ignored in the parts of a body."""
    return {
        f"{name}.{inner}"
        for name in type(body).model_fields
        if isinstance(given := getattr(body, name), list | Replayed)
        for part in (given if isinstance(given, list) else [given])
        if isinstance(part, Replayed)
        for inner in part.ignored()
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

    def ignored(self) -> set[str]:
        """As of any part; a thought as a whole."""
        return super().ignored() if self.plain() is not None else {self.type}

    def plain(self) -> str | None:
        """The text; None: a thought."""
        if self.type == "refusal":
            return self.refusal or ""
        return self.text if self.type.endswith("text") else None


Parts = Annotated[list[TextPart], Field(fail_fast=True)]


def plain_text(content: str | list[TextPart] | None) -> str:
    """A content as one text."""
    if isinstance(content, list):
        return "".join(part.plain() or "" for part in content)
    return content or ""


class FunctionCall(Replayed):
    """What an assistant has called, the arguments as it wrote them."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Replayed):
    """One call of an assistant's message."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall

    def plain(self, as_text: bool) -> dict[str, Any]:
        """For a chat template: arguments as an object, if they are one, or as text."""
        values, text = call_arguments(self.function.arguments)
        arguments = text if as_text or values is None else values
        called = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id or "", "type": "function", "function": called}


class Message(Replayed):
    """One of any role."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Parts | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
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
        for name in _MEDIA:
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
        return plain_text(self.content)

    def ignored(self) -> set[str]:
        """As of any part, and of the other fields those without a use here."""
        found = super().ignored()
        if self.reasoning_content is not None and self._thoughts is None:
            found.add("reasoning_content")
        if self.refusal is not None and self.text is not self.refusal:
            found.add("refusal")
        return found

    def plain(self, as_text: bool = False) -> dict[str, Any]:
        """For a chat template: templates ask which names are there. `as_text`: arguments of calls are."""
        # Templates know the older name of a developer's message.
        found: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.text,
        }
        given = {"name": self.name, "tool_call_id": self.tool_call_id}
        given["reasoning_content"] = self._thoughts
        found |= {name: value for name, value in given.items() if value}
        if self.tool_calls:
            found["tool_calls"] = [call.plain(as_text) for call in self.tool_calls]
        return found
