# SPDX-License-Identifier: Apache-2.0
"""Perplexity of a teacher, of its naive conversion, of fine-tuning and of distillation, in equal tokens.

    python benchmarks/distill.py OUT/model OUT/data RUNS      # OUT is of examples/stories260k.py
    python benchmarks/distill.py RUN/final DATA RUNS --own --steps 200

The second is of a full-precision model of one's own, such as `reproduce --scale cpu` trains.
A row is added to benchmarks/results/ when it is measured, seed by seed; `--one-shot` measures what
calibration text prunes without training.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from recorded import record

from sparse_bitnet.checkpoint.build_model import build_model
from sparse_bitnet.checkpoint.load import from_pretrained
from sparse_bitnet.data.loader import TokenLoader
from sparse_bitnet.data.shards import TokenDataset
from sparse_bitnet.layer_config import SparseBitConfig
from sparse_bitnet.nn.convert import convert_
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet.training.loss import SummedLoss, held_out_windows, validation_loss
from sparse_bitnet.training.trainer import train

PATTERNS = ("8:8", "6:8", "2:4")
SEEDS = 3
ONE_SHOT = (
    "full-6:8",
    "full-6:8,score=wanda",
    "full-2:4",
    "full-2:4,score=wanda",
    "ternary-6:8,score=wanda",
)


def perplexity(model: Any, config: TrainConfig) -> float:
    """Return the perplexity of the run's held-out text."""
    cpu = torch.device("cpu")
    loss, held_out = SummedLoss(model), held_out_windows(config)
    mean, _ = validation_loss(loss, config, held_out, device=cpu, dtype=torch.float32)
    return float(torch.tensor(mean).exp())


def calibrated(config: TrainConfig) -> float:
    """Return the one-shot result: masks from 64 windows of training text."""
    loader = TokenLoader(TokenDataset.open(config.data), sequence_length=128, batch_size=8, seed=0)
    model = from_pretrained(config.init, dtype=torch.float32)
    batches = (loader.batch(step)[0] for step in range(8))
    return perplexity(
        convert_(model, SparseBitConfig.parse(config.format), calibration=batches), config
    )


def rows(
    base: dict[str, Any], teacher: str, runs: Path, one_shot: bool
) -> Iterator[dict[str, Any]]:
    """Measure each method in turn; yield one result row each."""
    for format in ONE_SHOT if one_shot else ():
        config = TrainConfig(**base, init=teacher, format=format)
        yield {"method": "one-shot", "format": format, "perplexity": calibrated(config)}
    if one_shot:
        return
    config = TrainConfig(**base)
    model = from_pretrained(teacher, dtype=torch.float32)
    yield {"method": "teacher", "format": "full-8:8", "perplexity": perplexity(model, config)}
    formats = [f"ternary-{pattern}" for pattern in PATTERNS]
    for format in formats:
        model = build_model("", SparseBitConfig.parse(format), init=teacher)
        yield {"method": "conversion", "format": format, "perplexity": perplexity(model, config)}
    for seed in range(SEEDS):
        for format in formats:
            for method, by in (("fine-tuning", None), ("distillation", teacher)):
                name = f"{method}-{format.replace(':', 'of')}-{seed}"
                config = TrainConfig(
                    **base,
                    init=teacher,
                    teacher=by,
                    format=format,
                    reconstruction_windows=0 if by else None,
                    data_seed=seed,
                    out=str(runs / name),
                )
                result = train(config)
                yield {
                    "method": method,
                    "format": format,
                    "seed": seed,
                    "perplexity": result.validation_perplexity,
                }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("teacher")
    parser.add_argument("data")
    parser.add_argument("runs", type=Path)
    parser.add_argument("--own", action="store_true", help="the teacher is a model of one's own")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--one-shot", action="store_true", help="only the rows without training")
    options = parser.parse_args()
    base = dict(
        data=options.data,
        steps=options.steps,
        batch_size=8,
        sequence_length=128,
        learning_rate=3e-3,
        warmup_fraction=0.1,
        weight_decay=0.01,
        validation_tokens=16384,
        layer_metrics_every=0,
        checkpoint_every=0,
        threads=1,
    )
    for row in rows(base, options.teacher, options.runs, options.one_shot):
        tokens = options.steps * 8 * 128 if "seed" in row else 0
        record("distill-own" if options.own else "distill", [{**row, "tokens": tokens}])
        print(row, flush=True)


if __name__ == "__main__":
    main()
