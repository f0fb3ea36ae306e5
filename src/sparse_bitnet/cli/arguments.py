# SPDX-License-Identifier: Apache-2.0
"""Command-line options through tyro, with its complaints in one line instead of a box."""

import dataclasses
import functools
import io
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin

import tyro

from sparse_bitnet.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from tyro.constructors import PrimitiveConstructorSpec, PrimitiveTypeInfo

T = TypeVar("T")

CheckpointArgument = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
OutArgument = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
FLAT: Any = tyro.conf.arg(name="")
"""Of a dataclass among a function's parameters: its fields are options without a prefix."""

# What tyro says, and what we say instead.
_COMPLAINTS = (
    (r"Unrecognized options: ([^,]+).*", r"\1 is one argument too many"),
    (r"Missing from .*?: (--[a-z-]+|[A-Z-]+) .*", r"\1 is missing"),
    (r"Missing value for argument '(.+?)'\..*", lambda found: f"{_shown(found[1])} is missing"),
    (r"Error parsing (-\S+): invalid literal for int\(\).*: (.+)", r"\1 \2: not a whole number"),
    (r"Error parsing (-\S+): could not convert string to float: (.+)", r"\1 \2: not a number"),
    (r"invalid choice (.+) for argument '(.+)'\. Expected one of \((.+)\)", r"\2 \1: choose one of \3"),
    (r"Error parsing (-\S+): Could not .*?arguments:? \[(.+?)\].*", r"\1 cannot be \2"),
    (r"Error parsing \w+: (.+)", r"\1"),
)  # fmt: skip


def parse(
    target: Callable[..., T],
    arguments: list[str],
    *,
    prog: str,
    description: str | None = None,
    default: T | None = None,
) -> T:
    """Build a config or call a function with the options given.

    Args:
        target: a dataclass, or a function whose parameters are the options.
        arguments: after the command's name.
        prog: the command, "sparse-bitnet VERB".
        description: for `--help`; by default the docstring of `target`.
        default: of a dataclass, for options that are not given.

    Returns what `target` returns. Raises `UserError` for options that do not parse, and whatever
    `target` raises; `--help` prints and exits.
    """

    # Called only after parsing, when nothing is redirected any more.
    @functools.wraps(target, updated=())
    def later(*values: Any, **named: Any) -> Callable[[], T]:
        return lambda: target(*values, **named)

    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(_or_none)
    complaint = io.StringIO()
    chosen: Any = target if isinstance(target, type) else later
    more: dict[str, Any] = {} if default is None else {"default": default}
    run = functools.partial(
        tyro.cli, chosen, prog=prog, description=description, registry=registry, **more
    )
    try:
        with redirect_stderr(complaint), _tidied():
            parsed: Any = run(args=arguments)
    except SystemExit as stop:
        if stop.code in (0, None):
            print(complaint.getvalue(), end="", file=sys.stderr)
            raise
        text = _unknown_option(arguments, run) or _in_one_line(complaint.getvalue())
        raise UserError(f"{text}; see {prog} --help") from None
    return parsed if isinstance(target, type) else parsed()


def command(verb: str) -> Callable[[Callable[..., None]], Callable[[list[str]], None]]:
    """Of a function whose parameters are the options of `sparse-bitnet VERB`, and whose docstring is its
    help, make the command's `main`, which takes the words after the verb."""
    return lambda function: functools.partial(parse, function, prog=f"sparse-bitnet {verb}")


@contextmanager
def _tidied() -> Iterator[None]:
    """Paragraphs of docstrings as one text, and no "(default: None)", which tyro has no setting for. The
    types of our own defaults are mypy's to check, not typeguard's, which brings asyncio and unittest."""
    from tyro import _arguments, _fmtlib, _resolver, _strings

    joined: Any = _strings.remove_single_line_breaks
    help_of: Any = _arguments.generate_argument_helptext
    resolver: Any = _resolver
    is_instance = resolver.is_instance

    def in_paragraphs(helptext: str) -> str:
        lines = "\n".join(line.strip() for line in helptext.splitlines())
        return re.sub(r"(?<=[^\n])\n(?=[^\n-])", " ", lines)

    def without_empty_default(*of_argument: Any, **options: Any) -> Any:
        text = help_of(*of_argument, **options)
        shown = text.as_str_no_ansi()
        bare = re.sub(r" ?\(default: (None|''|)\)$", "", shown)
        return text if bare == shown else _fmtlib.text["dim"](bare)

    def is_default(kind: Any, value: Any) -> bool:
        return get_origin(kind) in (UnionType, tuple) or is_instance(kind, value)

    resolver.is_instance = is_default
    _strings.remove_single_line_breaks = in_paragraphs
    _arguments.generate_argument_helptext = without_empty_default
    try:
        yield
    finally:
        resolver.is_instance = is_instance
        _strings.remove_single_line_breaks = joined
        _arguments.generate_argument_helptext = help_of


def _or_none(info: "PrimitiveTypeInfo") -> "PrimitiveConstructorSpec | None":
    """`int | None` reads as INT; the word None still stands for None."""
    from tyro.constructors import ConstructorRegistry, PrimitiveTypeInfo
    from tyro.constructors import UnsupportedTypeAnnotationError as Unsupported

    others = [each for each in get_args(info.type) if each is not NoneType]
    if len(others) != 1 or NoneType not in get_args(info.type):
        return None
    inner = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(others[0], info.markers))
    if isinstance(inner, Unsupported):
        return None
    return dataclasses.replace(
        inner,
        choices=inner.choices and (*inner.choices, "None"),
        instance_from_str=lambda text: None if text == ["None"] else inner.instance_from_str(text),
        is_instance=lambda value: value is None or inner.is_instance(value),
        str_from_instance=lambda value: (
            ["None"] if value is None else inner.str_from_instance(value)
        ),
    )


def _unknown_option(arguments: list[str], run: Callable[..., Any]) -> str | None:
    """What to say of the first option that `run` does not have; None where it has all."""
    shown = io.StringIO()
    with redirect_stdout(shown), suppress(SystemExit):
        run(args=["--help"])
    options = re.findall(r"(?<![\w-])--[a-z][\w-]*", shown.getvalue())
    for argument in arguments:
        name = argument.partition("=")[0].replace("_", "-")
        if name == "--":
            break
        if name.startswith("--") and name not in options:
            return f"{name} is not an option{did_you_mean(name, options)}"
    return None


def _in_one_line(box: str) -> str:
    """The first paragraph of tyro's box, whose title is in its frame or, in ASCII, underlined."""
    lines = [line.strip("│ ") for line in box.splitlines()]
    body = lines[1:] if box.startswith("╭") else lines[2:]
    words: list[str] = []
    for line in body:
        if not line or line.startswith(("─", "-----")):
            break
        words += line.split()
    text = " ".join(words).rstrip(".") or "the options do not parse"
    for pattern, ours in _COMPLAINTS:
        if found := re.fullmatch(pattern, text):
            return ours(found) if callable(ours) else found.expand(ours)
    return text


def _shown(name: str) -> str:
    return f"the value of {name}" if name.startswith("-") else name.upper()
