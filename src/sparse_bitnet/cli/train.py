"""`sparse-bitnet train`: a recipe plus overrides."""

import sys

from sparse_bitnet.errors import UserError
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet.training.recipes import RECIPES


def main(arguments: list[str]) -> None:
    """Train, or continue the run in --out. `--recipe NAME` sets the defaults of all other options."""
    import tyro

    recipe, rest = split_recipe(arguments)
    config = tyro.cli(
        TrainConfig,
        default=RECIPES[recipe](),
        args=rest,
        prog="sparse-bitnet train",
        description=(
            f"Train, or continue the run in --out. Recipe in use: {recipe} "
            f"(--recipe {{{','.join(RECIPES)}}}); every option below overrides it."
        ),
    )
    run(config)


def split_recipe(arguments: list[str]) -> tuple[str, list[str]]:
    """Take `--recipe NAME` (or `--recipe=NAME`) out of the arguments."""
    rest, recipe = list(arguments), "default"
    for index, argument in enumerate(rest):
        if argument.startswith("--recipe="):
            recipe = argument.partition("=")[2]
            del rest[index]
            break
        if argument == "--recipe":
            recipe = rest[index + 1] if index + 1 < len(rest) else ""
            del rest[index : index + 2]
            break
    if recipe not in RECIPES:
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
    )
