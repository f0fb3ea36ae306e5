# SPDX-License-Identifier: Apache-2.0
"""The process in which a chat template runs: `python -m sparse_bitnet.generation.template_process`.

Templates come with models of strangers. Jinja's immutable sandbox keeps them from files and attributes,
not from `'a' * 10**9` or loops in loops; the system does that, by the memory and the processor time of a
process that does nothing else.
"""

import datetime
import functools
import json
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from sparse_bitnet.generation.bounded_process import answer_requests

MOST_SECONDS = 2.0
"""Of processor time, for each request."""
MOST_TEXT = 16 << 20
"""Characters of a rendered chat."""


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here it only passes them on."""

    tags = {"generation"}  # noqa: RUF012  (as Jinja declares it)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_pass_on", [])
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _pass_on(self, caller: Any) -> str:
        return caller()


def _environment() -> jinja2.Environment:
    """Whitespace, filters and functions as chat templates expect them."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        # Jinja's own filter escapes HTML.
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    def strftime_now(format: str) -> str:
        return datetime.datetime.now().strftime(format)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    del environment.globals["lipsum"]
    return environment


def _render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    pieces, size = [], 0
    for piece in template.generate(variables):
        pieces.append(piece)
        size += len(piece)
        if size > MOST_TEXT:
            raise ValueError(f"it writes more than {MOST_TEXT:,} characters")
    return "".join(pieces)


def _complaint(error: Exception) -> str:
    match error:
        case jinja2.TemplateSyntaxError():
            return f"line {error.lineno}: {error.message}"
        case MemoryError():
            return "it takes too much memory"
        case RecursionError():
            return "it is nested too deeply"
    return str(error) or type(error).__name__


def main() -> None:
    """Answer until the input ends. A request is a template's source, and the variables to render it with;
    without these, only the source is checked."""
    compiled = functools.lru_cache(1)(_environment().from_string)

    def answer(request: tuple[str, dict[str, Any] | None]) -> str:
        source, variables = request
        template = compiled(source)
        return "" if variables is None else _render(template, variables)

    answer_requests(answer, MOST_SECONDS, _complaint)


if __name__ == "__main__":
    main()
