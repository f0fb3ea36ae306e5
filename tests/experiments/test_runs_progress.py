"""Time left over runs of different speeds."""

import io

import pytest
from rich.console import Console

from sparse_bitnet.experiments.runs_progress import TimeLeft, runs_progress
from sparse_bitnet.training.config import TrainConfig


def run(format, steps=10, seed=0):
    return TrainConfig(format=format, steps=steps, seed=seed, out=f"{format}-{seed}")


def test_unknown_formats_count_as_the_slowest():
    fast, slow, other = runs = [run("full-8:8"), run("ternary-8:8"), run("ternary-6:8")]
    left = TimeLeft(runs)
    assert left.seconds() is None
    left.step(fast, 1, 2.0)
    assert left.seconds() == pytest.approx((9 + 10 + 10) * 2.0)
    left.finish(fast)
    left.step(slow, 1, 5.0)
    left.step(slow, 2, 7.0)
    assert left.seconds() == pytest.approx((8 + 10) * 6.0)
    left.finish(slow)
    left.finish(other)
    assert left.seconds() == 0


def test_second_seed_uses_the_speed_of_the_first():
    first, second = runs = [run("full-8:8"), run("full-8:8", seed=1)]
    left = TimeLeft(runs)
    left.step(first, 10, 3.0)
    assert left.seconds() == pytest.approx(30.0)
    left.finish(second)
    assert left.seconds() == 0


def test_workers_share_the_rest_but_not_the_last_run():
    runs = [run("full-8:8", seed=seed) for seed in range(4)]
    left = TimeLeft(runs, workers=2)
    left.step(runs[0], 10, 3.0)
    left.step(runs[1], 5, 3.0)
    assert left.seconds() == pytest.approx((5 + 10 + 10) * 3.0 / 2)
    left.finish(runs[1])
    left.finish(runs[2])
    assert left.seconds() == pytest.approx(30.0)


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("every", [1, 3])
def test_shows_model_step_loss_and_time(terminal, every):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120)
    runs = [run("full-8:8"), run("ternary-6:8", seed=1)]
    with runs_progress(runs, console, workers=2) as progress:
        for step in (*range(1, 10, every), 10):
            for each in runs:
                progress.step(each.out, {"step": step, "loss": 4.25, "seconds": 60.0})
        for each in runs:
            progress.finish(each, 31.416)
    printed = console.file.getvalue()
    assert "model 2/2  ternary-6:8  seed 1  perplexity 31.42" in printed
    if not terminal:
        assert "model 2/2  ternary-6:8  seed 1  step 10/10  loss 4.250" in printed
        assert "left" in printed
        lines = [line for line in printed.splitlines() if "full-8:8" in line]
        assert 4 <= len(lines) <= 6


def test_finished_runs_count_as_done():
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    first, second = runs = [run("full-8:8"), run("full-6:8")]
    with runs_progress(runs, console) as progress:
        progress.finish(first, 3.0)
        progress.step(second.out, {"step": 5, "loss": 2.0, "seconds": 2.0})
        progress.finish(second, 3.5)
    assert "model 1/2  full-8:8  perplexity 3.00" in console.file.getvalue()
