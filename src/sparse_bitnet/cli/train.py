# SPDX-License-Identifier: Apache-2.0
"""`sparse-bitnet train`: a recipe plus overrides; `sparse-bitnet distill TEACHER OUT`: with a teacher."""

import dataclasses
import itertools
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sparse_bitnet.cli import arguments as options
from sparse_bitnet.errors import UserError
from sparse_bitnet.layer_config import DenseLayersOption, SparseBitConfig
from sparse_bitnet.presets import find_preset
from sparse_bitnet.training.config import TrainConfig, read_config
from sparse_bitnet.training.recipes import RECIPES
from sparse_bitnet.training.schedule import format_of

if TYPE_CHECKING:
    from sparse_bitnet.training.run_folder import RunResult


PLAIN_LINES = 20
"""Lines a whole run prints where the output is not a terminal."""


@dataclass(kw_only=True)
class Options(DenseLayersOption, TrainConfig):
    """A run's config, and how its processes share the work, which changes nothing of the run."""

    chat: str | None = None
    """Conversations to train on, in a form that `prepare --chat` reads. They are prepared into --data
    first, with the tokenizer of --init."""

    shard: int | None = None
    """Under torchrun: processes that share one model copy; the others replicate it. Default: all."""

    timeout_seconds: float = 600.0
    """Under torchrun: seconds to wait for the others to finish a step before giving up."""

    def config(self) -> TrainConfig:
        """Return the config that is stored with the run."""
        fields = dataclasses.fields(TrainConfig)
        values = {field.name: getattr(self, field.name) for field in fields}
        if self.dense_layers:
            values["format"] = str(self.with_dense_layers(self.format))
        return TrainConfig(**values)


def main(arguments: list[str], prog: str = "sparse-bitnet train") -> None:
    """Train, or continue the run in --out: a run's own config is the default of its options."""
    recipe, rest = split_recipe(arguments)
    chosen = parse(rest, RECIPES[recipe or "default"](), recipe or "default", prog)
    out = Path(chosen.out)
    if recipe is None and os.path.isfile(out / "config.json"):  # False where it may not be read
        stored = dataclasses.replace(read_config(out), out=chosen.out)
        chosen = parse(rest, stored, f"that of {out}", prog)
    check_effect(chosen, rest)
    run(chosen)


def parse(
    arguments: list[str], default: TrainConfig, recipe: str, prog: str = "sparse-bitnet train"
) -> Options:
    """Return `default` with the options in the arguments applied."""
    return options.parse(
        Options,
        arguments,
        default=Options(**dataclasses.asdict(default)),
        prog=prog,
        others=["--recipe"],
        description=(
            "Train, or continue the run in --out (its config is then the default). Recipe in use: "
            f"{recipe} (--recipe {{{','.join(RECIPES)}}}); every option below overrides it."
        ),
    )


def check_effect(chosen: Options, arguments: list[str]) -> None:
    """Raise `UserError` for an option among the arguments that others leave without effect.

    One that a script may give to every run is named on stderr instead.
    """
    given = {_option(each) for each in arguments}
    init, lora, decay = chosen.init is not None, chosen.lora > 0, chosen.weight_decay > 0
    dense = SparseBitConfig.parse(chosen.format).pattern.is_dense
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    refused = {
        "--model": init and "--init names the model",
        "--initial-weights": init and "--init has weights",
        "--decay-fraction": chosen.schedule == "cosine" and "it is for --schedule wsd",
        "--decay-embeddings": (lora and "--lora trains none") or (not decay and "nothing decays"),
        "--final-weight-decay-fraction": not decay and "nothing decays",
        "--precision": (chosen.masters, chosen.precision) == ("bf16", "float32")
        and "--masters bf16 computes in bf16",
    }
    named = {
        "--seed": init
        and not lora
        and "only dropout, if any, is seeded; --data-seed orders the data",
        "--sparse-fraction": dense and f"no effect, {chosen.format} keeps every weight",
        "--gradient-reduction": alone and "no effect, one process sums no gradients",
        "--timeout-seconds": alone and "no effect, one process waits for no other",
    }
    for option, why in (refused | named).items():
        if why and option in given:
            if option in refused:
                raise UserError(f"{option} has no effect here ({why}): leave it out")
            print(f"sparse-bitnet: {option}: {why}", file=sys.stderr)


