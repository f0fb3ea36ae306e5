# SPDX-License-Identifier: Apache-2.0
"""Untrusted chat templates and grammars run in a process of their own: the system bounds its memory and
processor time, and if it dies, only one request fails.

Jinja's immutable sandbox keeps templates from files and attributes, not from `'a' * 10**9` or loops in
loops. llguidance bounds a grammar's size, but neither its depth, which overflows the stack, nor the time
to compile it. Requests and replies are JSON, one per line.
"""

import importlib
import json
import subprocess
import sys
import threading
from contextlib import suppress
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from sparse_bitnet.errors import library_errors_as
from sparse_bitnet.host import limit_memory, limit_time, ran_out_of_time

if TYPE_CHECKING:
    import jinja2
    import llguidance

_MOST_BYTES = 512 << 20
"""Limit of the address space; Python and its modules use a tenth of it."""
_STACK = 1 << 20
"""Bytes; the server's threads have twice as many or more, so that what fits here fits there."""
SECONDS = {"template": 2.0, "grammar": 0.5}
"""Limits of processor time for each request; ordinary ones take a thousandth."""
_MOST_TEXT = 16 << 20
"""Characters of a rendered chat."""
_GRAMMAR_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
}
"""A fifth of llguidance's own: with those one hostile pattern takes five seconds."""


class Sandbox:
    """A process that tries templates or grammars. It starts with the first request, and again after a
    request that ended it; it ends when its input is closed. Any thread may call `ask`."""

    def __init__(self, kind: str) -> None:
        """`kind`: "template" or "grammar"."""
        self._kind = kind
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def ask(self, request: str) -> dict[str, Any]:
        """Return {"answer": ...}, or {"error": ...} in one line.

        `request`: a list in JSON, the arguments of `_source` or `_render`.
        """
        with self._lock:
            # One that was interrupted still owes a reply, which would answer the next request.
            process, self._process = self._process, None
            if process is None or process.poll() is not None:
                # Isolated, since files in the current folder are as untrusted as the requests; and
                # in its own process group: Ctrl-C ends an answer, not this process.
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "sparse_bitnet.generation.sandbox", self._kind],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    process_group=0,
                    creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
                )
            assert process.stdin is not None
            assert process.stdout is not None
            reply = ""
            with suppress(BrokenPipeError):
                process.stdin.write(request + "\n")
                process.stdin.flush()
                reply = process.stdout.readline()
            if reply.endswith("\n"):
                self._process = process
                return json.loads(reply)
            is_late = ran_out_of_time(process.wait())
            why = "long" if is_late else "much memory, or is nested too deeply"
            return {"error": f"it takes too {why}"}


def grammar_matcher(source: str, tokenizer: "llguidance.LLTokenizer") -> "llguidance.LLMatcher":
    """Return a matcher at the beginning of a text, or one with an error."""
    import llguidance

    limits = llguidance.LLParserLimits(**_GRAMMAR_LIMITS)
    return llguidance.LLMatcher(tokenizer, source, log_level=0, limits=limits)


def main(kind: str) -> None:
    """Answer requests from standard input until it ends; runs in the sandbox process."""
    limit_memory(_MOST_BYTES)
    answer = _render if kind == "template" else _source
    # Imported before the first request, so as not to count in its time limit.
    importlib.import_module("jinja2.sandbox" if answer is _render else "llguidance.gbnf_to_lark")
    for line in sys.stdin:
        # Processor time, so that a busy machine fails no request. The system ends the process.
        limit_time(SECONDS[kind])
        try:
            reply = {"answer": answer(*json.loads(line))}
        except Exception as error:
            number = getattr(error, "lineno", None)
            reason = f"line {number}: {error}" if number else str(error) or type(error).__name__
            reply = {"error": " ".join(reason.split())[:500]}
        limit_time(0)
        print(json.dumps(reply), flush=True)


def _source(source: str, is_lark_or_gbnf: bool) -> str:
    """Check a grammar here first, and return it in llguidance's syntax. The server words the error."""
    import llguidance
    from llguidance.gbnf_to_lark import any_to_lark

    if is_lark_or_gbnf:
        with library_errors_as("the rules are neither Lark nor GBNF"):
            source = json.dumps({"grammars": [{"lark_grammar": any_to_lark(source)}]})
    # The smallest vocabulary: one token for each byte.
    matcher = grammar_matcher(source, llguidance.LLTokenizer("byte", slices=[]))
    if not matcher.is_error():
        matcher.compute_bitmask()
    return source


def _render(source: str, variables: dict[str, Any] | None) -> str:
    """Return the rendered template; without variables only the source is checked."""
    template = _template(source)
    pieces, size = [], 0
    for piece in () if variables is None else template.generate(variables):
        pieces.append(piece)
        size += len(piece)
        if size > _MOST_TEXT:
            raise ValueError(f"it writes more than {_MOST_TEXT:,} characters")
    return "".join(pieces)


@lru_cache(1)
def _template(source: str) -> "jinja2.Template":
    """Compile a template with the whitespace, filters and functions that chat templates expect."""
    import datetime

    import jinja2.ext
    import jinja2.sandbox

    class GenerationBlock(jinja2.ext.Extension):
        """`{% generation %}` marks the assistant's words for training; here it has no effect."""

        tags = {"generation"}  # noqa: RUF012  (as Jinja declares it)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body).set_lineno(line)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, jinja2.ext.loopcontrols]
    )
    # Jinja's own filter escapes HTML.
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda format: datetime.datetime.now().strftime(format),
    }
    del environment.globals["lipsum"]
    return environment.from_string(source)


if __name__ == "__main__":
    threading.stack_size(_STACK)
    thread = threading.Thread(target=main, args=sys.argv[1:])
    thread.start()
    thread.join()
