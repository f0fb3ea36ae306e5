# SPDX-License-Identifier: Apache-2.0
"""Runs beside the paper's own: learning rates, its published recipe, near-zero mass, ideas."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from sparse_bitnet_paper.scales import Scale, Size, four_formats
from sparse_bitnet_paper.training_run import Run, run_of

Losses = Mapping[str, float]
"""Held-out losses of finished runs by name."""

NO_LOSSES: Losses = {}
_PUBLISHED_BATCH = 512

IDEAS = {
    "the paper's": "ternary-6:8",
    "score wanda": "ternary-6:8,score=wanda",
    "score sr-ste": "ternary-6:8,score=sr-ste",
    "score s-ste": "ternary-6:8,score=s-ste",
    "score random": "ternary-6:8,score=random",
    "quantizer absmax": "ternary-6:8,quantizer=absmax",
    "quantizer per-channel": "ternary-6:8,quantizer=per-channel",
    "quantizer per-group of 32": "ternary-6:8,quantizer=per-group:size=32",
    "quantizer twn": "ternary-6:8,quantizer=twn",
    "quantizer binary": "ternary-6:8,quantizer=binary",
    "quantizer binary at 3:4": "ternary-3:4,quantizer=binary",
    "activation int4-hadamard": "ternary-6:8,activation=int4-hadamard",
    "activation none": "ternary-6:8,activation=none",
    "schedule dense-to-sparse, half": "ternary-6:8,schedule=dense-to-sparse:rho=0.5",
    "schedule gradual": "ternary-6:8,schedule=gradual",
    "schedule lambda": "ternary-6:8,schedule=lambda",
}
"""Everything built in that the paper does not use, one at a time."""


def search(scale: Scale, losses: Losses = NO_LOSSES) -> list[Run]:
    """The four models at other learning rates, for each as far as its best is not the outermost."""
    return [
        _at_rate(scale, size.model, format, rate, seed)
        for size in scale.sizes
        for seed in range(scale.seeds["search"])
        for format in four_formats(scale.pattern)
        for rate in _rates(scale, size, format, losses)[0]
    ]


def own_rates(scale: Scale, losses: Losses = NO_LOSSES) -> list[Run]:
    """Table 2 with each of the four models at its own best rate, and all at the one that is best for them
    together, at the sizes of the search; after it."""
    runs = []
    for size in scale.sizes:
        chosen = _chosen(scale, size, losses)
        rates = {
            f: (_rates(scale, size, f, losses)[1], chosen) for f in four_formats(scale.pattern)
        }
        runs += [
            _at_rate(scale, size.model, format, rate, seed)
            for seed in range(scale.seeds.get("own-rates", 0))
            for format, both in rates.items()
            for rate in both
            if rate is not None
        ]
    return runs


def recipe(scale: Scale, losses: Losses = NO_LOSSES) -> list[Run]:
    """The four models with what the published code does otherwise, one thing at a time."""
    ours = dataclasses.asdict(scale.recipe)
    return [
        run_of(scale, scale.main, format, seed, f"recipe, {name}", **changes)
        for seed in range(scale.seeds.get("recipe", 0))
        for name, changes in published_recipe(ours, scale.size(scale.main).steps).items()
        for format in four_formats(scale.pattern)
    ]


def published_recipe(ours: Mapping[str, Any], steps: int) -> dict[str, dict[str, Any]]:
    """By name the fields in which the published code's training differs from ours, of this many steps."""
    batch = ours["batch_size"]
    return {
        f"{_PUBLISHED_BATCH} sequences a step": {
            "batch_size": _PUBLISHED_BATCH,
            "micro_batch_size": batch,
            "steps": steps * batch // _PUBLISHED_BATCH,
        },
        "end rate 1e-5": {"final_learning_rate_fraction": 1e-5 / ours["learning_rate"]},
        "weight decay falling to 0": {"final_weight_decay_fraction": 0.0},
        "bf16 masters": {"masters": "bf16"},
        "uniform initial weights": {"initial_weights": "uniform"},
    }


def near_zero(scale: Scale, losses: Losses = NO_LOSSES) -> list[Run]:
    """The dense models from both initial distributions at every rate: where near-zero mass falls."""
    rates = scale.size(scale.main).search
    return [
        run_of(
            scale,
            scale.main,
            format,
            seed,
            f"near-zero mass, {initial}, {rate:g}",
            learning_rate=rate,
            initial_weights=initial,
        )
        for seed in range(scale.seeds.get("near-zero", 0))
        for initial in ("normal", "uniform")
        for rate in (rates[0] / 10, *rates)
        for format in ("full-8:8", "ternary-8:8")
    ]


def ideas(scale: Scale, losses: Losses = NO_LOSSES) -> list[Run]:
    """Each score, quantiser, activation and schedule against the paper's; no part of its own set."""
    return [
        run_of(scale, scale.main, format, seed, f"idea, {name}")
        for seed in range(scale.seeds.get("ideas", 1))
        for name, format in IDEAS.items()
    ]


def _at_rate(scale: Scale, model: str, format: str, rate: float, seed: int) -> Run:
    return run_of(scale, model, format, seed, f"search, {rate:g}", learning_rate=rate)


def _chosen(scale: Scale, size: Size, losses: Losses) -> float | None:
    """The rate that is best for the four models together; None before all have been tried."""
    tried = [_rates(scale, size, format, losses) for format in four_formats(scale.pattern)]
    if any(best is None for _, best in tried):
        return None
    found = {}
    for rate in sorted(set.intersection(*(set(rates) for rates, _ in tried))):
        names = [_at_rate(scale, size.model, f, rate, 0).name for f in four_formats(scale.pattern)]
        found[rate] = sum(losses[name] for name in names)
    return min(found, key=lambda rate: found[rate], default=None)


def _rates(
    scale: Scale, size: Size, format: str, losses: Losses
) -> tuple[list[float], float | None]:
    """Rates to try for a format, ascending, and the best of them; None before all have been tried."""
    rates = sorted(size.search)
    for added in range(scale.wider + 1):
        names = [_at_rate(scale, size.model, format, rate, 0).name for rate in rates]
        known = [losses[name] for name in names if name in losses]
        if not rates or len(known) < len(rates):
            break
        best = known.index(min(known))
        if 0 < best < len(rates) - 1 or added == scale.wider:
            return rates, rates[best]
        rates = [rates[0] / 2, *rates] if best == 0 else [*rates, 2 * rates[-1]]
    return rates, None
