# SPDX-License-Identifier: Apache-2.0
"""The functions that a chat may call, as clients give them, and rules for texts that hold calls."""

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from sparse_bitnet.generation.grammar import Grammar, json_rule, lark_text
from sparse_bitnet.serve.api_error import ApiError
from sparse_bitnet.serve.messages import Replayed, StrictModel
from sparse_bitnet.serve.tool_calls import END_OF_THOUGHT, PYTHON_TAG, THOUGHT, ToolSyntax

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class FunctionTool(Replayed):
    """A function and its arguments."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("parameters", mode="before")
    @classmethod
    def _is_schema(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, dict | None):
            raise ValueError(f"the schema of {info.data.get('name')!r} is not a JSON object")
        return value


class Tool(Replayed):
    """A function; there are no other tools."""

    type: Literal["function"]
    function: FunctionTool


class NamedFunction(StrictModel):
    """The name alone."""

    name: str


class NamedTool(StrictModel):
    """The one that is to be called."""

    type: Literal["function"]
    function: NamedFunction


class WithTools(StrictModel):
    """The parameters of a body that are about tools."""

    tools: Annotated[list[Tool] | None, Field(max_length=128, fail_fast=True)] = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    @property
    def functions(self) -> list[FunctionTool]:
        """Those that may be called."""
        return [] if self.tool_choice == "none" else [tool.function for tool in self.tools or ()]

    def plain_tools(self) -> list[dict[str, Any]] | None:
        """For a chat template; None without any."""
        shown = ("name", "description", "parameters")
        return [
            {
                "type": "function",
                "function": function.model_dump(include={*shown}, exclude_none=True),
            }
            for function in self.functions
        ] or None

    def check_tools(self) -> None:
        """Raises `ApiError` for a choice among tools that are not there."""
        names = [tool.function.name for tool in self.tools or ()]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ApiError(400, f"two tools have the same name, {twice[0]!r}", param="tools")
        choice = self.tool_choice
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            name = choice.function.name[:64]
            raise ApiError(
                400, f"tool_choice: {name!r} is not one of the tools", param="tool_choice"
            )
        if choice == "required" and not names:
            raise ApiError(400, "tool_choice required needs tools", param="tool_choice")

    @property
    def calls_are_forced(self) -> bool:
        """The answer is calls and nothing else."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    def rules(self, syntax: ToolSyntax, answer: str, in_thought: bool) -> Grammar | None:
        """Those of the text: calls that were asked for come, and strict ones fit; None where any text
        may. `answer`: the rule of a text without calls; `in_thought`: the prompt has begun one."""
        named = self.tool_choice if isinstance(self.tool_choice, NamedTool) else None
        functions = [
            function
            for function in self.functions
            if named is None or function.name == named.function.name
        ]
        is_single = named is not None or self.parallel_tool_calls is False
        return _rules(syntax, functions, answer, is_single, self.calls_are_forced, in_thought)


def _rules(
    syntax: ToolSyntax,
    functions: Sequence[FunctionTool],
    answer: str,
    is_single: bool,
    is_forced: bool,
    in_thought: bool = False,
) -> Grammar | None:
    """Texts with calls of these functions, each with arguments of its schema; None where any text may be
    written: none is forced, and no schema strict.

    Args:
        answer: the Lark rule of a text without calls; "": any text.
        is_single: one call at most; else any number.
        is_forced: at least one call and nothing else.
        in_thought: the text begins in a thought.
    """
    if not (is_forced or is_single or answer or any(f.strict for f in functions)):
        return None
    bodies = []
    for place, function in enumerate(functions):
        head = f'{{"name": {json.dumps(function.name)}, "{syntax.arguments}": '
        # Where a call is the model's choice, only a strict schema binds it: no other is looked at.
        is_bound = is_forced or function.strict
        schema = (function.parameters if is_bound else None) or {"type": "object"}
        rule = json_rule(schema, bool(function.strict))
        # A rule and a line for each: its comment names the one that an error is about.
        bodies.append(f'body_{place}: {lark_text(head)} {rule} "}}" // tool {function.name}')
    space = lark_text("\n") if syntax.opening else ""
    rules = [
        "%llguidance {}",
        f"inside: {space} body {space} {lark_text(syntax.closing) if syntax.closing else ''}",
        "body: " + " | ".join(f"body_{place}" for place in range(len(bodies))),
        *bodies,
    ]
    more = "" if is_single else f"({lark_text(syntax.between)} call)*"
    bound = [function.name for function in functions if is_forced or function.strict]
    about = f"{'tool' if len(bound) == 1 else 'tools'} {', '.join(bound):.1000}" if bound else ""
    rules.append(f"call: {lark_text(syntax.opening) if syntax.opening else ''} inside")
    begins, ends = (
        "|".join(re.escape(tag).replace("/", r"\/") for tag in tags)
        for tags in (THOUGHT, END_OF_THOUGHT)
    )
    thoughts = [
        f"BEGIN: /{begins}/",
        rf"END: (/(.|\n)*/ & ~/(.|\n)*({ends})(.|\n)*/) /{ends}/",
    ]
    before = "END" if in_thought else ""
    if is_forced or answer:
        rules.append(f"start: call {more}" + (f" | text\ntext: {answer}" if not is_forced else ""))
    elif syntax.opening:
        rules += [
            "start: opened inside | REST" if is_single else "start: (opened inside)* REST",
            f"opened[lazy]: {before} (SPOKEN BEGIN END)* SPOKEN {lark_text(syntax.opening)}",
            rf"SPOKEN: /(.|\n)*/ & ~/(.|\n)*({begins})(.|\n)*/",
            "REST: /(.|\\n)*/",
            *thoughts,
        ]
    else:
        # What is read as a call has to be one.
        lead = rf"(/[ \t\r\n]|{re.escape(PYTHON_TAG)}/ | BEGIN END)"
        rules += [
            f"start: {'LEAD' if in_thought else 'LEAD?'} call {more} | TEXT",
            f"LEAD: {before} {lead}" + ("*" if in_thought else "+"),
            rf'TEXT: /(.|\n)*/ & ~({before} {lead}* "{{" /(.|\n)*/)',
            *thoughts,
        ]
    return Grammar.lark("\n".join(rules), about)
