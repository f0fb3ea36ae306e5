# SPDX-License-Identifier: Apache-2.0
"""One run: trains it, and reduces it to a row, thinned curves and counts of its weights."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sparse_bitnet.checkpoint.load import from_pretrained, load_tokenizer
from sparse_bitnet.checkpoint.saved_steps import list_checkpoints
from sparse_bitnet.data.shards import TokenDataset
from sparse_bitnet.errors import UserError
from sparse_bitnet.evaluation.perplexity import perplexity
from sparse_bitnet.nn.layer import SparseBitConfig
from sparse_bitnet.pattern import NMPattern
from sparse_bitnet.presets import PRESETS, Shape
from sparse_bitnet.provenance import provenance
from sparse_bitnet.training import metrics
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet.training.device import resolve_device, resolve_dtype
from sparse_bitnet.training.model import initial_model
from sparse_bitnet.training.trainer import train
from sparse_bitnet_paper.results import CURVE_POINTS, Measured, Results
from sparse_bitnet_paper.runs import Run
from sparse_bitnet_paper.weight_counts import as_json, depth_parts, pool, shares
from sparse_bitnet_paper.weights import count_checkpoint, count_model

OnStep = Callable[[str, dict[str, Any]], None]
"""Called with a run's name and the `on_step` row of `train`."""


def train_and_measure(out: Path, data: Path, run: Run, on_step: OnStep) -> Measured:
    """Train one run and return its results, for the caller to add to the results in `out`.

    Raises the exceptions of `train`.
    """
    path = Results(out).run(run.name)
    config = dataclasses.replace(run.config, data=str(data), out=str(path))
    result = train(config, on_step=lambda row: on_step(run.name, row))
    steps = metrics.read_rows(path / metrics.METRICS_FILE)
    timing = metrics.read_rows(path / metrics.TIMING_FILE)
    # The paper's figure 7 counts this pattern's group thresholds on dense weights.
    pattern = NMPattern.parse(Results(out).setting["pattern"])
    final = count_checkpoint(path / "final", pattern=pattern)
    of_all = shares(pool(final))
    weights = weight_history(config, final, pattern) if run.is_dense else None
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.precision, device)
    model: Any = from_pretrained(path / "final")
    held_out = perplexity(
        model.to(device),
        TokenDataset.open(config.data, "validation"),
        context_length=config.sequence_length,
        batch_size=config.micro_batch_size or config.batch_size,
        device=device,
        dtype=dtype,
    )
    row = {
        "name": run.name,
        "model": config.model,
        "format": config.format,
        "seed": config.seed,
        "recipe": "",
        "steps": config.steps,
        "tokens": result.tokens,
        "epochs": result.tokens / len(TokenDataset.open(config.data, "train")),
        "tokens_per_weight": result.tokens / sum(each.numel() for each in model.parameters()),
        "perplexity": held_out.perplexity,
        "loss": held_out.mean_nll,
        "validation_tokens": held_out.tokens,
        "other_text": None,
        "training_loss": result.training_loss,
        "zero_fraction": result.zero_fraction,
        "code_zero_fraction": of_all["code_zero_fraction"],
        "near_zero_start": weights["overall"][0] if weights else None,
        "near_zero_mass": _short(of_all["near_zero_mass"]),
        "flip_rate": None if run.is_dense else result.flip_rate,
        "seconds": sum(step["seconds"] for step in timing),
        "tokens_per_second": statistics.median(step["tokens_per_second"] for step in timing),
        "product_share": None,
        "device": device.type,
        "precision": str(dtype).removeprefix("torch."),
        "checkpoint": f"runs/{run.name}/final",
        # Paths relative to the results file are equal on every machine.
        "config": dataclasses.asdict(run.config) | {"data": "data", "out": f"runs/{run.name}"},
        "provenance": provenance(),
    }
    return row, {"curves": thinned(steps), "weights": weights}


def thinned(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return metrics.jsonl averaged over at most `CURVE_POINTS` stretches of steps, and all validations.

    A stretch has its last step, the mean loss and, for a sparse model, the mean flip rate and its noise:
    the standard deviation around a slow trend, from the differences of consecutive steps.
    """
    steps = [row for row in rows if "loss" in row]
    width = max(1, math.ceil(len(steps) / CURVE_POINTS))
    result = []
    for start in range(0, len(steps), width):
        part = steps[start : start + width]
        row = {
            "step": part[-1]["step"],
            "loss": _short(statistics.fmean(step["loss"] for step in part)),
        }
        flips = [step["flip_rate"] for step in part if step["flip_rate"] is not None]
        if flips and any(flips):
            differences = np.diff(flips)
            noise = math.sqrt(float(np.mean(differences**2)) / 2) if len(flips) > 1 else 0.0
            row |= {"flip_rate": _short(statistics.fmean(flips)), "flip_noise": _short(noise)}
        result.append(row)
    for row in rows:
        if "validation_loss" in row:
            result.append({"step": row["step"], "validation_loss": _short(row["validation_loss"])})
    return sorted(result, key=lambda row: (row["step"], "validation_loss" in row))


def weight_history(config: TrainConfig, final: pd.DataFrame, pattern: NMPattern) -> dict[str, Any]:
    """Return near-zero mass of every layer over training, and the densities at the end.

    `near_zero_mass` is a list [steps][layers], `overall` that of all weights together; step 0 is the
    initial model. `final` holds counts by part of the depth; see `depth_parts`.
    """
    initial = initial_model(
        config,
        SparseBitConfig.parse(config.format),
        TokenDataset.open(config.data, "train"),
        load_tokenizer(Path(config.data) / "tokenizer"),
    )
    history = {0: count_model(initial, pattern=pattern)}
    for checkpoint in list_checkpoints(Path(config.out)):
        # A checkpoint saved on an interruption lies between the regular ones.
        if checkpoint.step % config.checkpoint_every == 0 and checkpoint.step < config.steps:
            history[checkpoint.step] = count_checkpoint(checkpoint.path, pattern=pattern)
    if lost := set(range(0, config.steps, config.checkpoint_every)) - history.keys():
        raise UserError(
            f"{config.out} lacks its checkpoint of step {min(lost)}: remove that folder"
        )
    history[config.steps] = final
    masses = {step: shares(layers)["near_zero_mass"] for step, layers in history.items()}
    return {
        "steps": list(history),
        "layers": list(final.name),
        "near_zero_mass": [[_short(mass, 4) for mass in own] for own in masses.values()],
        "overall": [_short(shares(pool(own))["near_zero_mass"]) for own in history.values()],
        "final": {name: as_json(part) for name, part in depth_parts(final).items()},
    }


def _short(value: float, digits: int = 6) -> float:
    return float(f"{value:.{digits}g}")


def trained_weights(shape: Shape, vocab_size: int | None) -> int:
    """Return the number of weights in the blocks' linears and the embedding."""
    return shape.block_weights + shape.hidden_size * (vocab_size or shape.vocab_size)


def flops(model: str, tokens: float, vocab_size: int | None) -> float:
    """Return the operations of training: 6 per weight and token, the tied head included. Masks are
    simulated, so all formats have the same number."""
    return 6.0 * tokens * trained_weights(PRESETS[model], vocab_size)