def split_recipe(arguments: list[str]) -> tuple[str | None, list[str]]:
    """Take `--recipe NAME` (or `--recipe=NAME`) out of the arguments; None when there is none."""
    rest = list(arguments)
    place = next((n for n, word in enumerate(rest) if _option(word) == "--recipe"), None)
    if place is None:
        return None, rest
    _, equals, recipe = rest.pop(place).partition("=")
    if not equals and place < len(rest):
        recipe = rest.pop(place)
    if recipe not in RECIPES:
        raise UserError(f"recipe {recipe!r} is unknown: choose one of {', '.join(RECIPES)}")
    return recipe, rest


def _option(word: str) -> str:
    return word.partition("=")[0].replace("_", "-")


def distill(arguments: list[str]) -> None:
    """Train a student that starts from a teacher's weights and learns from its logits."""
    named = list(itertools.takewhile(lambda word: not word.startswith("-"), arguments))
    rest = arguments[len(named) :]
    given = {_option(word) for word in rest}
    problem = ""
    if len(named) > 2:
        problem = f"unexpected argument {named[2]}"
    elif len(named) < 2 and given.isdisjoint(("-h", "--help")):
        missing = "OUT" if named else "TEACHER"
        problem = f"{missing} is missing: TEACHER and OUT come first, then the options"
    elif twice := given & {"--teacher", "--out"}:
        problem = f"TEACHER and OUT come first; leave {twice.pop()} out"
    if problem:
        raise UserError(f"distill: {problem}; see sparse-bitnet distill --help")
    is_new = not named[1:] or not os.path.isfile(os.path.join(named[1], "config.json"))
    if is_new and "--recipe" not in given:
        rest = ["--recipe", "distill", *rest]
    options = ("--teacher", "--out")[: len(named)]
    rest += [word for pair in zip(options, named, strict=True) for word in pair]
    if named and "--init" not in given:
        rest += ["--init", named[0]]
    main(rest, prog="sparse-bitnet distill TEACHER OUT")


def run(chosen: Options) -> None:
    """Train with a progress line; the first process prints the result."""
    config = chosen.config()
    # Refused before the imports, which take seconds.
    format_of(config)
    if config.init is None:
        find_preset(config.model)
    if chosen.chat is not None:
        prepare_chat(chosen.chat, config)
    from rich.console import Console

    from sparse_bitnet.progress import Progress
    from sparse_bitnet.training.distributed import EXIT_CODE, ErrorElsewhere, ProcessLost
    from sparse_bitnet.training.metrics import describe
    from sparse_bitnet.training.trainer import Interrupted, train

    is_first = os.environ.get("RANK", "0") == "0"
    try:
        with Progress(Console(quiet=not is_first), plain_lines=PLAIN_LINES) as progress:
            line = progress.line(config.format, "steps")
            result = train(
                config,
                on_step=lambda row: line(row["step"], config.steps, text=describe(row)),
                shard=chosen.shard,
                timeout_seconds=chosen.timeout_seconds,
            )
    except Interrupted as stop:
        if is_first:
            print(f"{stop}; the same command continues from there")
        sys.exit(130)
    except ErrorElsewhere:
        sys.exit(2)
    except ProcessLost as lost:
        print(f"sparse-bitnet: {lost}", file=sys.stderr, flush=True)
        # A checkpoint under way waits for the lost process, and cannot be called off.
        os._exit(EXIT_CODE)
    if is_first:
        print_result(result, config)


def prepare_chat(source: str, config: TrainConfig) -> None:
    """Prepare conversations into the folder of the data; again is harmless."""
    if config.init is None:
        raise UserError("--chat continues a model: name it with --init")
    if "RANK" in os.environ:
        raise UserError("--chat is of one process: prepare the data with `prepare --chat` first")
    from sparse_bitnet.data.preparation import prepare
    from sparse_bitnet.data.sources import parse_source

    prepare(parse_source(source, chat=True), config.data, tokenizer=config.init, chat=True)


def print_result(result: "RunResult", config: TrainConfig) -> None:
    """Print perplexity, sparsity, and where the files are."""
    flips = "-" if result.flip_rate is None else f"{result.flip_rate:.2e}"
    print(
        f"{result.format}: validation perplexity {result.validation_perplexity:.3f} over "
        f"{result.validation_tokens:,} tokens after {result.steps:,} steps "
        f"({result.tokens:,} tokens); zero fraction {result.zero_fraction:.3f}, "
        f"last flip rate {flips}\nmodel: {config.out}/final   curves: {config.out}/metrics.jsonl"
    )
