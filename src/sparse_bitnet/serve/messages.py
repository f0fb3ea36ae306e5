# SPDX-License-Identifier: Apache-2.0
"""The messages of a chat as clients write them, and as chat templates read them."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class StrictModel(BaseModel):
    """A body or a part of one: nothing unknown, nothing converted."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    def check(self) -> None:
        """Of a body: raises `ApiError` for parameters that do not fit together, or are not supported."""


class TextPart(StrictModel):
    """A piece of content; other kinds than text are refused."""

    type: Literal["text"]
    text: str


class FunctionCall(StrictModel):
    """What an assistant has called, the arguments as it wrote them."""

    name: str
    arguments: str

    def plain(self) -> dict[str, Any]:
        """For a chat template: arguments as an object, or as the text if they are none."""
        try:
            found = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            found = None
        return {
            "name": self.name,
            "arguments": found if isinstance(found, dict) else self.arguments,
        }


class ToolCall(StrictModel):
    """One call of an assistant's message."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None
    """Left over where a client joined a stream's deltas."""

    def plain(self) -> dict[str, Any]:
        """For a chat template."""
        return {"id": self.id, "type": self.type, "function": self.function.plain()}


class Message(StrictModel):
    """One of any role. What clients send back of an answer, and is empty here, is accepted."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None

    @field_validator("annotations")
    @classmethod
    def _without_annotations(cls, value: list[Any] | None) -> list[Any] | None:
        if value:
            raise ValueError("annotations are not supported")
        return value

    @model_validator(mode="after")
    def _fits_its_role(self) -> "Message":
        if self.role != "assistant" and (self.tool_calls or self.reasoning_content):
            raise ValueError("tool_calls and reasoning_content are an assistant's")
        if self.role != "tool" and self.tool_call_id is not None:
            raise ValueError("tool_call_id belongs to role tool")
        if self.content is None and not self.tool_calls and self.refusal is None:
            raise ValueError("content is missing")
        return self

    @property
    def text(self) -> str:
        """The content as one text."""
        if self.content is None:
            return self.refusal or ""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)

    def plain(self) -> dict[str, Any]:
        """For a chat template: templates ask which names are there."""
        # Templates know the older name of a developer's message.
        found: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.text,
        }
        for name in ("name", "tool_call_id", "reasoning_content"):
            if value := getattr(self, name):
                found[name] = value
        if self.tool_calls:
            found["tool_calls"] = [call.plain() for call in self.tool_calls]
        return found
