# SPDX-License-Identifier: Apache-2.0
"""How large an experiment is: models, tokens, seeds and text. Pure numbers, free of torch.

Everything else a run depends on is the same for all runs of a scale: that is what makes them
comparable, and `recipe` is where it stands.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from sparse_bitnet.errors import UserError
from sparse_bitnet.training import recipes
from sparse_bitnet.training.config import TrainConfig

DENSE_PATTERN = "8:8"
PAPER_SWEEP = ("8:8", "7:8", "6:8", "5:8", "2:4", "3:8", "2:8")
"""In the order of the paper's figure; 2:4 stands where 4:8 would, whose density it has."""


def four_formats(pattern: str) -> tuple[str, str, str, str]:
    """The paper's four models, in its order."""
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
    """Of the four models of table 2 at this size."""

    learning_rate: float | None = None
    """Of every run of this size but the search's and each model's own; None: the recipe's."""

    search: tuple[float, ...] = ()
    """Learning rates tried for each of the four models, the one they share among them; empty: none."""


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """What is trained on, as arguments of `sparse-bitnet prepare`."""

    source: str
    """Empty: text that whoever runs the scale has prepared."""

    vocab_size: int | None = None
    """Of a tokenizer trained on the text; None with `tokenizer`."""

    tokenizer: str | None = None
    """Folder or hub id of an existing tokenizer."""

    column: str | None = None
    limit_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Scale:
    """One size of the whole set of experiments."""

    name: str
    summary: str
    text: TextSource

    sizes: tuple[Size, ...]
    """The sizes of table 2, small to large."""

    main: str
    """The size (a model of `sizes`) of all other experiments; the paper's is its smallest, 0.5B."""

    seeds: Mapping[str, int]
    """Seeds of each other experiment; see `paper_runs.EXPERIMENTS`."""

    recipe: TrainConfig
    """What all runs share: batch, sequence length, learning rate and schedule, optimiser."""

    wider: int = 0
    """So many rates may be added on either side for a model whose best is the outermost one."""

    pattern: str = "6:8"
    """Of the sparse models of table 2."""

    dense_layers: tuple[str, ...] = ()
    """Layers that stay ordinary linear ones in all runs; see `SparseBitConfig`."""

    patterns: tuple[str, ...] = PAPER_SWEEP
    """Of the sweep, dense first."""

    sparse_percents: tuple[int, ...] = (0, 25, 50, 75, 100)
    """Of the dense-to-sparse schedules: share of sparse steps."""

    validations: int = 10
    """Points of each run's validation curve."""

    snapshots: int = 16
    """Points at which the weights of dense runs are looked at, besides the initial ones."""

    needs_gpu: bool = False

    size_by_size: bool = False
    """Whether all seeds of a size are trained before the next size."""

    plain_names: bool = False
    """Whether runs are named after seed and format alone, as one recipe allows."""

    workers: int | None = None
    """Runs trained at once; None: as many as there are cores for."""

    def size(self, model: str) -> Size:
        """The entry of `sizes` for a model."""
        return next(size for size in self.sizes if size.model == model)

    def learning_rate(self, model: str) -> float:
        """The one that the runs of a size share."""
        return self.size(model).learning_rate or self.recipe.learning_rate

    def __post_init__(self) -> None:
        assert self.size(self.main).learning_rate is None
        for size in self.sizes:
            assert not size.search or self.learning_rate(size.model) in size.search


