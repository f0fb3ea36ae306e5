# SPDX-License-Identifier: Apache-2.0
"""Scales: models, tokens, seeds and text of a whole set of experiments. Free of torch and pandas.

Everything else that a run depends on is in `recipe`, the same for all runs of a scale.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from sparse_bitnet.errors import UserError, check_least
from sparse_bitnet.layer_config import DenseLayersOption, SparseBitConfig
from sparse_bitnet.pattern import NMPattern
from sparse_bitnet.presets import find_preset
from sparse_bitnet.training import recipes
from sparse_bitnet.training.config import TrainConfig

DENSE_PATTERN = "8:8"
PAPER_SWEEP = ("8:8", "7:8", "6:8", "5:8", "2:4", "3:8", "2:8")
"""Patterns of the paper's figure, in its order; 2:4 replaces 4:8, which has the same density."""


def four_formats(pattern: str) -> tuple[str, str, str, str]:
    """Return the formats of the paper's four models, in its order."""
    return (
        f"full-{DENSE_PATTERN}",
        f"full-{pattern}",
        f"ternary-{DENSE_PATTERN}",
        f"ternary-{pattern}",
    )


@dataclass(frozen=True, kw_only=True)
class Size:
    """One model size of a scale and how long it is trained."""

    model: str
    """Preset name."""

    steps: int
    """Optimiser steps of every run of this size."""

    seeds: int
    """Seeds of the four models of table 2 at this size."""

    search: tuple[float, ...] = ()
    """Learning rates that the search tries for each of the four models; empty: no search."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Models, text and recipe of the whole set of experiments, at one budget."""

    name: str
    summary: str
    text: Mapping[str, Any]
    """Training text as arguments of `prepare`: source, vocab_size or tokenizer, column, limit_bytes."""

    sizes: tuple[Size, ...]
    """The sizes of table 2, small to large."""

    main: str
    """The size (a model of `sizes`) of all other experiments; the paper's is its smallest, 0.5B."""

    seeds: Mapping[str, int]
    """Number of seeds of each other experiment; see `runs.EXPERIMENTS`."""

    recipe: TrainConfig
    """Settings that all runs share: batch, sequence length, learning rate and schedule, optimiser."""

    pattern: str = "6:8"
    """Pattern of the sparse models of table 2."""

    dense_layers: tuple[str, ...] = ()
    """Layers that stay ordinary linear layers in all runs; see `SparseBitConfig`."""

    patterns: tuple[str, ...] = PAPER_SWEEP
    """Patterns of the sweep, dense first."""

    sparse_percents: tuple[int, ...] = (0, 25, 50, 75, 100)
    """Shares of sparse steps of the dense-to-sparse schedules."""

    validations: int = 10
    """Points of each run's validation curve."""

    snapshots: int = 16
    """Points of training at which the weights of dense runs are measured, besides the initial ones."""

    needs_gpu: bool = False
    """Whether it is only planned, not trained, on a machine without a GPU."""

    workers: int | None = None
    """Runs trained at once; None: as many as there are cores for."""


def smoke() -> Scale:
    """Return a scale that runs every experiment in seconds, for tests: the numbers mean nothing."""
    return Scale(
        name="smoke",
        summary="every experiment in seconds, to test the machinery; the numbers mean nothing",
        text={"source": "python-stdlib", "vocab_size": 512, "limit_bytes": 400_000},
        sizes=(
            Size(model="qwen2.5-0.3m", steps=8, seeds=1, search=(3e-3, 6e-3)),
            Size(model="qwen2.5-0.5m", steps=8, seeds=1),
        ),
        main="qwen2.5-0.3m",
        seeds={"sweep": 1, "ablations": 1, "schedule": 1, "search": 1, "ideas": 1},
        recipe=TrainConfig(
            batch_size=8,
            sequence_length=32,
            learning_rate=3e-3,
            validation_tokens=512,
            layer_metrics_every=0,
            threads=1,
        ),
        patterns=("8:8", "6:8", "2:4"),
        sparse_percents=(0, 50, 100),
        validations=2,
        snapshots=2,
    )


def cpu() -> Scale:
    """Return the whole set for two CPU cores, on text that every Python installation holds."""
    return Scale(
        name="cpu",
        summary="the whole set on 2 CPU cores in 1 to 2.5 hours, on Python's standard library",
        text={"source": "python-stdlib", "vocab_size": 1024},
        sizes=(
            Size(model="qwen2.5-0.3m", steps=750, seeds=3, search=(1.5e-3, 3e-3, 6e-3)),
            Size(model="qwen2.5-0.5m", steps=900, seeds=3),
            Size(model="qwen2.5-1m", steps=1150, seeds=3),
        ),
        main="qwen2.5-0.3m",
        seeds={"sweep": 3, "ablations": 3, "schedule": 3, "search": 1, "ideas": 3},
        recipe=TrainConfig(
            batch_size=8,
            sequence_length=256,
            learning_rate=3e-3,
            warmup_fraction=0.1,
            validation_tokens=32768,
            layer_metrics_every=0,
            threads=1,
            compile="off",
        ),
    )


