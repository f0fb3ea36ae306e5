# SPDX-License-Identifier: Apache-2.0
"""The functions that a chat may call, as clients give them."""

from typing import Annotated, Any, Literal

from pydantic import Field

from sparse_bitnet.generation.grammar import Grammar
from sparse_bitnet.serve.api_error import ApiError
from sparse_bitnet.serve.messages import StrictModel
from sparse_bitnet.serve.tool_calls import Choice, Function, ToolSyntax, rules_of

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class FunctionTool(StrictModel):
    """A function and its arguments."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictModel):
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
        if len(set(names)) < len(names):
            raise ApiError(400, "two tools have the same name", param="tools")
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

    def rules(self, syntax: ToolSyntax, answer: str) -> Grammar | None:
        """Those of the text: calls that were asked for come, and strict ones fit; None where any text
        may. `answer`: the rule of a text without calls."""
        named = self.tool_choice if isinstance(self.tool_choice, NamedTool) else None
        functions = [
            Function(function.name, function.parameters, bool(function.strict))
            for function in self.functions
            if named is None or function.name == named.function.name
        ]
        choice: Choice = "required" if self.calls_are_forced else "auto"
        is_single = named is not None or self.parallel_tool_calls is False
        return rules_of(syntax, functions, choice, 1 if is_single else None, answer)
