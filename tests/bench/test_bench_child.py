# SPDX-License-Identifier: Apache-2.0
"""Measured processes answer questions, say what is wrong, and end with their parent's wish."""

import pytest

from sparse_bitnet.bench.child import Child
from sparse_bitnet.errors import UserError

ECHO = """
import os, sys
from sparse_bitnet.bench.child import resident_bytes, serve
from sparse_bitnet.errors import UserError

def answer(question):
    print("noise that is no answer")
    if question["op"] == "refuse":
        raise UserError("refused: too large")
    if question["op"] == "die":
        sys.exit("out of everything")
    return {"question": question, "memory": resident_bytes(), "set": os.environ.get("A_NAME")}

serve(answer)
"""


def test_answers_come_back_one_by_one() -> None:
    with Child(("-c", ECHO), {"A_NAME": "value"}) as child:
        for number in range(3):
            answer = child.ask({"op": "echo", "number": number})
            assert answer["question"]["number"] == number
            assert answer["set"] == "value"
            assert answer["memory"] is None or answer["memory"] > 1 << 20


def test_a_refusal_is_one_line_and_the_child_lives_on() -> None:
    with Child(("-c", ECHO)) as child:
        with pytest.raises(UserError, match=r"^refused: too large$"):
            child.ask({"op": "refuse"})
        assert child.ask({"op": "echo"})["question"] == {"op": "echo"}


def test_a_child_that_dies_is_told_with_its_last_words() -> None:
    with Child(("-c", ECHO)) as child:
        with pytest.raises(UserError, match="ended early: out of everything"):
            child.ask({"op": "die"})


def test_a_child_that_never_starts() -> None:
    with Child(("-c", "import sys; sys.exit(3)")) as child:
        with pytest.raises(UserError, match="exit code 3"):
            child.ask({"op": "echo"})


def test_closing_twice() -> None:
    child = Child(("-c", ECHO))
    child.close()
    child.close()
