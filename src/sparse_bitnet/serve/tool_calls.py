# SPDX-License-Identifier: Apache-2.0
"""Tool calls in a model's output: the syntax of each family of templates, a parser, and grammars."""

import json
import re
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from sparse_bitnet.generation.grammar import Grammar, json_rule, lark_text
from sparse_bitnet.generation.text import overlap
from sparse_bitnet.serve.messages import FunctionTool


@dataclass(frozen=True)
class ToolSyntax:
    """How one family of models writes the tool call {"name": ..., `arguments`: {...}}."""

    opening: str
    """Text before each call; "": the whole output is calls, or none of it."""
    closing: str
    between: str
    """Text between two calls."""
    arguments: str


HERMES = ToolSyntax("<tool_call>", "</tool_call>", "\n", "arguments")
"""Tool-call syntax of Hermes, Qwen2.5, Qwen3 and many others."""
LLAMA = ToolSyntax("", "", "; ", "parameters")
"""Tool-call syntax of Llama 3."""
PYTHON_TAG = "<|python_tag|>"
THOUGHT = ("<think>", "<thinking>", "[THINK]")
END_OF_THOUGHT = ("</think>", "</thinking>", "[/THINK]")
"""Tags around reasoning, here a "thought"; tool calls inside it are not made."""
_SPACE = " \t\r\n"
"""White space in JSON."""
_HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_STRING_OR_CLOSING = re.compile(rf'"(?:[^"\\\n]|\\.)*+(?:["\n]|\\?\Z)|{re.escape(HERMES.closing)}')
"""A JSON string ends with its line at the latest."""


def ends_in_thought(text: str) -> bool:
    """Whether the text ends inside a thought that it begins."""
    return max(map(text.rfind, THOUGHT)) > max(map(text.rfind, END_OF_THOUGHT))


def _first(text: str, tags: Sequence[str]) -> tuple[int, str]:
    """Return the first place of any of the tags, and that tag. Without one: the end of the text, less a
    possible beginning of a tag, and ""."""
    places = [(place, tag) for tag in tags if (place := text.find(tag)) >= 0]
    return min(places, default=(len(text) - max(overlap(text, tag) for tag in tags), ""))


def syntax_of(template: str) -> ToolSyntax | None:
    """Return the tool-call syntax of a chat template; None if it has no tools, or an unknown syntax."""
    if "tools" not in template or "<function=" in template or "<arg_key>" in template:
        return None
    if HERMES.opening in template:
        return HERMES
    return LLAMA if PYTHON_TAG in template or '"parameters": ' in template else None


