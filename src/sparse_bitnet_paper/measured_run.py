# SPDX-License-Identifier: Apache-2.0
"""What a finished run is reduced to: one row, thinned curves, statistics of its weights."""

import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from sparse_bitnet.checkpoint.load import from_pretrained, load_tokenizer
from sparse_bitnet.checkpoint.saved_steps import list_checkpoints
from sparse_bitnet.data.shards import TokenDataset
from sparse_bitnet.evaluation.held_out import read_held_out
from sparse_bitnet.evaluation.perplexity import Perplexity, perplexity
from sparse_bitnet.nn.layer import SparseBitConfig
from sparse_bitnet.pattern import NMPattern
from sparse_bitnet.provenance import provenance
from sparse_bitnet.training import metrics
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet.training.device import resolve_device, resolve_dtype
from sparse_bitnet.training.initial_model import initial_model
from sparse_bitnet.training.train_run import RunResult
from sparse_bitnet_paper.result_row import ResultRow
from sparse_bitnet_paper.results import CURVE_POINTS, Results
from sparse_bitnet_paper.training_run import Run
from sparse_bitnet_paper.weight_statistics import WeightStatistics, pool
from sparse_bitnet_paper.weights import checkpoint_statistics, model_statistics


def measure(
    results: Results,
    run: Run,
    config: TrainConfig,
    result: RunResult,
    other_text: Path | None = None,
) -> ResultRow:
    """Write the curves and weight statistics of a finished run; returns its row.

    `config` is that of the run with the paths in use; `other_text` a file or glob of text. The
    perplexity is that of the whole validation text, in the compute type of the training.
    """
    path = Path(config.out)
    rows = metrics.read_rows(path / metrics.METRICS_FILE)
    timing = metrics.read_rows(path / metrics.TIMING_FILE)
    curves, weights = f"curves/{run.name}.jsonl", f"weights/{run.name}.json"
    results.write(curves, "".join(json.dumps(row) + "\n" for row in thinned(rows)))
    # Whose group thresholds are counted on dense weights (the paper's figure 7).
    pattern = NMPattern.parse(results.setting["pattern"])
    final = checkpoint_statistics(path / "final", pattern=pattern)
    if run.is_dense:
        results.write(weights, json.dumps(weight_history(config, final, pattern)) + "\n")
    whole = pool(final)
    held_out, other, parameters = _held_out(config, other_text)
    dataset = TokenDataset.open(config.data, "train")
    device = resolve_device(config.device)
    return ResultRow(
        experiment=results.setting["scale"],
        name=run.name,
        format=config.format,
        seed=config.seed,
        model=config.model,
        steps=config.steps,
        tokens=result.tokens,
        perplexity=held_out.perplexity,
        loss=held_out.mean_nll,
        validation_tokens=held_out.tokens,
        training_loss=cast(
            float, result.training_loss
        ),  # text has something to learn in every step
        zero_fraction=result.zero_fraction,
        flip_rate=result.flip_rate if not run.is_dense else None,
        seconds=sum(row["seconds"] for row in timing),
        checkpoint=f"runs/{run.name}/final",
        # Paths relative to the results file are equal on every machine.
        config={**dataclasses.asdict(run.config), "data": "data", "out": f"runs/{run.name}"},
        provenance=provenance(),
        curves=curves,
        weights=weights if run.is_dense else None,
        near_zero_mass=whole.near_zero_mass,
        code_zero_fraction=whole.code_zero_fraction,
        other_text=other,
        epochs=result.tokens / len(dataset),
        tokens_per_weight=result.tokens / parameters,
        tokens_per_second=statistics.median(row["tokens_per_second"] for row in timing),
        device=device.type,
        precision=str(resolve_dtype(config.precision, device)).removeprefix("torch."),
    )


def thinned(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl in at most `CURVE_POINTS` stretches of steps, and all validations.

    A stretch has its last step, the mean loss and, of a sparse model, the mean flip rate and its
    noise: the standard deviation around a slow trend, from the differences of consecutive steps.
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


def weight_history(
    config: TrainConfig, final: Sequence[WeightStatistics], pattern: NMPattern
) -> dict[str, Any]:
    """Near-zero mass of every layer over training, and the densities at the end.

    `near_zero_mass` is a list [steps][layers], `overall` that of all weights together; step 0 is the
    initial model. `final` holds histograms as counts of all layers, and of the middle and the last
    third of the blocks.
    """
    initial = initial_model(
        config,
        SparseBitConfig.parse(config.format),
        TokenDataset.open(config.data, "train"),
        load_tokenizer(Path(config.data) / "tokenizer"),
    )
    history = {0: model_statistics(initial, pattern=pattern)}
    for checkpoint in list_checkpoints(Path(config.out)):
        # One saved on an interruption lies between the regular ones.
        regular = checkpoint.step % config.checkpoint_every == 0
        if regular and checkpoint.step < config.steps:
            history[checkpoint.step] = checkpoint_statistics(checkpoint.path, pattern=pattern)
    history[config.steps] = list(final)
    return {
        "steps": list(history),
        "layers": [layer.name for layer in final],
        "near_zero_mass": [
            [_short(layer.near_zero_mass, 4) for layer in layers] for layers in history.values()
        ],
        "overall": [_short(pool(layers).near_zero_mass) for layers in history.values()],
        "final": {part: pool(layers).to_dict() for part, layers in depth_parts(final).items()},
    }


def depth_parts(layers: Sequence[WeightStatistics]) -> dict[str, list[WeightStatistics]]:
    """All layers, those of the middle third of the blocks ("mid") and of the last third ("late")."""
    blocks = 1 + max(layer.block or 0 for layer in layers)

    def between(low: float, high: float) -> list[WeightStatistics]:
        return [x for x in layers if low <= ((x.block or 0) + 0.5) / blocks < high]

    parts = {"all": list(layers), "mid": between(1 / 3, 2 / 3), "late": between(2 / 3, 1)}
    return {name: part for name, part in parts.items() if part}


def _held_out(
    config: TrainConfig, other_text: Path | None
) -> tuple[Perplexity, dict[str, Any] | None, int]:
    """Perplexity over the whole validation text and over another, and the number of weights."""
    device = resolve_device(config.device)
    final = Path(config.out) / "final"
    model: Any = from_pretrained(final)
    model.to(device)
    measure_one = partial(
        perplexity,
        model,
        context_length=config.sequence_length,
        batch_size=config.micro_batch_size or config.batch_size,
        device=device,
        dtype=resolve_dtype(config.precision, device),
    )
    other = None
    if other_text is not None:
        found = measure_one(read_held_out(other_text, str(final)).tokens)
        other = {
            "name": other_text.name,
            "tokens": found.tokens,
            "perplexity": found.perplexity,
        }
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return measure_one(TokenDataset.open(config.data, "validation")), other, parameters


def _short(value: float, digits: int = 6) -> float:
    return float(f"{value:.{digits}g}")
