# SPDX-License-Identifier: Apache-2.0
"""Tool calls in a model's text: how each family of templates writes them, read as the text comes."""

import json
import re
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from sparse_bitnet.generation.stop import overlap


@dataclass(frozen=True)
class ToolSyntax:
    """One family's way to write {"name": ..., `arguments`: {...}}."""

    opening: str
    """Before each call; "": the whole text is calls, or none."""
    closing: str
    between: str
    """Two calls."""
    arguments: str


HERMES = ToolSyntax("<tool_call>", "</tool_call>", "\n", "arguments")
"""Of Hermes, Qwen2.5, Qwen3 and many others."""
LLAMA = ToolSyntax("", "", "; ", "parameters")
"""Of Llama 3."""
PYTHON_TAG = "<|python_tag|>"
THOUGHT, END_OF_THOUGHT = "<think>", "</think>"
"""Around reasoning, in which a call is only drafted."""
_SPACE = " \t\r\n"
"""JSON's."""
_HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


def syntax_of(template: str) -> ToolSyntax | None:
    """That of a chat template; None where it knows no tools, or writes calls in a way of its own."""
    if "tools" not in template or "<function=" in template:
        return None
    if HERMES.opening in template:
        return HERMES
    return LLAMA if PYTHON_TAG in template or '"parameters": ' in template else None


@dataclass(frozen=True)
class CallPiece:
    """A call's beginning, with its name, or more of its arguments."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


class ToolCallReader:
    """Divides a streamed text into content and calls. Arguments are passed on as they come; what turns
    out to be no call, one of a function that there is not, or one inside a thought, is content."""

    def __init__(
        self, syntax: ToolSyntax, names: frozenset[str], *, in_thought: bool = False
    ) -> None:
        """
        Args:
            syntax: how the model writes calls.
            names: the functions there are.
            in_thought: whether the prompt ends inside a thought.
        """
        self._syntax, self._names = syntax, names
        self._held = ""
        self._state = "thought" if in_thought else "content"
        self._depth = 0
        self._in_text = self._is_escaped = False
        self.calls = 0

    def feed(self, text: str) -> list[str | CallPiece]:
        """What has become certain: pieces of content, and of calls."""
        self._held += text
        return list(self._read())

    def end(self) -> list[str | CallPiece]:
        """What was held back, when nothing follows."""
        held, self._held = self._held, ""
        match self._state:
            case "thought":
                return [held] if held else []
            case "content":
                return [held] if held.strip() or (held and not self.calls) else []
            case "body":
                call = self._whole(held)
                return [call] if call else [self._syntax.opening + held]
            case "after":
                rest, closing = held.lstrip(_SPACE + "}"), self._syntax.closing or ""
                return [] if closing.startswith(rest) else [rest]
        return []

    def _read(self) -> Iterator[str | CallPiece]:
        while True:
            before = (self._state, self._held)
            yield from getattr(self, f"_in_{self._state}_state")()
            if before == (self._state, self._held):
                return

    def _in_thought_state(self) -> Iterator[str | CallPiece]:
        thought, end, rest = self._held.partition(END_OF_THOUGHT)
        kept = 0 if end else overlap(thought, END_OF_THOUGHT)
        sure = len(thought) - kept
        if sure or end:
            yield thought[:sure] + end
        self._held, self._state = rest if end else thought[sure:], "content" if end else "thought"

    def _in_content_state(self) -> Iterator[str | CallPiece]:
        opening = self._syntax.opening
        before, start, rest = self._held.partition(THOUGHT)
        if start and not (opening and opening in before) and not self.calls:
            yield before + start
            self._held, self._state = rest, "thought"
            return
        if opening:
            place = self._held.find(opening)
            if place < 0:
                # A call may begin with spaces before it, which belong to it.
                kept = max(overlap(self._held, opening), overlap(self._held, THOUGHT))
                sure = self._held[: len(self._held) - kept]
                sure = sure.rstrip() if sure.strip() else ""
                if sure:
                    yield sure
                self._held = self._held[len(sure) :]
                return
            if content := self._held[:place].rstrip():
                yield content
            self._held, self._state = self._held[place + len(opening) :], "body"
            return
        start = self._held.lstrip(_SPACE + ";" if self.calls else _SPACE)
        if start.startswith(PYTHON_TAG):
            start = self._held = start.removeprefix(PYTHON_TAG).lstrip(_SPACE)
        if not start or PYTHON_TAG.startswith(start):
            return
        self._state = "body" if start[0] == "{" else "text"
        if self.calls:
            self._held = start

    def _in_text_state(self) -> Iterator[str | CallPiece]:
        if self._held:
            yield self._held
        self._held = ""

    def _in_body_state(self) -> Iterator[str | CallPiece]:
        found, closing = _HEAD.match(self._held), self._syntax.closing
        name = None
        with suppress(ValueError):  # escapes that JSON does not know
            name = json.loads(found[1]) if found else None
        if found and name in self._names:
            yield self._start(name, "")
            self._held, self._state = self._held[found.end() :], "arguments"
        elif found and not closing:
            self._state = "text"
        elif closing:
            place = self._held.find(closing)
            while place >= 0 and _ends_in_a_string(self._held[:place]):
                place = self._held.find(closing, place + 1)
            if place < 0:
                return
            body, rest = self._held[:place], self._held[place + len(closing) :]
            yield self._whole(body) or self._syntax.opening + body + closing
            self._held, self._state = rest, "content"

    def _in_arguments_state(self) -> Iterator[str | CallPiece]:
        for place, character in enumerate(self._held):
            if self._in_text:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == '"':
                    self._in_text = False
            elif character == '"':
                self._in_text = True
            else:
                self._depth += (character in "{[") - (character in "}]")
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
        if opening and (place := before.find(opening)) >= 0:  # weak models leave out a call's end
            self._held, self._state = self._held[place:], "content"
        elif end:
            self._held, self._state = rest, "content"

    def _start(self, name: str, arguments: str) -> CallPiece:
        self.calls += 1
        return CallPiece(self.calls - 1, arguments, f"call_{uuid.uuid4().hex[:24]}", name)

    def _whole(self, body: str) -> CallPiece | None:
        """A call with its parts in another order; None for what is none."""
        try:
            found = json.loads(body)
        except (ValueError, RecursionError):
            return None
        name = found.get("name") if isinstance(found, dict) else None
        if not isinstance(name, str) or name not in self._names:
            return None
        arguments = found.get("arguments", found.get("parameters", {}))
        return self._start(name, arguments if isinstance(arguments, str) else json.dumps(arguments))


def _ends_in_a_string(body: str) -> bool:
    """Whether JSON text is cut off inside a string, to which what follows belongs."""
    try:
        json.loads(body)
    except (ValueError, RecursionError) as error:
        return "Unterminated string" in str(error)
    return False
