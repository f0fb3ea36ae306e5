# SPDX-License-Identifier: Apache-2.0
"""An invalid option is reported in one line that names it."""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest

from sparse_bitnet.cli.arguments import CheckpointArgument, OutArgument, parse
from sparse_bitnet.errors import UserError


@dataclass(kw_only=True)
class Config:
    """Some options."""

    steps: int = 3
    """How many."""

    stride: int | None = None
    """Or none, in which case it is chosen
    by looking."""

    kind: Literal["a", "b"] = "a"
    """Kind of the thing."""

    rate: float = 1.0
    """How fast
    (in m/s)."""

    stop: int = 0
    """The place it names."""

    shape: tuple[int, int] | None = None
    """The thing it is about."""

    name: str = "none"
    """Name of the thing."""

    prompt: str | None = None
    """Text to continue."""

    max_tokens: int = 1
    """How long."""

    words: tuple[str, ...] = ()
    """Words to use."""

    on: bool = True
    """Whether: 100 %."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UserError(f"steps={self.steps}: must be above 0")


def entry(
    folder: Annotated[str, "FOLDER"],
    config: Config,
    more: Annotated[tuple[str, ...], "[MORE ...]"] = (),
) -> tuple[str, Config]:
    """Do it.

    Args:
        folder: where it
            is done.
    """
    if folder == "missing":
        raise UserError("no such folder")
    print("running")
    return folder, config


def places(
    folder: Annotated[str, "FOLDER"], config: Config, out: Annotated[str | None, "[OUT]"] = None
) -> list[str | None]:
    """Do it."""
    return [folder, out]


def test_parsed_values_have_their_types(capsys):
    assert parse(entry, ["x", "--steps", "5"], prog="p") == ("x", Config(steps=5))
    assert parse(Config, ["--kind", "b"], prog="p", default=Config(steps=9)) == Config(
        steps=9, kind="b"
    )
    assert capsys.readouterr().out == "running\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--steps", "abc"], "--steps: 'abc' is not a whole number"),
        (["x", "--stride", "abc"], "--stride: 'abc' is not a whole number"),
        (["x", "--rate", "abc"], "--rate: 'abc' is not a number"),
        (["x", "--kind", "c"], "--kind: invalid choice: 'c' (choose from "),
        (["x", "--shape", "1", "b"], "--shape: 'b' is not a whole number"),
        (["x", "--shape", "1"], "--shape: expected 2 arguments"),
        (["x", "--nope"], "--nope is not an option;"),
        (["x", "--stepz", "1"], "--stepz is not an option (did you mean --steps?)"),
        (["--strid=1", "x"], "--strid is not an option (did you mean --stride?)"),
        (["x", "--step", "1"], "--step is not an option (did you mean --steps?)"),
        (["x", "--max-steps", "1"], "--max-steps is not an option (did you mean --steps?)"),
        (["x", "--lr", "1"], "--lr is not an option;"),
        (["x", "-z"], "-z is not an option;"),
        (["x", "--name", "-z"], "-z is not an option"),
        (["x", "--max_tokens", "1"], "--max_tokens is not an option (did you mean --max-tokens?)"),
        (["x", "--steps"], "--steps: expected one argument"),
        (["x", "--steps="], "--steps: it is empty"),
        (["x", "--name", ""], "--name: it is empty"),
        ([""], "FOLDER is empty"),
        (["x", "--on=yes"], "--on/--no-on: ignored explicit argument 'yes'"),
        ([], "FOLDER is missing"),
    ],
)
def test_errors_are_one_line(arguments, message, capsys):
    with pytest.raises(UserError) as error:
        parse(entry, arguments, prog="sparse-bitnet verb")
    text = str(error.value)
    assert text.startswith(message)
    assert text.endswith("; see sparse-bitnet verb --help")
    assert "\n" not in text
    assert capsys.readouterr().err == ""


def test_options_may_use_equals_signs_and_dashes():
    values = {"steps": 5, "name": "a b", "words": ("x", "y", "z"), "on": False}
    written = ["x", "--steps=5", "--name", "a b", "--words", "x", "y", "--words", "z", "--no-on"]
    assert parse(entry, written, prog="p") == ("x", Config(**values))
    assert parse(entry, ["x", "--steps", "4", "--steps", "5"], prog="p")[1].steps == 5
    assert parse(entry, ["x", "--prompt", "", "--stop", "-3"], prog="p")[1].stop == -3
    assert parse(places, ["--words", "a", "b", "--on", "x", "--steps", "1", "y"], prog="p") == [
        *"xy"
    ]
    assert parse(places, ["x", "--on"], prog="p") == ["x", None]
    assert parse(entry, ["--max-tokens", "7", "--", "-x"], prog="p") == ("-x", Config(max_tokens=7))


def test_options_of_llama_cpp_are_named_or_read():
    @dataclass(kw_only=True)
    class Talk:
        prompt: str = ""
        max_tokens: int = 1
        words: tuple[str, ...] = ()

    def chat(checkpoint: CheckpointArgument, talk: Talk) -> tuple[str, Talk]:
        """Talk."""
        return checkpoint, talk

    written = ["--words", "a", "-m", "model", "-p", "hi", "-n", "5"]
    expected = ("model", Talk(words=("a",), prompt="hi", max_tokens=5))
    assert parse(chat, written, prog="sparse-bitnet chat") == expected
    refused = {"-p": " (did you mean --prompt?)", "-m": ": write CHECKPOINT without it"}
    for option, meant in {**refused, "-prompt": ""}.items():
        with pytest.raises(UserError, match=rf"^{option} is not an option{re.escape(meant)}"):
            parse(chat, ["x", option, "y"], prog="sparse-bitnet other")


def test_an_unexpected_argument_is_named():
    def pack(out: OutArgument) -> None:
        """Write it."""

    with pytest.raises(UserError, match=r"^unexpected argument y; see p --help$"):
        parse(pack, ["x", "y"], prog="p")


def test_errors_of_the_command_pass_through():
    with pytest.raises(UserError, match=r"^no such folder$"):
        parse(entry, ["missing"], prog="p")


def test_help_prints_and_exits(capsys):
    with pytest.raises(SystemExit) as stop:
        parse(entry, ["--help"], prog="p")
    assert stop.value.code == 0
    printed = "".join(capsys.readouterr())
    assert "--steps" in printed
    assert "--stride N" in printed
    assert "{None}" not in printed
    assert "Or none, in which case it is chosen by looking." in " ".join(printed.split())
    assert "How fast (in m/s)." in printed
    assert "(default: None)" not in printed
    assert "(default: 3)" in printed
    assert "where it is done" in " ".join(printed.split())
    assert "usage: p [OPTIONS] FOLDER [MORE ...]\n" in printed


def test_none_is_accepted_for_optional_values():
    default = Config(stride=4)
    assert parse(Config, ["--stride", "None"], prog="p", default=default).stride is None
    assert parse(Config, ["--shape", "1", "2"], prog="p", default=default).shape == (1, 2)
    assert parse(Config, [], prog="p", default=default) == default
    with pytest.raises(UserError, match=r"^--steps 0: must be above 0; see p --help$"):
        parse(Config, ["--steps", "0"], prog="p")
