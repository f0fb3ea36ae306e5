"""`sparse-bitnet evaluate`: held-out perplexity of any checkpoint."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

if TYPE_CHECKING:
    from rich.console import Console

    from sparse_bitnet.evaluation.perplexity import Evaluation


@dataclass(kw_only=True)
class EvaluateConfig:
    """What to score, and how."""

    data: str
    """Folder written by `sparse-bitnet prepare` (its validation split), or a text file or glob (.txt,
    .jsonl, .jsonl.zst, .parquet; every document is scored)."""

    context_length: int | None = None
    """Tokens the model sees at once. Default: as in training, or 2048."""

    stride: int | None = None
    """Tokens between windows; below context-length windows overlap, and every token has at least
    context-length minus stride tokens before it. Default: no overlap."""

    batch_size: int = 8
    """Windows per forward."""

    max_tokens: int = 0
    """Score the first so many tokens only; 0: all."""

    precision: Literal["auto", "bf16", "float32"] = "auto"
    """Compute type. auto: bf16 where the device has fast bf16 products."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""

    column: str = "text"
    """Column of the text in .jsonl and .parquet files."""

    json: str | None = None
    """Also write the result to this file."""


def main(arguments: list[str]) -> None:
    """Print a table and write JSON."""
    import tyro

    def entry(
        checkpoint: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")],
        config: Annotated[EvaluateConfig, tyro.conf.arg(name="")],
    ) -> None:
        """Held-out perplexity: the exact mean over all tokens, of the trained forward.

        Args:
            checkpoint: run folder, checkpoint folder, or any transformers folder or hub id.
            config: what to score, and how.
        """
        run(checkpoint, config)

    tyro.cli(entry, args=arguments, prog="sparse-bitnet evaluate")


def run(checkpoint: str, config: EvaluateConfig) -> None:
    """Evaluate with a progress bar; prints the result."""
    from rich.console import Console

    from sparse_bitnet.evaluation.perplexity import evaluate
    from sparse_bitnet.files import write_atomic

    console = Console()
    with _progress(console) as on_batch:
        found = evaluate(
            checkpoint,
            config.data,
            context_length=config.context_length,
            stride=config.stride,
            batch_size=config.batch_size,
            max_tokens=config.max_tokens,
            precision=config.precision,
            device=config.device,
            column=config.column,
            on_batch=on_batch,
        )
    _print(found, console)
    if config.json:
        write_atomic(config.json, json.dumps(found.to_dict(), indent=2) + "\n")


@contextmanager
def _progress(console: "Console") -> Iterator[Callable[[int, int], None]]:
    """Tokens scored and time left, on a terminal; gone at the end."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = ("scoring", BarColumn(), MofNCompleteColumn(), "tokens", TimeRemainingColumn())
    disable = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=disable) as display:
        task = display.add_task("", total=None)
        yield lambda done, total: display.update(task, completed=done, total=total)


def _print(found: "Evaluation", console: "Console") -> None:
    from rich import box
    from rich.table import Table

    result = found.result
    rows = {
        "checkpoint": found.checkpoint,
        "format": found.format,
        "data": found.data,
        "perplexity": f"{result.perplexity:.4f}",
        "mean loss": f"{result.mean_nll:.6f} nats per token",
        "tokens": f"{result.tokens:,}",
        "context": f"{result.context_length} tokens, stride {result.stride}",
        "computed in": f"{found.precision} on {found.device}",
    }
    if result.bits_per_byte is not None:
        rows["bits per byte"] = f"{result.bits_per_byte:.4f} ({result.text_bytes:,} bytes)"
    table = Table(box=box.SIMPLE, show_header=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value, style="bold" if name == "perplexity" else None)
    console.print(table)
