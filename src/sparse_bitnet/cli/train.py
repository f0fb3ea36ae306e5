# SPDX-License-Identifier: Apache-2.0
"""`sparse-bitnet train`: a recipe plus overrides; `sparse-bitnet distill TEACHER OUT`: with a teacher."""

import dataclasses
import math
import os
import re
import shlex
import sys
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from sparse_bitnet.checkpoint.saved_steps import is_started
from sparse_bitnet.cli import arguments as options
from sparse_bitnet.cli.arguments import HIDDEN
from sparse_bitnet.errors import UserError
from sparse_bitnet.layer_config import DenseLayersOption, SparseBitConfig
from sparse_bitnet.presets import find_preset
from sparse_bitnet.training.config import TrainConfig, read_config
from sparse_bitnet.training.recipes import RECIPES
from sparse_bitnet.training.schedule import format_of


@dataclass(kw_only=True)
class Options(DenseLayersOption, TrainConfig):
    """A run's config, and how its processes share the work, which changes nothing of the run."""

    MOST_USED: ClassVar = (
        *("data", "out", "model", "init", "format", "steps", "batch_size", "sequence_length"),
        *("learning_rate", "device"),
    )
    GROUPS: ClassVar = {
        "teacher": "distillation",
        "seed": "data and seeds",
        "micro_batch_size": "optimiser",
        "precision": "precision and speed",
        "lora": "model",
        "forward": "precision and speed",
        "validation_every": "validation, checkpoints and logging",
        "dense_layers": "model",
        "chat": "data and seeds",
        "shard": "several processes",
    }

    chat: str | None = None
    """Conversations to train on: a source that `prepare --chat` reads. They are first prepared into the
    folder --data, with the pretrained model's tokenizer."""

    shard: int | None = None
    """Under torchrun: number of processes that share one copy of the model. With 8 processes, --shard 4
    makes two copies. Default: all processes, one copy."""

    timeout_seconds: float = 600.0
    """Under torchrun: seconds to wait for the other processes to finish a step before giving up."""

    def config(self) -> TrainConfig:
        """Return the config that is stored with the run."""
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(TrainConfig)}
        if self.dense_layers:
            values["format"] = str(self.with_dense_layers(self.format))
        return TrainConfig(**values)


@dataclass(kw_only=True)
class DistillOptions(Options):
    """The options of `train` that a student has, which starts from its teacher's weights."""

    teacher: Annotated[str | None, "TEACHER"] = None
    """Model to start from and to learn from: run, model folder, hub id or GGUF file of a causal LM."""

    out: Annotated[str, "OUT"] = "run"
    """Run folder. If it already holds a run of this config, training resumes."""

    init: str | None = None
    """Model to start from instead of TEACHER: a folder, hub id or GGUF file."""

    format: str = "auto"
    """Weight format and N:M pattern, for example ternary-6:8,quantizer=per-group:size=64. auto: ternary
    6:8 with group scales, blended in gradually (schedule=lambda) and, without --lora, in a rotated basis
    (activation=int8-hadamard)."""

    model: Annotated[str, HIDDEN] = TrainConfig.model
    initial_weights: Annotated[Literal["normal", "uniform"], HIDDEN] = "normal"

    def __post_init__(self) -> None:
        self.init = self.init or self.teacher
        super().__post_init__()


def main(arguments: list[str], kind: type[Options] = Options) -> None:
    """Train, or continue the run in --out: a run's own config is the default of its options."""
    recipe, rest = split_recipe(arguments)
    own_recipe = "distill" if kind is DistillOptions else "default"
    chosen = parse(rest, RECIPES[recipe or own_recipe](), recipe or own_recipe, kind)
    out = Path(chosen.out)
    if recipe is None and is_started(out):
        stored = dataclasses.replace(read_config(out), out=chosen.out)
        chosen = parse(rest, stored, f"that of {out}", kind)
    if chosen.format == "auto":
        chosen.format = student_format(chosen) if chosen.init else TrainConfig.format
    check_effect(chosen, rest)
    run(chosen)


def student_format(chosen: Options) -> str:
    """Return the format that cost least in `benchmarks/real_model.py`, fitted to a model: groups of 64
    weights and blocks of 64 inputs, or as many as divide the inputs of all converted layers."""
    from sparse_bitnet.checkpoint.open_checkpoint import find_checkpoint
    from sparse_bitnet.nn.convert import convert_, sparse_layers

    plain = chosen.with_dense_layers(TrainConfig.format)
    with warnings.catch_warnings(action="ignore"):  # training converts again
        layers = sparse_layers(convert_(find_checkpoint(str(chosen.init)).model, plain))
    shared = math.gcd(*(layer.in_features for layer in layers.values()))
    size = min(64, shared & -shared)
    scales = f"per-group:size={size}" if size >= 32 else "per-channel"
    basis = "" if chosen.lora else f"activation=int8-hadamard:block={size},"
    text = f"{TrainConfig.format},quantizer={scales},{basis}schedule=lambda"
    return str(SparseBitConfig.parse(text))


def distill(arguments: list[str]) -> None:
    """Train a student that starts from a teacher's weights and learns from its logits."""
    main(arguments, DistillOptions)


def parse(
    arguments: list[str], default: TrainConfig, recipe: str, kind: type[Options] = Options
) -> Options:
    """Return `default` with the options in the arguments applied, as options of `kind`."""
    verb, what, out = "train", "Train a model", "--out"
    if kind is DistillOptions:
        verb, what, out = "distill", "Train a ternary student of TEACHER in OUT", "OUT"
    return options.parse(
        kind,
        arguments,
        default=kind(**dataclasses.asdict(default)),
        prog=f"sparse-bitnet {verb}",
        others=["--recipe"],
        description=(
            f"{what}, or resume the run in {out} with its own config. Defaults below are those of the "
            f"recipe {recipe}; --recipe {{{','.join(RECIPES)}}} chooses another."
        ),
    )


