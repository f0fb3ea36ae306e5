# SPDX-License-Identifier: Apache-2.0
"""`sparse-bitnet quickstart`: the paper's four models on real text, in a few minutes."""

import sys
import time

from sparse_bitnet.cli.arguments import parse
from sparse_bitnet_paper.scales import QuickstartConfig


def main(arguments: list[str]) -> None:
    """Train the paper's four models, compare them, write a report."""
    run(parse(QuickstartConfig, arguments, prog="sparse-bitnet quickstart"))


def run(config: QuickstartConfig) -> None:
    """Print progress, the table and where everything is; exit code 130 when stopped."""
    from rich.console import Console

    from sparse_bitnet.training.run_folder import Interrupted
    from sparse_bitnet_paper.quickstart import quickstart

    console = Console()
    began = time.monotonic()
    try:
        found = quickstart(config, console)
    except (Interrupted, KeyboardInterrupt) as stop:
        reason = str(stop) or "stopped"
        print(f"\n{reason}; the same command continues from there", file=sys.stderr)
        sys.exit(130)
    title = f"Held-out perplexity, {config.model}, {config.source}"
    found.comparison.print(console, title, "The paper's Qwen2.5 models")
    console.print(f"\n{found.verdict}", highlight=False)
    heading = f"\nternary-{config.pattern} continues {config.prompt!r}:"
    console.print(heading, style="bold", highlight=False, markup=False)
    console.print(f"{config.prompt}{found.sample}", highlight=False, markup=False)
    minutes, seconds = divmod(round(time.monotonic() - began), 60)
    print(
        f"\nreport:  {found.report}\nresults: {config.out}/results.jsonl\n"
        f"models:  {found.model.parent.parent}/*/final\ntime:    {minutes} min {seconds} s"
    )
