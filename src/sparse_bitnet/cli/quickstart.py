"""`sparse-bitnet quickstart`: the paper's four models on real text, in about five minutes."""

import sys
import time

from sparse_bitnet.cli.arguments import parse
from sparse_bitnet.experiments.quickstart_config import QuickstartConfig


def main(arguments: list[str]) -> None:
    """Train the paper's four models, compare them, write a report."""
    run(parse(QuickstartConfig, arguments, prog="sparse-bitnet quickstart"))


def run(config: QuickstartConfig) -> None:
    """Print progress, the table and where everything is; exit code 130 when stopped."""
    from rich.console import Console

    from sparse_bitnet.experiments.quickstart import RESULTS, quickstart
    from sparse_bitnet.experiments.quickstart_config import formats, run_folder
    from sparse_bitnet.experiments.table import comparison_table, print_table, verdict
    from sparse_bitnet.training.run_folder import Interrupted

    console = Console()
    began = time.monotonic()
    try:
        result = quickstart(config, console)
    except (Interrupted, KeyboardInterrupt) as stop:
        reason = str(stop) or "stopped"
        print(f"\n{reason}; the same command continues from there", file=sys.stderr)
        sys.exit(130)
    title = f"Held-out perplexity, {config.model}, {config.source}"
    print_table(comparison_table(result.rows, config.pattern), console, title)
    console.print(f"\n{verdict(result.rows, config.pattern)}", highlight=False)
    sparse_ternary = formats(config.pattern)[-1]
    console.print(f"\n{sparse_ternary} continues {config.prompt!r}:", style="bold", highlight=False)
    console.print(f"{config.prompt}{result.sample}", highlight=False, markup=False)
    minutes, seconds = divmod(round(time.monotonic() - began), 60)
    models = run_folder(config, sparse_ternary, 0).parent
    console.print(
        f"\nreport:  {result.report}\nresults: {config.out}/{RESULTS}\n"
        f"models:  {models}/*/final\ntime:    {minutes} min {seconds} s",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
