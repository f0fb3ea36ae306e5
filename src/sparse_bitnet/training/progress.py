"""A progress line for training: loss, rate and time left; plain lines where there is no terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sparse_bitnet.training.config import TrainConfig

if TYPE_CHECKING:
    from rich.console import Console

PLAIN_LINES = 20
"""Lines a whole run prints where the output is not a terminal."""


@contextmanager
def training_progress(
    config: TrainConfig, console: "Console", label: str | None = None
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield the `on_step` of `train` that shows one run on `console`."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    label = label or config.format
    if not console.is_terminal:
        every = max(1, config.steps // PLAIN_LINES)

        def print_row(row: dict[str, Any]) -> None:
            if row["step"] % every == 0 or row["step"] in (1, config.steps):
                console.print(
                    f"{label} step {row['step']}/{config.steps} {describe(row)}", highlight=False
                )

        yield print_row
        return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[metrics]}"),
        TimeRemainingColumn(),
        console=console,
    ) as progress:
        task = progress.add_task(label, total=config.steps, metrics="starting")

        def show_row(row: dict[str, Any]) -> None:
            progress.update(task, completed=row["step"], metrics=describe(row))

        yield show_row


def describe(row: dict[str, Any]) -> str:
    """One step's metrics in a few words."""
    flip = "" if not row["flip_rate"] else f" flip {row['flip_rate']:.1e}"
    return (
        f"loss {row['loss']:.3f} lr {row['learning_rate']:.1e} norm {row['gradient_norm']:.2f}"
        f"{flip} {row['tokens_per_second']:,.0f} tok/s"
    )