def check_effect(chosen: Options, arguments: list[str]) -> None:
    """Raise `UserError` for an option among the arguments that others leave without effect."""
    given = {word.partition("=")[0] for word in arguments}
    init, lora, decay = chosen.init is not None, chosen.lora > 0, chosen.weight_decay > 0
    refused = {
        "--model": init and "--init names the model",
        "--initial-weights": init and "--init has weights",
        "--decay-fraction": chosen.schedule == "cosine" and "it is for --schedule wsd",
        "--decay-embeddings": (lora and "--lora trains none") or (not decay and "no weight decay"),
        "--final-weight-decay-fraction": not decay and "no weight decay",
        "--precision": (chosen.masters, chosen.precision) == ("bf16", "float32")
        and "--masters bf16 computes in bf16",
    }
    for option, why in refused.items():
        if why and option in given:
            raise UserError(f"{option} has no effect here ({why}): leave it out")


def split_recipe(arguments: list[str]) -> tuple[str | None, list[str]]:
    """Take `--recipe NAME` (or `--recipe=NAME`) out of the arguments; None when there is none."""
    rest = [part for word in arguments for part in re.split(r"(?<=^--recipe)=", word)]
    if "--recipe" not in rest:
        return None, rest
    place = rest.index("--recipe")
    recipe = "".join(rest[place + 1 : place + 2])
    if recipe not in RECIPES:
        raise UserError(f"--recipe {recipe!r}: choose one of {', '.join(RECIPES)}")
    return recipe, rest[:place] + rest[place + 2 :]


def run(chosen: Options) -> None:
    """Train with a progress line; the first process prints the result."""
    config = chosen.config()
    # Errors should come before the imports, which take seconds.
    format_of(config)
    if config.init is None:
        find_preset(config.model)
    if chosen.chat is not None:
        if config.init is None:
            raise UserError("--chat trains a pretrained model: name it with --init")
        if "RANK" in os.environ:
            raise UserError("--chat does not work under torchrun: run `prepare --chat` first")
        from sparse_bitnet.data.preparation import prepare
        from sparse_bitnet.data.sources import parse_source

        prepare(parse_source(chosen.chat, chat=True), config.data, tokenizer=config.init, chat=True)
    from rich.console import Console

    from sparse_bitnet.progress import Progress
    from sparse_bitnet.training.distributed import EXIT_CODE, ErrorElsewhere, ProcessLost
    from sparse_bitnet.training.metrics import METRICS_FILE, describe, read_rows
    from sparse_bitnet.training.trainer import train

    is_first = os.environ.get("RANK", "0") == "0"
    try:
        with Progress(Console(quiet=not is_first), plain_lines=20) as progress:
            line = progress.line(config.format, "steps")
            result = train(
                config,
                on_step=lambda row: line(row["step"], config.steps, text=describe(row)),
                on_sample=lambda row, text: progress.note(
                    f"after step {row['step']:,}: validation perplexity "
                    f"{row['validation_perplexity']:,.3f}, sample: {text}"
                ),
                progress=progress,
                shard=chosen.shard,
                timeout_seconds=chosen.timeout_seconds,
            )
    except ErrorElsewhere:
        sys.exit(2)
    except ProcessLost as lost:
        print(f"sparse-bitnet: {lost}", file=sys.stderr, flush=True)
        # A checkpoint in progress waits for the lost process and cannot be cancelled.
        os._exit(EXIT_CODE)
    except (MemoryError, RuntimeError, UserError) as error:
        is_memory = re.search("(allocate|out of|enough) memory", str(error))
        if not (is_memory or isinstance(error, MemoryError)):
            raise
        raise UserError("out of memory: lower --micro-batch-size or --sequence-length") from error
    if is_first:
        flips = "-" if result.flip_rate is None else f"{result.flip_rate:.2e}"
        print(
            f"{result.format}: validation perplexity {result.validation_perplexity:.3f} over "
            f"{result.validation_tokens:,} tokens after {result.steps:,} steps "
            f"({result.tokens:,} tokens); zero fraction {result.zero_fraction:.3f}, "
            f"last flip rate {flips}\nmodel: {config.out}/final   curves: {config.out}/metrics.jsonl"
        )
        if config.teacher is not None:
            first = next(iter(read_rows(Path(config.out) / METRICS_FILE)), {})
            perplexities = {
                "teacher's perplexity": first.get("teacher_perplexity"),
                "student's before training": first.get("validation_perplexity"),
                "student's now": result.validation_perplexity,
            }
            for name, value in perplexities.items():
                if value is not None:
                    print(f"{name:<26}{value:>14,.2f}")
            print("next:", *next_commands(config.out), sep="\n  sparse-bitnet ")


def next_commands(run: str) -> list[str]:
    """Return the commands that run, pack and export a finished run, of those that support its model."""
    from sparse_bitnet.checkpoint.open_checkpoint import open_checkpoint

    source, quoted = open_checkpoint(run), shlex.quote(run)
    commands = [f"generate {quoted} --prompt TEXT"]
    if source.not_linear:
        return commands
    with suppress(UserError):
        if source.format.weight == "ternary":
            source.ternary(next(iter(source.layers)))  # has scales that a packed folder can hold
            commands = [f"pack {quoted} PACKED", "generate PACKED --prompt TEXT"]
    if not source.format.variant("activation").has("transform"):
        commands.append(f"export {quoted} EXPORTED --to dense")
    return commands
