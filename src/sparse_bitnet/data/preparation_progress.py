"""The progress line of a preparation: part done, MB of text, MB/s, time left."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Show = Callable[[str, float | None, int], None]
"""Called with what is being done, the fraction done (None: unknown) and the bytes of text so far."""


@contextmanager
def preparation_progress(show: bool | None) -> Iterator[Show]:
    """Yield the function that updates the line; `show` None: where stderr is a terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    if not (console.is_terminal if show is None else show):
        yield lambda what, fraction, text_bytes: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TaskProgressColumn(),
        TextColumn("{task.fields[amount]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as display:
        task = display.add_task("starting", total=None, amount="")
        # The rate is this process's: what an earlier, interrupted one did took none of our time.
        first: tuple[float, int] | None = None

        def update(what: str, fraction: float | None, text_bytes: int) -> None:
            nonlocal first
            now = time.monotonic()
            amount = ""
            if text_bytes:
                first = first or (now, text_bytes)
                rate = (text_bytes - first[1]) / (now - first[0]) / 1e6 if now > first[0] else 0.0
                amount = f"{text_bytes / 1e6:,.1f} MB, {rate:.1f} MB/s"
            display.update(
                task,
                description=what,
                total=None if fraction is None else 1.0,
                completed=fraction or 0.0,
                amount=amount,
            )

        yield update
