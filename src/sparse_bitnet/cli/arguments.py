# SPDX-License-Identifier: Apache-2.0
"""Command-line options through argparse: parameters of a function, and fields of its dataclasses.

A word in an `Annotated` type is a positional argument ("OUT", or "[OUT]" if it may be left out), another
name ("--to"), `HIDDEN` or `APPENDED`. `--help` lists the fields of a dataclass under its parameter's name
and the headings in its `GROUPS`, each by the first field below it; `MOST_USED` fields come first.
"""

import argparse
import ast
import dataclasses
import functools
import inspect
import itertools
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass
from types import NoneType
from typing import Annotated, Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from sparse_bitnet.errors import UserError, did_you_mean

T = TypeVar("T")

CheckpointArgument = Annotated[str, "CHECKPOINT"]
OutArgument = Annotated[str, "OUT"]
HIDDEN = "hidden"
"""Mark of a field that the command line does not set."""
APPENDED = "appended"
"""Mark of a tuple with one value each time the option is given; others take several values each time."""

_SHORT = {
    **{"CHECKPOINT": "-m", "[MODEL]": "-m", "--prompt": "-p", "--prefill": "-p", "--threads": "-t"},
    **{"--prompt-file": "-f", "--max-tokens": "-n", "--steps": "-n", "--context-length": "-c"},
    **{"--seed": "-s", "--max-running": "-np", "--system": "-sys"},
}
"""Our options with llama.cpp's short name, which the commands in `_TAKES_SHORT` read."""
_TAKES_SHORT = ("generate", "chat", "serve", "bench")
_ELSEWHERE = {
    **{"-m": ("CHECKPOINT", "--model"), "--model": ("CHECKPOINT", "[MODEL]", "TEACHER")},
    **{"--teacher": ("TEACHER",), "--format": ("--packed-format", "--to", "--weight-format")},
    **{"-p": ("--prompt", "--system", "--port"), "-n": ("--max-tokens", "--steps")},
    **{"-t": ("--threads",), "-c": ("--context-length",), "--ctx-size": ("--context-length",)},
    **{"--n-predict": ("--max-tokens",), "--max-new-tokens": ("--max-tokens",)},
    **{"--temp": ("--temperature",), "--system-prompt": ("--system",), "-s": ("--seed",)},
    **{"--lr": ("--learning-rate",), "--epochs": ("--steps",), "--max-steps": ("--steps",)},
    **dict.fromkeys(("-o", "--output", "--output-dir", "--resume"), ("OUT", "[OUT]", "--out")),
    "--out": ("OUT", "[OUT]"),
}
"""Options of other commands and tools, each with those of ours that an error names instead."""
_MAY_BE_EMPTY = ("prompt", "system", "regex", "dense_layers")
"""Options that may be empty; an empty value of any other is taken for a shell's unset variable."""
_NOUNS: dict[Any, str] = {int: "a whole number", float: "a number"}
_METAVARS = {
    **dict.fromkeys(("init", "teacher"), "MODEL"),
    **dict.fromkeys(("data", "out", "text", "document", "engine"), "PATH"),
    **dict.fromkeys(("chat", "beside", "validation"), "SOURCE"),
}
"""Values of options in help; for others the last word of the option's name, or N for a whole number."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        lacking = re.sub(r"the following arguments are required: (.*)", r"\1 is missing", message)
        raise UserError(lacking.removeprefix("argument "))


@dataclass
class _Argument:
    """A field or a parameter: an option, or a positional argument."""

    owner: Any
    name: str
    hint: Any
    default: Any
    """Default value; `MISSING`: the argument is required."""
    group: str
    """Heading in help; empty for those at the top."""

    def __post_init__(self) -> None:
        annotated = get_origin(self.hint) is Annotated
        self.marks = self.hint.__metadata__ if annotated else ()
        kind = get_args(self.hint)[0] if annotated else self.hint
        self.may_be_none = NoneType in get_args(kind)
        others = (one for one in get_args(kind) if one is not NoneType)
        self.kind = next(others) if self.may_be_none else kind
        names = (mark for mark in self.marks if mark not in (HIDDEN, APPENDED))
        self.shown = next(names, "--" + self.name.replace("_", "-"))
        self.is_positional = not self.shown.startswith("--")
        self.is_required = self.default is MISSING
        if self.is_positional:
            self.is_required = not self.shown.startswith("[")

    def add_to(self, parser: Any, short: str | None, text: str) -> None:
        """Tell argparse; `short` is its other name, and `text` describes it."""
        kind, how = self.kind, dict[str, Any]()
        if get_origin(kind) is tuple:
            kinds = get_args(kind)
            is_fixed = Ellipsis not in kinds
            how = {"nargs": len(kinds)} if is_fixed else {"nargs": "+"}
            if not is_fixed:
                # If the option is given twice, both count.
                how = {"action": "append"} if APPENDED in self.marks else how | {"action": "extend"}
            kind = kinds[0]
        if get_origin(kind) is Literal:
            how["choices"] = get_args(kind)
            kind = type(how["choices"][0])
        else:
            last_word = "N" if kind is int else self.name.split("_")[-1].upper()
            how["metavar"] = _METAVARS.get(self.name, last_word)
        how["type"] = functools.partial(_value, kind, self.may_be_none, self.name in _MAY_BE_EMPTY)
        if kind is bool:
            how = {"action": argparse.BooleanOptionalAction}
        how |= {"dest": self.name, "default": argparse.SUPPRESS}
        if not self.is_positional:
            names = [short, self.shown] if short else [self.shown]
            text = text.replace("%", "%%")
            parser.add_argument(*names, required=self.is_required, help=text, **how)
            return
        how["metavar"] = self.shown.strip("[]")
        if short:
            parser.add_argument(short, help=f"Same as {how['metavar']} (llama.cpp).", **how)
        if text:  # `take` reads it
            parser.add_argument(**how, help=text.replace("%", "%%"))

    def take(self, left: list[str]) -> Any:
        """Return the value of a positional argument, from the front of the words that are not options."""
        is_tuple = get_origin(self.kind) is tuple
        given = left[:] if is_tuple else left[:1]
        del left[: len(given)]
        if not given or not all(given):
            name = self.shown.strip("[].").rstrip()
            raise UserError(f"{name} is {'empty' if given else 'missing'}")
        kind = get_args(self.kind)[0] if is_tuple else self.kind
        return [kind(word) for word in given] if is_tuple else kind(given[0])


def _value(kind: Any, may_be_none: bool, may_be_empty: bool, text: str) -> Any:
    if may_be_none and text == "None":
        return None
    if not text and not may_be_empty:
        raise argparse.ArgumentTypeError("it is empty")
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {_NOUNS[kind]}") from None


def parse(
    target: Callable[..., T],
    arguments: list[str],
    *,
    prog: str,
    description: str | None = None,
    default: T | None = None,
    others: Sequence[str] = (),
) -> T:
    """Build a config or call a function with the options given.

    Args:
        target: a dataclass, or a function whose parameters are the options.
        arguments: after the command's name.
        prog: the command, "sparse-bitnet VERB".
        description: for `--help`; by default the docstring of `target`.
        default: of a dataclass, for options that are not given.
        others: further options, to be suggested for a misspelled one.

    Returns what `target` returns. Raises `UserError` for options that do not parse, and whatever
    `target` raises; `--help` prints and exits.
    """
    known = list(_arguments(target, default))
    short = _SHORT if prog.split()[-1] in _TAKES_SHORT else {}
    parser = _Parser(prog, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    if is_help := not {"-h", "--help"}.isdisjoint(arguments):
        text = _documentation(target)[""] if description is None else description
        fill = functools.partial(textwrap.fill, width=79, break_on_hyphens=False)
        parts = (part if part[:2] == "- " else fill(part) for part in text.split("\n\n"))
        parser.description = "\n\n".join(parts).replace("%", "%%")
        positional = (each.shown for each in known if each.is_positional)
        parser.usage = " ".join([prog, "[OPTIONS]", *positional])
    groups: dict[str, Any] = {"": parser}
    for each in known:
        if each.group not in groups and not each.is_positional:
            groups[each.group] = parser.add_argument_group(each.group)
        group = parser if each.is_positional else groups[each.group]
        each.add_to(group, short.get(each.shown), _help_text(each) if is_help else "")
    names = [each.shown.removesuffix(" ...") for each in known] + [
        f"--no-{e.shown[2:]}" for e in known if e.kind is bool
    ]
    readable = {"--help", *names, *(short.get(name, name) for name in names)}
    try:
        end = arguments.index("--") if "--" in arguments else len(arguments)
        words = ["--help"] if is_help else arguments[:end]
        for word in words:
            name = word.partition("=")[0]
            if re.fullmatch(r"--?[A-Za-z]\S*", name) and name not in readable:
                raise UserError(f"{name} is not an option{_hint(name, [*names, *others])}")
        given, left = parser.parse_known_args(words)
        left += arguments[end + 1 :]
        for each in known:
            if each.is_positional and not hasattr(given, each.name) and (left or each.is_required):
                setattr(given, each.name, each.take(left))
        if left:
            raise UserError(f"unexpected argument {left[0]}")
        values = {
            each.name: tuple(value) if get_origin(each.kind) is tuple else value
            for each in known
            if (value := getattr(given, each.name, MISSING)) is not MISSING
        }
        if isinstance(target, type):
            return _built(target, values, default)
        for name, hint in get_type_hints(target).items():
            if dataclasses.is_dataclass(hint):
                values[name] = _built(hint, values)
    except UserError as error:
        # Show fields as options: steps=0 as --steps 0.
        typed = {f"{each.name}=": f"{each.shown} " for each in known}
        text = re.sub(r"(?<!\S)\w+=", lambda field: typed.get(field[0], field[0]), str(error))
        raise UserError(f"{text}; see {prog} --help") from None
    return target(
        **{name: values[name] for name in inspect.signature(target).parameters if name in values}
    )


def command(verb: str) -> Callable[[Callable[..., None]], Callable[[list[str]], None]]:
    """Make the `main` of a command, which takes the words after the verb.

    Options and help of `sparse-bitnet VERB` are the parameters and the docstring of the function.
    """
    return lambda function: functools.partial(parse, function, prog=f"sparse-bitnet {verb}")


def _arguments(owner: Any, default: Any = None, group: str = "") -> Iterator[_Argument]:
    """Yield the arguments of a dataclass, or of a function and the dataclasses in its parameters."""
    defaults = {name: each.default for name, each in inspect.signature(owner).parameters.items()}
    hints = get_type_hints(owner, include_extras=True)
    several = sum(map(dataclasses.is_dataclass, hints.values())) > 1
    headings, most_used = getattr(owner, "GROUPS", {}), getattr(owner, "MOST_USED", ())
    for name, hint in hints.items():
        group = headings.get(name, group)
        if dataclasses.is_dataclass(hint):
            yield from _arguments(hint, group=name.replace("_", " ") if several else "")
        elif name in defaults and HIDDEN not in getattr(hint, "__metadata__", ()):
            value = defaults[name] if default is None else getattr(default, name)
            value = MISSING if value is inspect.Parameter.empty else value
            yield _Argument(owner, name, hint, value, "" if name in most_used else group)


def _built(kind: Any, values: dict[str, Any], default: Any = None) -> Any:
    names = {field.name for field in dataclasses.fields(kind)}
    given = {name: value for name, value in values.items() if name in names}
    return kind(**given) if default is None else dataclasses.replace(default, **given)


def _hint(name: str, names: list[str]) -> str:
    if name not in _ELSEWHERE:
        return did_you_mean(name, [each for each in names if each.startswith("--")])
    meant = next((each for each in _ELSEWHERE[name] if each in names), "")
    if meant.startswith("--"):
        return f" (did you mean {meant}?)"
    return meant and f": write {meant.strip('[]')} without it"


def _help_text(argument: _Argument) -> str:
    text, default = _documentation(argument.owner).get(argument.name, ""), argument.default
    values = default if isinstance(default, tuple) else [default]
    shown = " ".join(str(each) for each in values if each not in (None, "") and each is not False)
    return f"{text} (default: {shown})" if shown and not argument.is_required else text


@functools.cache
def _documentation(owner: Any) -> dict[str, str]:
    """Return the help text of each parameter of a function, or each field of a dataclass, by name. The
    key "" holds the text of the whole."""
    text, _, listed = (inspect.getdoc(owner) or "").partition("\n\nArgs:\n")
    entries = [entry.partition(":") for entry in re.split(r"\n(?=\S)", textwrap.dedent(listed))]
    texts = {name: what for name, _, what in entries} | {"": text}
    for base in reversed(owner.__mro__) if isinstance(owner, type) else ():
        if dataclasses.is_dataclass(base):
            [definition] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            for pair in itertools.pairwise(definition.body):  # type: ignore[attr-defined]
                match pair:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(str(what))):
                        texts[name] = what
    return {name: " ".join(what.split()) if name else what for name, what in texts.items()}
