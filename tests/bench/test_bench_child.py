# SPDX-License-Identifier: Apache-2.0
"""Child processes of the benchmark answer requests, report errors, and end when their parent wants."""

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
        raise UserError("refused: too large; use --engine transformers")
    if question["op"] == "die":
        sys.exit("out of everything")
    return {"question": question, "memory": resident_bytes(), "set": os.environ.get("A_NAME")}

serve(answer)
"""


def test_a_child_answers_and_lives_on_after_a_refusal() -> None:
    with Child(("-c", ECHO), {"A_NAME": "value"}) as child:
        for number in range(2):
            answer = child.ask({"op": "echo", "number": number})
            assert answer["question"]["number"] == number
            assert answer["set"] == "value"
            assert answer["memory"] is None or answer["memory"] > 1 << 20
            with pytest.raises(UserError, match=r"^refused: too large$"):
                child.ask({"op": "refuse"})


@pytest.mark.parametrize(
    ("code", "words"),
    [(ECHO, r"process died \(exit code 1\)"), ("import sys; sys.exit(3)", "exit code 3")],
)
def test_a_child_that_ends_is_named_with_its_exit_code(code: str, words: str) -> None:
    with Child(("-c", code)) as child:
        with pytest.raises(UserError, match=words):
            child.ask({"op": "die"})