def gpu() -> Scale:
    """Return the whole set for one H200 (25 minutes), on the installed Python packages or a text folder.

    Four runs share the GPU, since models this small leave it waiting for the next kernel.
    """
    return Scale(
        name="gpu",
        summary="the whole set on one H200 in at most 25 minutes, on installed Python packages",
        text={"source": "python-packages", "vocab_size": 8192},
        sizes=(
            Size(model="qwen2.5-3m", steps=1000, seeds=3, search=(1.5e-3, 3e-3, 6e-3)),
            Size(model="qwen2.5-10m", steps=1200, seeds=3),
            Size(model="qwen2.5-30m", steps=1500, seeds=1),
        ),
        main="qwen2.5-3m",
        seeds={"sweep": 3, "ablations": 3, "schedule": 3, "search": 1, "ideas": 1},
        recipe=TrainConfig(
            batch_size=64,
            sequence_length=512,
            learning_rate=3e-3,
            warmup_fraction=0.1,
            precision="bf16",
            device="cuda",
            loss_chunk_tokens=32768,
            validation_tokens=262144,
            layer_metrics_every=0,
            threads=4,
        ),
        workers=4,
        needs_gpu=True,
    )


def paper() -> Scale:
    """Return the paper's own sizes: about 50 B tokens of RefinedWeb for each of more than 18 models."""
    recipe = recipes.paper_tuned()
    sizes = ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b")
    return Scale(
        name="paper",
        summary="the paper's sizes, 50 B tokens each; look at the plan first (--dry-run)",
        text={
            "source": "hub:tiiuae/falcon-refinedweb",
            "tokenizer": "Qwen/Qwen2.5-0.5B",
            "column": "content",
        },
        sizes=tuple(Size(model=model, steps=recipe.steps, seeds=1) for model in sizes),
        main=sizes[0],
        seeds={"sweep": 1, "ablations": 1, "schedule": 1, "search": 0, "ideas": 1},
        recipe=recipe,
        validations=50,
        needs_gpu=True,
    )


SCALES = {scale.__name__: scale for scale in (smoke, cpu, gpu, paper)}


def find_scale(name: str) -> Scale:
    """Return the scale of a name. Raises `UserError` for an unknown one."""
    if name not in SCALES:
        raise UserError(f"scale {name!r} is unknown: choose one of {', '.join(SCALES)}")
    return SCALES[name]()


@dataclass(kw_only=True)
class QuickstartConfig(DenseLayersOption):
    """Train the paper's four models (full-precision or ternary, dense or sparse) on real text, compare
    their perplexity, and write a report. The same command resumes a stopped quickstart."""

    GROUPS: ClassVar = {"dense_layers": "recipe", "out": "", "vocab_size": "recipe", "workers": ""}

    out: str = "quickstart"
    """Folder for data, models, results and report."""

    steps: int = 500
    """Number of optimiser steps per model. The default is about three tokens per weight; with far fewer,
    sparsity costs nothing yet."""

    seeds: int = 1
    """Number of seeds; several show the spread, and each adds the same time."""

    pattern: str = "6:8"
    """N:M pattern of the sparse models."""

    model: str = "qwen2.5-0.3m"
    """Preset name (`sparse-bitnet models` lists them)."""

    source: str = "python-stdlib"
    """Text to train on: python-stdlib, python-packages, a path or glob, or a hub data set."""

    vocab_size: int = 1024
    """Number of tokens of the byte-level BPE tokenizer trained on that text."""

    batch_size: int = 8
    """Sequences per optimiser step."""

    sequence_length: int = 256
    """Tokens per sequence."""

    learning_rate: float = 3e-3
    """Peak learning rate of all four models."""

    workers: int | None = None
    """Number of models trained at the same time, one thread each. Default: one for each core."""

    prompt: str = "def read(self, "
    """Text that the sparse ternary model continues at the end."""

    def __post_init__(self) -> None:
        check_least(self, seeds=1, workers=1)
        self.pattern = self.scale().pattern

    def scale(self) -> Scale:
        """Return the quickstart as a scale, whose table 2 it trains.

        Raises `UserError` for what would only fail at the second model, a minute later.
        """
        pattern = NMPattern.parse(self.pattern)
        if pattern.is_dense:
            raise UserError(f"pattern={self.pattern} is dense; choose one that prunes, like 6:8")
        recipe = TrainConfig(
            model=self.model,
            steps=self.steps,
            batch_size=self.batch_size,
            sequence_length=self.sequence_length,
            learning_rate=self.learning_rate,
            warmup_fraction=0.1,
            validation_tokens=16384,
            layer_metrics_every=0,
            threads=1,
        )
        format = SparseBitConfig(pattern=pattern, dense_layers=self.dense_globs)
        linears = find_preset(self.model).linears
        format.check_dense_layers(linears, self.model)
        for name, (_, in_features) in linears.items():
            if not format.keeps_dense(name):
                pattern.check_divides(in_features, f"{name} of {self.model}")
        return Scale(
            name="quickstart",
            summary="the paper's four models in a few minutes",
            text={"source": self.source, "vocab_size": self.vocab_size},
            sizes=(Size(model=self.model, steps=self.steps, seeds=self.seeds),),
            main=self.model,
            seeds={},
            recipe=recipe,
            pattern=str(pattern),
            dense_layers=self.dense_globs,
            patterns=(),
            sparse_percents=(),
            validations=4,
            snapshots=4,
        )
