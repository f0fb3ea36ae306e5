# SPDX-License-Identifier: Apache-2.0
"""Bars on a terminal, a few plain lines or none elsewhere; rate and time left from the last minute."""

import io

import pytest
from rich.console import Console

from sparse_bitnet import progress as module
from sparse_bitnet.progress import Progress, duration


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def console(is_terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=is_terminal, width=100)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_lines_are_drawn_on_terminals_only(is_terminal: bool) -> None:
    output = console(is_terminal)
    with Progress(output) as progress:
        line = progress.line("writing", "MB", 1e6)
        line(1_000_000, 3_000_000)
        line(3_000_000, 3_000_000)
    assert ("writing" in output.file.getvalue()) == is_terminal
    assert ("3/3 MB" in output.file.getvalue()) == is_terminal


def test_plain_lines_with_rate_and_time_left(clock: list[float]) -> None:
    output = console(False)
    with Progress(output, plain_lines=4) as progress:
        line = progress.line("training", "steps")
        for step in range(1, 101):
            clock[0] += 2.0
            line(step, 100, text=f"loss {step}")
        progress.print("done [here]")
    assert output.file.getvalue().splitlines() == [
        "training  1/100 steps, loss 1",
        "training  25/100 steps, 0.5 steps/s, loss 25, 2 min left",
        "training  50/100 steps, 0.5 steps/s, loss 50, 2 min left",
        "training  75/100 steps, 0.5 steps/s, loss 75, 50 s left",
        "training  100/100 steps, 0.5 steps/s, loss 100",
        "done [here]",
    ]


def test_another_label_begins_another_count_of_plain_lines(clock: list[float]) -> None:
    output = console(False)
    line = Progress(output, plain_lines=2).line("reading", "MB")
    line(2, 2)
    line(1, 2, label="tokenising")
    assert output.file.getvalue().splitlines() == ["reading  2/2 MB", "tokenising  1/2 MB"]


def test_the_rate_is_that_of_the_last_minute(clock: list[float]) -> None:
    output = console(False)
    line = Progress(output, plain_lines=10_000).line("", "")
    line(1, 1000)
    clock[0] = 1000.0  # an interrupted run's part, or a slow first step
    for second in range(70):
        clock[0] += 1
        line(500 + second, 1000)
    assert output.file.getvalue().splitlines()[-1].strip() == "57%, 7 min left"


def test_a_total_can_be_unknown_at_first(clock: list[float]) -> None:
    output = console(True)
    with Progress(output) as progress:
        line = progress.line("reading", "MB", 1e6)
        line(7_000_000, None)
        line(0, None, label="tokenising")  # another count begins
        clock[0] = 1.0
        line(5_000_000, None, label="tokenising")
        assert "5 MB, 5 MB/s" in line._state(5_000_000, None, "")
        line(6_000_000, 9_000_000)
    assert "tokenising" in output.file.getvalue()
    assert "0 s left" in output.file.getvalue()


def test_durations() -> None:
    assert [duration(s) for s in (1, 89.6, 90, 3540, 3900)] == [
        "1 s",
        "90 s",
        "2 min",
        "59 min",
        "1 h 05 min",
    ]
