# SPDX-License-Identifier: Apache-2.0
"""Command-line options through argparse: parameters of a function, and fields of its dataclasses."""

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


@dataclass(frozen=True)
class Positional:
    """Mark of a parameter that is given by its place, under this name in help and messages."""

    name: str


CheckpointArgument = Annotated[str, Positional("CHECKPOINT")]
OutArgument = Annotated[str, Positional("OUT")]
HIDDEN = "no option"
"""Mark of a field that the command line does not set."""
APPENDED = "one value each time the option is given"
"""Mark of a tuple with one value per option given; other tuples take several values each time."""

_ELSEWHERE = {
    **{"-m": ("CHECKPOINT", "--model"), "--model": ("CHECKPOINT",), "-o": ("--out",)},
    **{"-p": ("--prompt", "--prefill", "--system", "--port"), "-f": ("--prompt-file",)},
    **{"-n": ("--max-tokens", "--steps"), "-s": ("--seed",), "-t": ("--threads",)},
    **{"-c": ("--context-length",), "--ctx-size": ("--context-length",), "-np": ("--max-running",)},
    **{"--n-predict": ("--max-tokens",), "--max-new-tokens": ("--max-tokens",)},
    **{"--temp": ("--temperature",), "-sys": ("--system",), "--system-prompt": ("--system",)},
    **{"--lr": ("--learning-rate",), "--epochs": ("--steps",), "--max-steps": ("--steps",)},
    **{"--output": ("--out",), "--output-dir": ("--out",)},
}
"""Options of llama.cpp and transformers, each with the options of ours that it may mean."""
_TAKES_SHORT = ("generate", "chat", "serve", "bench")
"""Commands that read llama.cpp's one-letter options, and --model."""
_MAY_BE_EMPTY = ("prompt", "system", "stop", "regex", "dense_layers", "api_key")
"""Options that may be empty; an empty value of any other is taken for a shell's unset variable."""
_NOUNS: dict[Any, str] = {int: "a whole number", float: "a number"}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message.removeprefix("argument "))


