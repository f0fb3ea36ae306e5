# SPDX-License-Identifier: Apache-2.0
"""Bars on a terminal, a few plain lines or none elsewhere; rate and remaining time of the last minute."""

import io

import pytest
from rich.console import Console

from sparse_bitnet.progress import Progress, duration


@pytest.fixture
def clock() -> list[float]:
    return [0.0]


def console(is_terminal: bool, clock: list[float]) -> Console:
    return Console(
        file=io.StringIO(), force_terminal=is_terminal, width=100, get_time=lambda: clock[0]
    )


@pytest.mark.parametrize("is_terminal", [False, True])
def test_lines_are_drawn_on_terminals_only(is_terminal: bool, clock: list[float]) -> None:
    output = console(is_terminal, clock)
    with Progress(output) as progress:
        line = progress.line("reading", "MB", 1e6)
        line(7_000_000, None)  # the total can be unknown at first
        line(0, None, label="tokenising")
        line(1_000_000, 3_000_000)
        line(3_000_000, 3_000_000)
    text = output.file.getvalue()
    assert ("tokenising" in text) == ("3/3 MB" in text) == is_terminal


def test_plain_lines_have_rate_and_remaining_time(clock: list[float]) -> None:
    output = console(False, clock)
    with Progress(output, plain_lines=4) as progress:
        line = progress.line("training", "steps")
        for step in range(1, 101):
            clock[0] += 2.0
            line(step, 100, text=f"loss {step}")
        progress.note("done [here]")
    assert output.file.getvalue().splitlines() == [
        "training  1/100 steps, loss 1",
        "training  25/100 steps, 0.5 steps/s, loss 25, 2 min left",
        "training  50/100 steps, 0.5 steps/s, loss 50, 2 min left",
        "training  75/100 steps, 0.5 steps/s, loss 75, 50 s left",
        "training  100/100 steps, 0.5 steps/s, loss 100",
        "done [here]",
    ]
    line = Progress(output := console(False, clock), plain_lines=2).line("reading", "MB")
    line(2, 2)
    line(1, 2, label="tokenising")
    assert output.file.getvalue().splitlines() == ["reading  2/2 MB", "tokenising  1/2 MB"]


def test_short_work_prints_nothing(clock: list[float]) -> None:
    line = Progress(output := console(False, clock), plain_lines=9).line("", "MB", after=5)
    for done in (1, 2, 3):
        clock[0] += 2.0
        line(done, 4)
    assert output.file.getvalue().strip() == "3/4 MB, 0.5 MB/s, 2 s left"


def test_the_rate_is_that_of_the_last_minute(clock: list[float]) -> None:
    output = console(False, clock)
    line = Progress(output, plain_lines=10_000).line("", "")
    line(1, 1000)
    clock[0] = 1000.0  # an interrupted run's part, or a slow first step
    for second in range(70):
        clock[0] += 1
        line(500 + second, 1000)
    assert output.file.getvalue().splitlines()[-1].strip() == "57%, 7 min left"


def test_durations_are_short() -> None:
    shown = [duration(seconds) for seconds in (1, 89.6, 90, 3540, 3900)]
    assert shown == ["1 s", "90 s", "2 min", "59 min", "1 h 05 min"]
