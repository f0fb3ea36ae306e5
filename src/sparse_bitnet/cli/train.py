"""`sparse-bitnet train`: a recipe plus overrides."""

import dataclasses
import sys
from pathlib import Path

from sparse_bitnet.cli import arguments as options
from sparse_bitnet.errors import UserError
from sparse_bitnet.training.config import TrainConfig, read_config
from sparse_bitnet.training.recipes import RECIPES


def main(arguments: list[str]) -> None:
    """Train, or continue the run in --out: a run's own config is the default of its options."""
    recipe, rest = split_recipe(arguments)
    config = parse(rest, RECIPES[recipe or "default"](), recipe or "default")
    out = Path(config.out)
    if recipe is None and (out / "config.json").is_file():
        stored = dataclasses.replace(read_config(out), out=config.out)
        config = parse(rest, stored, f"that of {out}")
    run(config)


def parse(arguments: list[str], default: TrainConfig, recipe: str) -> TrainConfig:
    """The config that `default` and the options make."""
    return options.parse(
        TrainConfig,
        arguments,
        default=default,
        prog="sparse-bitnet train",
        description=(
            "Train, or continue the run in --out (its config is then the default). Recipe in use: "
            f"{recipe} (--recipe {{{','.join(RECIPES)}}}); every option below overrides it."
        ),
    )


def split_recipe(arguments: list[str]) -> tuple[str | None, list[str]]:
    """Take `--recipe NAME` (or `--recipe=NAME`) out of the arguments; None when there is none."""
    rest, recipe = list(arguments), None
    for index, argument in enumerate(rest):
        if argument.startswith("--recipe="):
            recipe = argument.partition("=")[2]
            del rest[index]
            break
        if argument == "--recipe":
            recipe = rest[index + 1] if index + 1 < len(rest) else ""
            del rest[index : index + 2]
            break
    if recipe is not None and recipe not in RECIPES:
        raise UserError(f"recipe {recipe!r} is unknown: choose one of {', '.join(RECIPES)}")
    return recipe, rest


def run(config: TrainConfig) -> None:
    """Train with a progress line; prints the result."""
    from rich.console import Console

    from sparse_bitnet.training.loop import Interrupted, train
    from sparse_bitnet.training.progress import training_progress

    console = Console()
    try:
        with training_progress(config, console) as on_step:
            result = train(config, on_step=on_step)
    except Interrupted as stop:
        console.print(f"{stop}; the same command continues from there", highlight=False)
        sys.exit(130)
    flips = "-" if result.flip_rate is None else f"{result.flip_rate:.2e}"
    console.print(
        f"{result.format}: validation perplexity {result.validation_perplexity:.3f} over "
        f"{result.validation_tokens:,} tokens after {result.steps:,} steps "
        f"({result.tokens:,} tokens); zero fraction {result.zero_fraction:.3f}, "
        f"last flip rate {flips}\nmodel: {config.out}/final   curves: {config.out}/metrics.jsonl",
        highlight=False,
        soft_wrap=True,
    )
