# SPDX-License-Identifier: Apache-2.0
"""What a quickstart trains, as a scale of the experiments. Free of torch, so that `--help` is quick."""

from dataclasses import dataclass

from sparse_bitnet.errors import UserError
from sparse_bitnet.layer_config import DenseLayersOption, SparseBitConfig
from sparse_bitnet.pattern import NMPattern
from sparse_bitnet.presets import find_preset
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet_paper.scales import Scale, Size, TextSource


@dataclass(kw_only=True)
class QuickstartConfig(DenseLayersOption):
    """Train the paper's four models on real text, compare them, and write a report."""

    out: str = "quickstart"
    """Folder of data, models, results and report. A stopped quickstart in it is continued."""

    steps: int = 500
    """Optimiser steps of each model. The defaults show a small model many tokens, three a weight: one
    that has seen few does not miss what the mask removes."""

    seeds: int = 1
    """Train this many seeds and report their spread; each takes as long again."""

    pattern: str = "6:8"
    """The N:M pattern of the sparse models."""

    model: str = "qwen2.5-0.3m"
    """Preset (`sparse-bitnet models` lists them)."""

    source: str = "python-stdlib"
    """Text to train on: python-stdlib, python-packages, a path or glob, or a hub data set."""

    vocab_size: int = 1024
    """Tokens of the byte-level BPE trained on that text."""

    batch_size: int = 8
    """Sequences per step."""

    sequence_length: int = 256
    """Tokens per sequence."""

    learning_rate: float = 3e-3
    """Peak learning rate of all four models."""

    workers: int | None = None
    """Models trained at once, one thread each. Default: one for each core."""

    prompt: str = "def read(self, "
    """What the sparse ternary model continues at the end."""

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise UserError(f"seeds={self.seeds}: must be at least 1")
        if self.workers is not None and self.workers < 1:
            raise UserError(f"workers={self.workers}: must be at least 1")
        self.scale()

    def scale(self) -> Scale:
        """The quickstart as a scale, whose table 2 it trains.

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
        format.converted(find_preset(self.model).linears, self.model)
        return Scale(
            name="quickstart",
            summary="the paper's four models in a few minutes",
            text=TextSource(source=self.source, vocab_size=self.vocab_size),
            sizes=(Size(model=self.model, steps=self.steps, seeds=self.seeds),),
            main=self.model,
            seeds={},
            recipe=recipe,
            pattern=self.pattern,
            dense_layers=self.dense_globs,
            patterns=(),
            sparse_percents=(),
            validations=4,
            snapshots=4,
            plain_names=True,
        )
