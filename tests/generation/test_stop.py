# SPDX-License-Identifier: Apache-2.0
"""Stop strings let nothing of themselves through, however the text is cut."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_bitnet.errors import UserError
from sparse_bitnet.generation.open_model import end_tokens
from sparse_bitnet.generation.text import StopStrings


def run(pieces, stop):
    """Texts let through one by one, and the stop string found."""
    strings = StopStrings(stop)
    shown = [strings.feed(piece) for piece in pieces]
    return [*shown, strings.flush()], strings.found


@pytest.mark.parametrize(
    ("pieces", "stop", "shown", "found"),
    [
        (["one ", "two"], [], ["one ", "two", ""], None),
        (["one", " two\n", "\nthree"], ["\n\n"], ["one", " two", "", ""], "\n\n"),
        (["a<|e", "nd|>b"], ["<|end|>"], ["a", "", ""], "<|end|>"),
        (["a<|e", "x"], ["<|end|>"], ["a", "<|ex", ""], None),
        (["a<|e"], ["<|end|>"], ["a", "<|e"], None),
        (["aab"], ["ab"], ["a", ""], "ab"),
        (["aa", "b"], ["aab", "ab"], ["", "", ""], "aab"),
        (["abcd"], ["abcd", "bc"], ["a", ""], "bc"),
        (["stop", "more"], ["stop"], ["", "", ""], "stop"),
    ],
)
def test_examples(pieces, stop, shown, found):
    assert run(pieces, stop) == (shown, found)


@given(
    st.text("ab", max_size=20),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 20), max_size=6),
)
def test_the_cutting_of_the_text_does_not_matter(text, stop, cuts):
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    shown, found = run(pieces, stop)
    assert ("".join(shown), found) == ("".join(run(text, stop)[0]), run(text, stop)[1])
    whole = "".join(shown)
    assert text.startswith(whole)
    assert not any(string in whole for string in stop)
    assert whole == text or text.startswith(whole + found)


@pytest.mark.parametrize(
    ("stop", "shown"),
    [
        (["<|end|>"], ["a", "", ""]),
        (["a<|end|>b"], ["", "", ""]),
        (["<|end|>b"], ["a", "", ""]),
        (["<|end|>c", "b"], ["a", "", ""]),
        (["<|end|>c"], ["a", "", "b"]),
        (["ab"], ["", "a", "b"]),
    ],
)
def test_a_stop_string_may_name_a_special_token_which_is_not_shown(stop, shown):
    strings = StopStrings(stop)
    assert [
        strings.feed("a"),
        strings.feed("<|end|>", is_shown=False),
        strings.feed("b") + strings.flush(),
    ] == shown


def test_an_empty_stop_string_is_refused():
    with pytest.raises(UserError, match="stop string is empty"):
        StopStrings(["a", ""])


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, None, set()),
        (None, {}, set()),
        (None, {"eos_token_id": 3}, {3}),
        ({"eos_token_id": [1, 2]}, {"eos_token_id": 3}, {1, 2}),
        ({"eos_token_id": None}, {"eos_token_id": 3}, {3}),
    ],
)
def test_end_tokens_are_the_generation_configs_before_the_models(
    tmp_path, generation, config, expected
):
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    assert end_tokens(tmp_path) == expected


@pytest.mark.parametrize(
    "content", ['{"eos_token_id": "x"}', '{"eos_token_id": [true]}', "[]", "{"]
)
def test_damaged_end_tokens_are_refused(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=r"config\.json"):
        end_tokens(tmp_path)
