"""Progress over several runs: those under way with step and loss, and the time left for all."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sparse_bitnet.training.config import TrainConfig

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

PLAIN_LINES = 5
"""Lines per run where the output is not a terminal."""


class TimeLeft:
    """Seconds to the end of several runs, from the speed of each format so far."""

    def __init__(self, runs: Sequence[TrainConfig], workers: int = 1) -> None:
        self._steps_left = {run.out: run.steps for run in runs}
        self._formats = {run.out: run.format for run in runs}
        self._measured: dict[str, tuple[int, float]] = {}
        self._workers = workers

    def step(self, run: TrainConfig, step: int, seconds: float) -> None:
        """Step number `step` took so long; not every step need be told."""
        self._steps_left[run.out] = run.steps - step
        steps, total = self._measured.get(run.format, (0, 0.0))
        self._measured[run.format] = (steps + 1, total + seconds)

    def finish(self, run: TrainConfig) -> None:
        """Nothing of this run is left, whether or not it was trained in this process."""
        self._steps_left[run.out] = 0

    def seconds(self) -> float | None:
        """None before the first step. A format not yet seen counts as the slowest seen.

        Workers share what is left, but no run ends sooner than its own steps take.
        """
        speeds = {name: total / steps for name, (steps, total) in self._measured.items()}
        if not speeds:
            return None
        slowest = max(speeds.values())
        left = [
            steps * speeds.get(self._formats[out], slowest)
            for out, steps in self._steps_left.items()
        ]
        return max(sum(left) / self._workers, max(left))


class RunsProgress:
    """Shows `runs` on a console, as bars that change or as plain lines."""

    def __init__(
        self,
        runs: Sequence[TrainConfig],
        console: "Console",
        workers: int,
        display: "Progress | None",
    ) -> None:
        self._runs = {run.out: run for run in runs}
        self._numbers = {run.out: number for number, run in enumerate(runs, 1)}
        self._console, self._display = console, display
        self._time_left = TimeLeft(runs, workers)
        self._steps_done = dict.fromkeys(self._runs, 0)
        self._lines_shown = dict.fromkeys(self._runs, 0)
        self._bars: dict[str, TaskID] = {}
        if display:
            total = sum(run.steps for run in runs)
            self._whole = display.add_task("all models", total=total, text="starting")

    def step(self, name: str, row: dict[str, Any]) -> None:
        """`workers.OnStep`; a run's name is its folder."""
        run = self._runs[name]
        self._time_left.step(run, row["step"], row["seconds"])
        self._steps_done[name] = row["step"]
        text = f"step {row['step']}/{run.steps}  loss {row['loss']:.3f}"
        left = f"{_clock(self._time_left.seconds())} left"
        if self._display:
            if name not in self._bars:
                self._bars[name] = self._display.add_task(
                    self._label(run), total=run.steps, text=""
                )
            if row["step"] == run.steps:
                text = "scoring the held-out text"
            self._display.update(self._bars[name], completed=row["step"], text=text)
            self._show_whole(left)
        elif (lines := row["step"] * PLAIN_LINES // run.steps) > self._lines_shown[name]:
            self._lines_shown[name] = lines
            self._print(f"{self._label(run)}  {text}  {left}")

    def finish(self, run: TrainConfig, perplexity: float) -> None:
        """One of the runs is done, or was before."""
        self._time_left.finish(run)
        self._steps_done[run.out] = run.steps
        if self._display:
            if run.out in self._bars:
                self._display.remove_task(self._bars.pop(run.out))
            self._show_whole(f"{_clock(self._time_left.seconds())} left")
        self._print(f"{self._label(run)}  perplexity {perplexity:.2f}")

    def _show_whole(self, text: str) -> None:
        assert self._display
        done = sum(self._steps_done.values())
        self._display.update(self._whole, completed=done, text=text)

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)

    def _label(self, run: TrainConfig) -> str:
        several = len({each.seed for each in self._runs.values()}) > 1
        seed = f"  seed {run.seed}" if several else ""
        return f"model {self._numbers[run.out]}/{len(self._runs)}  {run.format}{seed}"


@contextmanager
def runs_progress(
    runs: Sequence[TrainConfig], console: "Console", workers: int = 1
) -> Iterator[RunsProgress]:
    """Yield the display; its bars disappear at the end."""
    from rich.progress import BarColumn, Progress, TextColumn

    if not console.is_terminal:
        yield RunsProgress(runs, console, workers, None)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[text]}", markup=False),
    )
    with Progress(*columns, console=console, transient=True) as display:
        yield RunsProgress(runs, console, workers, display)


def _clock(seconds: float | None) -> str:
    minutes, rest = divmod(round(seconds or 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