def smoke() -> Scale:
    """Every experiment in seconds, for tests: the numbers mean nothing."""
    return Scale(
        name="smoke",
        summary="every experiment in seconds, to test the machinery; the numbers mean nothing",
        text=TextSource(source="python-stdlib", vocab_size=512, limit_bytes=400_000),
        sizes=(
            Size(model="qwen2.5-0.3m", steps=8, seeds=1, search=(3e-3, 6e-3)),
            Size(model="qwen2.5-0.5m", steps=8, seeds=1),
        ),
        main="qwen2.5-0.3m",
        seeds={"sweep": 1, "ablations": 1, "schedule": 1, "search": 1},
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
    """The whole set on two CPU cores, on text that every Python installation holds."""
    return Scale(
        name="cpu",
        summary="the whole set on 2 CPU cores in 1 to 2.5 hours, on Python's standard library",
        text=TextSource(source="python-stdlib", vocab_size=1024),
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
        wider=3,
    )


def cpu_paper() -> Scale:
    """The paper's tokens per block weight, 140, 38 and 18 for its three sizes, on English of one's own.

    Three seeds of qwen2.5-1m at the rate of all showed that this size needs some 45; those to
    come are of the rates that its search chose. The largest has the one that it chose for all models.
    Twenty-three seeds of qwen2.5-0.5m follow from its first five: a test by itself then sees two points.
    """
    return Scale(
        name="cpu-paper",
        summary="the paper's tokens per block weight (140, 38 and 18) at our three sizes and 18 at a "
        "fourth, on books; days of a core",
        text=TextSource(source="", vocab_size=1024),
        sizes=(
            Size(model="qwen2.5-0.3m", steps=13440, seeds=12, search=(3e-3, 6e-3, 1.2e-2)),
            Size(model="qwen2.5-0.5m", steps=6840, seeds=23, search=(3e-3, 6e-3)),
            Size(model="qwen2.5-1m", steps=6480, seeds=3, search=(1.5e-3, 3e-3, 6e-3)),
            Size(model="qwen2.5-3m", steps=21708, seeds=3, learning_rate=3e-3),
        ),
        main="qwen2.5-0.3m",
        seeds={
            "sweep": 5,
            "ablations": 5,
            "schedule": 5,
            "search": 1,
            "own-rates": 5,
            "recipe": 2,
            "near-zero": 1,
        },
        recipe=dataclasses.replace(cpu().recipe, learning_rate=6e-3, compile="on"),
        wider=3,
        size_by_size=True,
    )


def gpu() -> Scale:
    """The whole set on one H200 in 25 minutes, on the installed Python packages or a text folder.

    Models this small leave a GPU waiting for the next kernel most of the time, so four runs share it.
    """
    return Scale(
        name="gpu",
        summary="the whole set on one H200 in at most 25 minutes, on installed Python packages",
        text=TextSource(source="python-packages", vocab_size=8192),
        sizes=(
            Size(model="qwen2.5-3m", steps=1000, seeds=3, search=(1.5e-3, 3e-3, 6e-3)),
            Size(model="qwen2.5-10m", steps=1200, seeds=3),
            Size(model="qwen2.5-30m", steps=1500, seeds=1),
        ),
        main="qwen2.5-3m",
        seeds={"sweep": 3, "ablations": 3, "schedule": 3, "search": 1},
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
    """The paper's own sizes: about 50 B tokens of RefinedWeb for each of 18 models and more."""
    recipe = recipes.paper_tuned()
    sizes = ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b")
    return Scale(
        name="paper",
        summary="the paper's sizes, 50 B tokens each; look at the plan first (--dry-run)",
        text=TextSource(
            source="hub:tiiuae/falcon-refinedweb", tokenizer="Qwen/Qwen2.5-0.5B", column="content"
        ),
        sizes=tuple(Size(model=model, steps=recipe.steps, seeds=1) for model in sizes),
        main=sizes[0],
        seeds={"sweep": 1, "ablations": 1, "schedule": 1, "search": 0},
        recipe=recipe,
        validations=50,
        needs_gpu=True,
    )


SCALES = {scale.__name__.replace("_", "-"): scale for scale in (smoke, cpu, cpu_paper, gpu, paper)}


def find_scale(name: str) -> Scale:
    """Raises `UserError` for an unknown name."""
    if name not in SCALES:
        raise UserError(f"scale {name!r} is unknown: choose one of {', '.join(SCALES)}")
    return SCALES[name]()