@dataclass(frozen=True)
class CallPiece:
    """The beginning of a tool call, with its name, or more of its arguments."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


class ToolCallReader:
    """Divides streamed output into content and tool calls. Arguments are passed on as they come. An
    invalid call, a call of an unknown function, and a call inside a thought are content."""

    def __init__(
        self, syntax: ToolSyntax, names: frozenset[str], *, in_thought: bool = False
    ) -> None:
        """`names`: the known functions; `in_thought`: whether the prompt ends inside a thought."""
        self._syntax, self._names = syntax, names
        self._held = ""
        self._state = "thought" if in_thought else "content"
        self._depth = 0
        self._in_text = self._is_escaped = False
        self.calls = 0

    def feed(self, text: str) -> list[str | CallPiece]:
        """Add `text`; return the pieces of content and of calls that are now certain."""
        self._held += text
        return list(self._read())

    def end(self) -> list[str | CallPiece]:
        """Return the remaining pieces of content and of calls; nothing follows."""
        pieces: list[str | CallPiece] = []
        while self._state == "body":
            if call := self._whole(self._held):
                return [*pieces, call]
            # An unterminated string may have hidden the end of a call.
            body, closing, self._held = self._held.partition(self._syntax.closing or "\0")
            pieces.append(self._syntax.opening + body + closing)
            self._state = "content"
            pieces += self._read()
        held, self._held = self._held, ""
        if self._state == "after":
            held = held.lstrip(_SPACE + "}")
            held = "" if self._syntax.closing.startswith(held) else held
        return [*pieces, held] if held.strip() or (held and not self.calls) else pieces

    def _read(self) -> Iterator[str | CallPiece]:
        while True:
            before = (self._state, self._held)
            yield from getattr(self, f"_in_{self._state}_state")()
            if before == (self._state, self._held):
                return

    def _in_thought_state(self) -> Iterator[str | CallPiece]:
        place, tag = _first(self._held, END_OF_THOUGHT)
        if sure := self._held[: place + len(tag)]:
            yield sure
        self._held, self._state = self._held[len(sure) :], "content" if tag else "thought"

    def _in_content_state(self) -> Iterator[str | CallPiece]:
        opening = self._syntax.opening
        if opening:
            place, tag = _first(self._held, (opening, *THOUGHT))
            if tag in THOUGHT:
                yield self._held[: place + len(tag)]
                self._held, self._state = self._held[place + len(tag) :], "thought"
                return
            # Spaces before a call belong to it.
            content = self._held[:place].rstrip()
            if content:
                yield content
            if tag:
                self._held, self._state = self._held[place + len(tag) :], "body"
            elif content:
                self._held = self._held[len(content) :]
            return
        start = self._held.lstrip(_SPACE + ";" if self.calls else _SPACE)
        if start.startswith(THOUGHT):
            # The tag contains no end of a thought, so it can stay with the text that follows.
            self._state = "thought"
            return
        if start.startswith(PYTHON_TAG):
            self._held = start.removeprefix(PYTHON_TAG)
            return
        if not start or any(tag.startswith(start) for tag in (PYTHON_TAG, *THOUGHT)):
            return
        self._state = "body" if start[0] == "{" else "text"
        if self.calls:
            self._held = start

    def _in_text_state(self) -> Iterator[str | CallPiece]:
        if self._held:
            yield self._held
        self._held = ""

    def _in_body_state(self) -> Iterator[str | CallPiece]:
        head, closing = _HEAD.match(self._held), self._syntax.closing
        name = None
        with suppress(ValueError):  # escapes that JSON does not know
            name = json.loads(head[1]) if head else None
        if head and name in self._names:
            yield self._start(name, "")
            self._held, self._state = self._held[head.end() :], "arguments"
        elif head and not closing:
            self._state = "text"
        elif closing and closing in self._held:
            ends = (m.start() for m in _STRING_OR_CLOSING.finditer(self._held) if m[0] == closing)
            if (place := next(ends, -1)) < 0:
                return
            body, rest = self._held[:place], self._held[place + len(closing) :]
            if (call := self._whole(body)) is None:
                body, _, rest = self._held.partition(closing)
            yield call or self._syntax.opening + body + closing
            self._held, self._state = rest, "content"

    def _in_arguments_state(self) -> Iterator[str | CallPiece]:
        for place, character in enumerate(self._held):
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = self._in_text
            elif character == '"':
                self._in_text = not self._in_text
            elif not self._in_text and character in "{[]}":
                self._depth += 1 if character in "{[" else -1
                if self._depth == 0:
                    yield CallPiece(self.calls - 1, self._held[: place + 1])
                    self._held, self._state = self._held[place + 1 :], "after"
                    return
        if self._held:
            yield CallPiece(self.calls - 1, self._held)
        self._held = ""

    def _in_after_state(self) -> Iterator[str | CallPiece]:
        yield from ()
        opening, closing = self._syntax.opening, self._syntax.closing or "}"
        before, end, rest = self._held.partition(closing)
        # Weak models omit both tags between two calls, or the end of a call.
        again = re.match(rf"\s*+\}}[\s,;]*+(?={_HEAD.pattern})", before) if opening else None
        if again and again[1][1:-1] in self._names:
            self._held, self._state = opening + self._held[again.end() :], "content"
        elif opening and (place := before.find(opening)) >= 0:
            self._held, self._state = self._held[place:], "content"
        elif end:
            self._held, self._state = rest, "content"

    def _start(self, name: str, arguments: str) -> CallPiece:
        self.calls += 1
        return CallPiece(self.calls - 1, arguments, f"call_{uuid.uuid4().hex[:24]}", name)

    def _whole(self, body: str) -> CallPiece | None:
        """Return a call whose parts are in another order; None if it is no call."""
        try:
            call = json.loads(body)
        except (ValueError, RecursionError):
            return None
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(name, str) or name not in self._names:
            return None
        arguments = call.get("arguments") or call.get("parameters") or {}
        if not isinstance(arguments, str | dict):
            return None
        return self._start(name, arguments if isinstance(arguments, str) else json.dumps(arguments))


def tool_grammar(
    syntax: ToolSyntax,
    functions: Sequence[FunctionTool],
    *,
    is_forced: bool = False,
    is_single: bool = False,
    answer: str = "",
    in_thought: bool = False,
) -> Grammar | None:
    """Return a grammar of outputs with calls of these functions, whose arguments fit the schema if the
    call is forced or the function strict; None if any text is allowed.

    Args:
        is_forced: at least one call and nothing else.
        is_single: at most one call; else any number.
        answer: the Lark rule of an output without calls; "": any text.
        in_thought: the prompt ends inside a thought.
    """
    # If calls are optional, only strict schemas constrain their arguments.
    bound = [function for function in functions if is_forced or function.strict]
    if not (bound or is_single or answer):
        return None
    bodies = []
    for place, function in enumerate(functions):
        head = f'{{"name": {json.dumps(function.name)}, "{syntax.arguments}": '
        schema = {"type": "object"} | ((function.parameters if function in bound else None) or {})
        rule = json_rule(schema, bool(function.strict))
        # One rule and line per function, with a comment that errors can name.
        bodies.append(f'body_{place}: {lark_text(head)} {rule} "}}" // tool {function.name}')
    opening, closing = (lark_text(tag) if tag else "" for tag in (syntax.opening, syntax.closing))
    space = lark_text("\n") if opening else ""
    more = "" if is_single else f"({lark_text(syntax.between)} call)*"
    begins, ends = (
        "|".join(map(re.escape, tags)).replace("/", r"\/") for tags in (THOUGHT, END_OF_THOUGHT)
    )
    before = "END" if in_thought else ""
    rules = [
        "%llguidance {}",
        f"inside: {space} body {space} {closing}",
        "body: " + " | ".join(f"body_{place}" for place in range(len(bodies))),
        *bodies,
        f"call: {opening} inside",
    ]
    if is_forced or answer:
        rules.append(f"start: call {more}" + (f" | text\ntext: {answer}" if not is_forced else ""))
    elif opening:
        rules += [
            "start: opened inside | REST" if is_single else "start: (opened inside)* REST",
            f"opened[lazy]: {before} (SPOKEN BEGIN END)* SPOKEN {opening}",
            rf"SPOKEN: /(.|\n)*/ & ~/(.|\n)*({begins})(.|\n)*/",
            r"REST: /(.|\n)*/",
        ]
    else:
        # Text that would be parsed as a call must be a valid one.
        lead = rf"(/[ \t\r\n]|{re.escape(PYTHON_TAG)}/ | BEGIN END)"
        rules += [
            f"start: {'LEAD' if in_thought else 'LEAD?'} call {more} | TEXT",
            f"LEAD: {before} {lead}" + ("*" if in_thought else "+"),
            rf'TEXT: /(.|\n)*/ & ~({before} {lead}* "{{" /(.|\n)*/)',
        ]
    if not (is_forced or answer):
        rules += [f"BEGIN: /{begins}/", rf"END: (/(.|\n)*/ & ~/(.|\n)*({ends})(.|\n)*/) /{ends}/"]
    return Grammar.lark("\n".join(rules))
