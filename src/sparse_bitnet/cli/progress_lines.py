"""Lines that show how far a command is: amount, rate and time left."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

OnProgress = Callable[[int, int], None]
"""Called with how much is done and how much there is."""


class ProgressLines:
    """A context inside which `line` makes callbacks that draw; nothing is drawn without a terminal."""

    def __init__(self, console: "Console") -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._is_shown = console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[amount]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )

    def __enter__(self) -> "ProgressLines":
        if self._is_shown:
            self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._is_shown:
            self._progress.stop()

    def line(self, label: str, unit: str, scale: float = 1) -> OnProgress | None:
        """A line that appears with the first call of its callback; None without a terminal.

        `scale` is how many of what is counted make up one `unit`: 1e6 bytes one MB.
        """
        if not self._is_shown:
            return None
        task = self._progress.add_task(label, visible=False, start=False, amount="")
        (shown,) = (line for line in self._progress.tasks if line.id == task)

        def show(done: int, total: int) -> None:
            if not shown.started:
                self._progress.start_task(task)
            rate = (shown.speed or 0) / scale
            amount = f"{done / scale:,.0f}/{total / scale:,.0f} {unit}, {rate:,.0f} {unit}/s"
            self._progress.update(task, completed=done, total=total, visible=True, amount=amount)

        return show
