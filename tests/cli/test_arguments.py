# SPDX-License-Identifier: Apache-2.0
"""What is wrong with an option is said in one line."""

from dataclasses import dataclass
from typing import Annotated, Literal

import pytest
import tyro

from sparse_bitnet.cli.arguments import parse
from sparse_bitnet.errors import UserError


@dataclass(kw_only=True)
class Config:
    """Some options."""

    steps: int = 3
    """How many."""

    stride: int | None = None
    """Or none, in which case it is found
    by looking."""

    kind: Literal["a", "b"] = "a"
    """Which."""

    rate: float = 1.0
    """How fast
    (in m/s)."""

    stop: int = 0
    """Where."""

    shape: tuple[int, int] | None = None
    """Of what."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UserError(f"steps={self.steps}: must be above 0")


def entry(
    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")],
    config: Annotated[Config, tyro.conf.arg(name="")],
) -> tuple[str, Config]:
    """Do it."""
    if folder == "missing":
        raise UserError("no such folder")
    print("running")
    return folder, config


def test_values_arrive(capsys):
    assert parse(entry, ["x", "--steps", "5"], prog="p") == ("x", Config(steps=5))
    assert parse(Config, ["--kind", "b"], prog="p", default=Config(steps=9)) == Config(
        steps=9, kind="b"
    )
    assert capsys.readouterr().out == "running\n"


@pytest.mark.parametrize("framed", [False, True])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--steps", "abc"], "--steps 'abc': not a whole number"),
        (["x", "--stride", "abc"], "--stride 'abc': not a whole number"),
        (["x", "--rate", "abc"], "--rate 'abc': not a number"),
        (["x", "--kind", "c"], "--kind 'c': choose one of 'a', 'b'"),
        (["x", "--shape", "1", "b"], "--shape cannot be '1', 'b'"),
        (["x", "--nope"], "--nope is not an option"),
        (["x", "--stepz", "1"], "--stepz is not an option (did you mean --steps?)"),
        (["--strid=1", "x"], "--strid is not an option (did you mean --stride?)"),
        (["x", "--steps"], "the value of --steps is missing"),
        (["x", "--stop", "1", "y"], "y is one argument too many"),
        ([], "FOLDER is missing"),
    ],
)
def test_complaints_are_one_line(arguments, message, framed, capsys, monkeypatch):
    monkeypatch.setattr("tyro._fmtlib._should_use_utf8_drawing_chars", lambda: framed)
    with pytest.raises(UserError) as error:
        parse(entry, arguments, prog="sparse-bitnet verb")
    text = str(error.value)
    assert text == f"{message}; see sparse-bitnet verb --help"
    assert "\n" not in text
    assert not set("│╭─╰") & set(text)
    assert capsys.readouterr().err == ""


def test_errors_of_the_command_pass_through():
    with pytest.raises(UserError, match=r"^no such folder$"):
        parse(entry, ["missing"], prog="p")


def test_help_prints_and_exits(capsys):
    with pytest.raises(SystemExit) as stop:
        parse(entry, ["--help"], prog="p")
    assert stop.value.code == 0
    printed = "".join(capsys.readouterr())
    assert "--steps" in printed
    assert "--stride INT" in printed
    assert "{None}" not in printed
    assert "Or none, in which case it is found by looking." in " ".join(printed.split())
    assert "How fast (in m/s)." in printed
    assert "(default: None)" not in printed
    assert "(default: 3)" in printed


def test_what_a_config_refuses_is_one_line():
    with pytest.raises(UserError, match=r"^steps=0: must be above 0; see p --help$"):
        parse(Config, ["--steps", "0"], prog="p")


def test_none_is_a_value_of_what_may_be_none():
    default = Config(stride=4)
    assert parse(Config, ["--stride", "None"], prog="p", default=default).stride is None
    assert parse(Config, ["--shape", "1", "2"], prog="p", default=default).shape == (1, 2)
    assert parse(Config, [], prog="p", default=default) == default
