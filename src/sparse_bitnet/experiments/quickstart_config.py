"""Which runs a quickstart consists of. Free of torch, so that `--help` is quick."""

from dataclasses import dataclass
from pathlib import Path

from sparse_bitnet.errors import UserError
from sparse_bitnet.experiments.results import DENSE_PATTERN
from sparse_bitnet.training.config import TrainConfig


@dataclass(kw_only=True)
class QuickstartConfig:
    """Train the paper's four models on real text, compare them, and write a report."""

    out: str = "quickstart"
    """Folder of data, models, results and report. A stopped quickstart in it is continued."""

    steps: int = 1000
    """Optimiser steps of each model. The defaults show a small model many tokens, seven a weight: one
    that has seen few does not miss what the mask removes."""

    seeds: int = 1
    """Train so many seeds and report their spread; each takes as long again."""

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
        run_configs(self)


def formats(pattern: str) -> tuple[str, str, str, str]:
    """The paper's four models, in its order."""
    return (
        f"full-{DENSE_PATTERN}",
        f"full-{pattern}",
        f"ternary-{DENSE_PATTERN}",
        f"ternary-{pattern}",
    )


def run_folder(config: QuickstartConfig, format: str, seed: int) -> Path:
    """Where one model is trained; its `final` folder is the model in Hugging Face form."""
    return Path(config.out) / "runs" / f"seed-{seed}" / format.replace(":", "of")


def run_configs(config: QuickstartConfig) -> list[TrainConfig]:
    """Every run, seed by seed. Within a seed they differ in `format` and `out` only."""
    return [
        TrainConfig(
            model=config.model,
            format=format,
            data=str(Path(config.out) / "data"),
            out=str(run_folder(config, format, seed)),
            seed=seed,
            data_seed=seed,
            steps=config.steps,
            batch_size=config.batch_size,
            sequence_length=config.sequence_length,
            learning_rate=config.learning_rate,
            warmup_fraction=0.1,
            validation_tokens=0,
            threads=1,
            checkpoint_every=200,
            keep_checkpoints=1,
        )
        for seed in range(config.seeds)
        for format in formats(config.pattern)
    ]