@dataclass
class _Argument:
    """A field or a parameter: an option, or an argument that is given by its place."""

    owner: Any
    name: str
    hint: Any
    default: Any
    """Default value; `MISSING`: the argument is required."""

    def __post_init__(self) -> None:
        annotated = get_origin(self.hint) is Annotated
        self.marks = self.hint.__metadata__ if annotated else ()
        kind = get_args(self.hint)[0] if annotated else self.hint
        self.may_be_none = NoneType in get_args(kind)
        others = (one for one in get_args(kind) if one is not NoneType)
        self.kind = next(others) if self.may_be_none else kind
        places = [mark.name for mark in self.marks if isinstance(mark, Positional)]
        self.is_place = bool(places)
        self.shown = places[0] if places else "--" + self.name.replace("_", "-")

    def add_to(self, parser: argparse.ArgumentParser, text: str) -> None:
        """Tell argparse; `text` describes it."""
        kind, how = self.kind, dict[str, Any]()
        if get_origin(kind) in (tuple, list):
            kinds = get_args(kind)
            is_fixed = get_origin(kind) is tuple and Ellipsis not in kinds
            how = {"nargs": len(kinds)} if is_fixed else {"nargs": "+"}
            if not is_fixed:
                # Given twice, both count.
                how = {"action": "append"} if APPENDED in self.marks else how | {"action": "extend"}
            kind = kinds[0]
        if get_origin(kind) is Literal:
            how["choices"] = get_args(kind)
            kind = type(how["choices"][0])
        else:
            how["metavar"] = kind.__name__.upper()
        how["type"] = functools.partial(_value, kind, self.may_be_none, self.name in _MAY_BE_EMPTY)
        if kind is bool:
            how = {"action": argparse.BooleanOptionalAction}
        how |= {"dest": self.name, "required": self.default is MISSING}
        names = [self.shown]
        if self.is_place:
            names, how = [], {"dest": self.name, "metavar": self.shown}
        parser.add_argument(*names, default=argparse.SUPPRESS, help=text.replace("%", "%%"), **how)

    def take(self, left: list[str]) -> Any:
        """Value of an argument with a place, from the front of the words that are no options."""
        is_tuple = get_origin(self.kind) is tuple
        given = left[:] if is_tuple else left[:1]
        del left[: len(given)]
        if self.default is MISSING and not given:
            raise UserError(f"{self.shown} is missing")
        if not all(given):
            raise UserError(f"{self.shown} is empty")
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
        others: further options that there are, to be named where one of those given is near.

    Returns what `target` returns. Raises `UserError` for options that do not parse, and whatever
    `target` raises; `--help` prints and exits.
    """
    known = list(_arguments(target, default))
    short = _short(known, prog)
    parser = _Parser(prog, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    if is_help := not {"-h", "--help"}.isdisjoint(arguments):
        text = _documentation(target)[""] if description is None else description
        fill = functools.partial(textwrap.fill, width=79, break_on_hyphens=False)
        parts = (part if part[:2] == "- " else fill(part) for part in text.split("\n\n"))
        parser.description = "\n\n".join(parts).replace("%", "%%")
        places = (each.shown for each in known if each.is_place)
        parser.usage = " ".join([prog, "[OPTIONS]", *places])
        if short:
            listed = ", ".join(f"{word} is {ours}" for word, ours in short.items())
            parser.epilog = fill(f"As in llama.cpp, {listed}.")
    for each in known:
        if is_help or not each.is_place:
            each.add_to(parser, _help_text(each) if is_help else "")
    try:
        end = arguments.index("--") if "--" in arguments else len(arguments)
        words = ["--help"] if is_help else _respelled(arguments[:end], known, short, others)
        found, left = parser.parse_known_args(words)
        left += arguments[end + 1 :]
        for each in known:
            if each.is_place and (left or each.default is MISSING):
                setattr(found, each.name, each.take(left))
        if left:
            raise UserError(f"unexpected argument {left[0]}")
        values = {
            each.name: tuple(value) if get_origin(each.kind) is tuple else value
            for each in known
            if (value := getattr(found, each.name, MISSING)) is not MISSING
        }
        if isinstance(target, type):
            return _built(target, values, default)
    except UserError as error:
        raise UserError(f"{error}; see {prog} --help") from None
    for name, hint in get_type_hints(target).items():
        if dataclasses.is_dataclass(hint):
            values[name] = _built(hint, values)
    return target(
        **{name: values[name] for name in inspect.signature(target).parameters if name in values}
    )


def command(verb: str) -> Callable[[Callable[..., None]], Callable[[list[str]], None]]:
    """Make the `main` of a command, which takes the words after the verb.

    The parameters of the decorated function are the options of `sparse-bitnet VERB`, and its docstring is
    the help.
    """
    return lambda function: functools.partial(parse, function, prog=f"sparse-bitnet {verb}")


def _arguments(owner: Any, default: Any = None) -> Iterator[_Argument]:
    """Yield the arguments of a dataclass, or of a function and the dataclasses in its parameters."""
    if isinstance(owner, type):
        defaults = {
            field.name: field.default
            if field.default_factory is MISSING
            else field.default_factory()
            for field in dataclasses.fields(owner)
        }
    else:
        defaults = {
            name: each.default for name, each in inspect.signature(owner).parameters.items()
        }
    for name, hint in get_type_hints(owner, include_extras=True).items():
        if dataclasses.is_dataclass(hint):
            yield from _arguments(hint)
        elif name in defaults and HIDDEN not in getattr(hint, "__metadata__", ()):
            value = defaults[name] if default is None else getattr(default, name)
            yield _Argument(
                owner, name, hint, MISSING if value is inspect.Parameter.empty else value
            )


def _built(kind: Any, values: dict[str, Any], default: Any = None) -> Any:
    names = {field.name for field in dataclasses.fields(kind)}
    given = {name: value for name, value in values.items() if name in names}
    return kind(**given) if default is None else dataclasses.replace(default, **given)


def _short(known: list[_Argument], prog: str) -> dict[str, str]:
    """Return the llama.cpp options that a command reads, each with the option that it stands for."""
    names = [each.shown for each in known] if prog.split()[-1] in _TAKES_SHORT else []
    found = {
        word: next((ours for ours in meant if ours in names), "")
        for word, meant in _ELSEWHERE.items()
        if len(word) == 2 and word not in names
    }
    return {word: ours for word, ours in found.items() if ours}


def _respelled(
    arguments: list[str], known: list[_Argument], short: dict[str, str], others: Sequence[str]
) -> list[str]:
    """The words with options as ours are written: with hyphens, and in full.

    Raises `UserError` for an option that the command does not have.
    """
    names = [each.shown for each in known]
    names += [f"--no-{each.shown[2:]}" for each in known if each.kind is bool]
    first, rest, words = [], [], iter(arguments)
    for word in words:
        if not re.match(r"--|-[A-Za-z]", word) or " " in word.partition("=")[0]:
            rest.append(word)
        else:
            name, equals, value = word.partition("=")
            name = name.replace("_", "-") if name.startswith("--") else name
            name = short.get(name, name)
            if name == "CHECKPOINT":
                # First: behind an option of several values it would be one of them.
                first.append(value if equals else next(words, ""))
            elif name not in names:
                raise UserError(f"{name} is not an option{_hint(name, [*names, *others])}")
            else:
                rest.append(name + equals + value)
    return first + rest


def _hint(name: str, names: list[str]) -> str:
    if name not in _ELSEWHERE:
        return did_you_mean(name, [each for each in names if each.startswith("--")])
    meant = next((each for each in _ELSEWHERE[name] if each in names), "")
    if meant.startswith("--"):
        return f" (did you mean {meant}?)"
    return meant and f": write {meant} without it"


def _help_text(argument: _Argument) -> str:
    text, default = _documentation(argument.owner).get(argument.name, ""), argument.default
    values = default if isinstance(default, list | tuple) else [default]
    shown = " ".join(str(value) for value in values if value not in (None, ""))
    return f"{text} (default: {shown})" if shown and default is not MISSING else text


@functools.cache
def _documentation(owner: Any) -> dict[str, str]:
    """Return the help text of each parameter of a function, or each field of a dataclass, by name. The
    key "" holds the text of the whole."""
    text, _, listed = (inspect.getdoc(owner) or "").partition("\n\nArgs:\n")
    entries = [entry.partition(":") for entry in re.split(r"\n(?=\S)", textwrap.dedent(listed))]
    found = {name: what for name, _, what in entries} | {"": text}
    for base in reversed(owner.__mro__) if isinstance(owner, type) else ():
        if dataclasses.is_dataclass(base):
            [definition] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            for pair in itertools.pairwise(definition.body):  # type: ignore[attr-defined]
                match pair:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(str(what))):
                        found[name] = what
    return {name: " ".join(what.split()) if name else what for name, what in found.items()}
