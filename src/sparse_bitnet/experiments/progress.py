"""Progress over a set of runs: those under way, and the whole with its time left."""

import time
from typing import TYPE_CHECKING, Any, Self

from sparse_bitnet.experiments.paper import Run
from sparse_bitnet.experiments.store import RunRow
from sparse_bitnet.training.progress import describe

if TYPE_CHECKING:
    from rich.console import Console


class SetProgress:
    """A bar for the whole and one for each run under way; without a terminal a line per run."""

    def __init__(self, console: "Console", runs: int, cost: float) -> None:
        """`runs` and their `cost`, in any unit, are what there is to train."""
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._console, self._runs = console, runs
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[metrics]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._whole = self._progress.add_task("all runs", total=cost or 1.0, metrics="")
        self._tasks: dict[str, Any] = {}
        self._began: dict[str, float] = {}
        self._ended, self._done = 0, 0.0
        self._costs: dict[str, float] = {}
        self._shares: dict[str, float] = {}
        self._steps: dict[str, int] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def start(self, run: Run, cost: float) -> None:
        """A run begins that is so much of the whole."""
        self._tasks[run.name] = self._progress.add_task(
            run.purpose, total=run.config.steps, metrics="starting"
        )
        self._began[run.name], self._costs[run.name] = time.monotonic(), cost
        self._steps[run.name], self._shares[run.name] = run.config.steps, 0.0

    def step(self, name: str, row: dict[str, Any]) -> None:
        """`workers.OnStep`."""
        if name not in self._tasks:  # reported by a worker just before its run ended
            return
        self._progress.update(self._tasks[name], completed=row["step"], metrics=describe(row))
        self._shares[name] = row["step"] / self._steps[name]
        self._show_whole()

    def end(self, run: Run, result: RunRow | Exception, seconds_left: float) -> None:
        """A run has ended, well or not; `seconds_left` for the others."""
        self._ended += 1
        self._done += self._costs.pop(run.name)
        self._shares.pop(run.name)
        self._progress.remove_task(self._tasks.pop(run.name))
        taken = time.monotonic() - self._began.pop(run.name)
        head = f"[{self._ended}/{self._runs}] {run.name}"
        if isinstance(result, RunRow):
            text = (
                f"{head}: perplexity {result.perplexity:.3f}, {taken:.0f} s, "
                f"{result.tokens_per_second:,.0f} tok/s"
            )
            if seconds_left:
                text += f"; {duration(seconds_left)} left"
            self._console.print(text, highlight=False, soft_wrap=True)
        else:
            self._console.print(f"{head} failed: {result}", style="red", soft_wrap=True)
        left = f", {duration(seconds_left)} left" if seconds_left else ""
        self._show_whole(f"{self._ended} of {self._runs} done{left}")

    def _show_whole(self, text: str | None = None) -> None:
        part = sum(self._costs[name] * share for name, share in self._shares.items())
        self._progress.update(self._whole, completed=self._done + part)
        if text is not None:
            self._progress.update(self._whole, metrics=text)


def duration(seconds: float) -> str:
    """ "45 s", "12 min", "1 h 05 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min"
