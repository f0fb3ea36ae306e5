# SPDX-License-Identifier: Apache-2.0
"""Errors of libraries become one line."""

import pytest

from sparse_bitnet.errors import reason_of


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("not found\nat line 5", "not found"),
        ("\n  late  start\nmore", "late start"),
        ("Validation error for x:\n  no number\nmore", "Validation error for x: no number"),
        ("", "RuntimeError"),
        (" \n ", "RuntimeError"),
        ("a" * 400, "a" * 300 + "..."),
    ],
)
def test_reason_is_one_line(message, reason):
    assert reason_of(RuntimeError(message)) == reason
