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
    """Or none."""

    kind: Literal["a", "b"] = "a"
    """Which."""


def entry(
    folder: Annotated[str, tyro.conf.Positional],
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--steps", "abc"], "Error parsing --steps"),
        (["x", "--stride", "abc"], "Error parsing --stride"),
        (["x", "--kind", "c"], "invalid choice 'c' for argument '--kind'"),
        (["x", "--nope"], "--nope"),
        (["x", "--steps"], "--steps"),
        ([], "Missing"),
    ],
)
def test_complaints_are_one_line(arguments, message, capsys):
    with pytest.raises(UserError) as error:
        parse(entry, arguments, prog="sparse-bitnet verb")
    text = str(error.value)
    assert message in text
    assert text.endswith("; see sparse-bitnet verb --help")
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
    assert "--steps" in "".join(capsys.readouterr())
