# SPDX-License-Identifier: Apache-2.0
"""Progress of long work, as bars on a terminal and otherwise as a few lines: amount, rate, remaining
time.

The rate is that of the last minute.
"""

import sys
from collections.abc import Callable

from rich import progress as rich_progress
from rich.console import Console
from rich.progress import BarColumn, Task, TextColumn

OnProgress = Callable[[int, int], None]
"""Called with how much is done and how much there is; a `Line` is one."""


class Progress(rich_progress.Progress):
    """Progress display on a console: `line` adds a line for a piece of work, `note` prints above."""

    def __init__(self, console: Console | None = None, *, plain_lines: int = 0) -> None:
        """Use `console`, by default stderr.

        Without a terminal, each line prints its state about `plain_lines` times.
        """
        console = console or Console(stderr=True)
        super().__init__(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[state]}", markup=False),
            console=console,
            transient=True,
            disable=not console.is_terminal,
            speed_estimate_period=60,
        )
        self.plain_lines = plain_lines

    def line(self, label: str, unit: str = "", scale: float = 1, after: float = 0) -> "Line":
        """Return a line that appears with its first call that comes `after` seconds or later.

        `scale` is the number of counted things in one `unit`: 1e6 for bytes shown in MB. Without a unit
        the line shows percent.
        """
        return Line(self, label, unit, scale, after)

    def note(self, text: str, style: str | None = None) -> None:
        """Print a line that stays."""
        self.console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


class Line:
    """One piece of work. Call it with the amount done and the total."""

    def __init__(
        self, progress: Progress, label: str, unit: str, scale: float, after: float
    ) -> None:
        self._progress, self._unit, self._scale, self._after = progress, unit, scale, after
        self._id = progress.add_task(label, total=None, visible=False, state="")
        self._printed = -1

    def __call__(
        self, done: float, total: float | None, *, text: str = "", label: str | None = None
    ) -> None:
        """Show that `done` of `total` (None: unknown) is done.

        Args:
            text: shown after the amount.
            label: replaces the line's label from now on; a new label starts a new count.
        """
        display, plain_lines = self._progress, self._progress.plain_lines
        task = next(task for task in display.tasks if task.id == self._id)
        if label and label != task.description:
            display.reset(self._id, description=label)
            self._printed = -1
        shown = (task.elapsed or 0.0) >= self._after
        display.update(self._id, completed=done, total=total, visible=shown)
        display.update(self._id, state=self._state(task, text))
        share = int(done * plain_lines / total) if plain_lines and total else -1
        if shown and share > self._printed and not display.console.is_terminal:
            self._printed = share
            display.note(f"{task.description}  {task.fields['state']}")

    def end(self) -> None:
        """Remove the line."""
        self._progress.remove_task(self._id)

    def _state(self, task: Task, text: str) -> str:
        done, total, rate, parts = task.completed, task.total, task.speed or 0.0, []
        if self._unit:
            of = "" if total is None else f"/{_short(total / self._scale)}"
            parts.append(f"{_short(done / self._scale)}{of} {self._unit}")
            if rate > 0:
                parts.append(f"{_short(rate / self._scale)} {self._unit}/s")
        elif total:
            parts.append(f"{done / total:.0%}")
        if text:
            parts.append(text)
        if rate > 0 and total is not None and done < total:
            parts.append(f"{duration((total - done) / rate)} left")
        return ", ".join(parts)


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def duration(seconds: float) -> str:
    """ "45 s", "12 min", "1 h 05 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min"


def say(message: str) -> None:
    """Print a message that is not part of a result, on stderr."""
    print(f"sparse-bitnet: {message}", file=sys.stderr, flush=True)
