# SPDX-License-Identifier: Apache-2.0
"""The paper's tables and figures as lists of complete runs. Free of torch.

Within one experiment runs differ in the format (or its schedule) alone: learning rate, steps, order of
the batches and initial weights are those of the scale and the seed.
"""

import dataclasses
from collections.abc import Callable, Sequence

from sparse_bitnet.errors import UserError
from sparse_bitnet_paper.rate_runs import (
    NO_LOSSES,
    Losses,
    ideas,
    near_zero,
    own_rates,
    recipe,
    search,
)
from sparse_bitnet_paper.scales import Scale, four_formats
from sparse_bitnet_paper.training_run import Run, run_of

ABLATIONS = {
    "baseline": "ternary-6:8",
    "mask without grad": "ternary-6:8,mask_gradient=masked",
    "mask from quantized weight": "ternary-6:8,mask_source=ternary",
    "sparse before quant": "ternary-6:8,scale_source=masked",
}
"""The paper's names of its four variants (figure 4), and their formats."""


def table2(scale: Scale, losses: Losses = NO_LOSSES) -> list[Run]:
    """Perplexity of the four models at each size (table 2); also what tables 1 and 4.4 look at."""
    return [
        run_of(scale, size.model, format, seed, f"table 2, {format} at {size.model}")
        for size in sorted(scale.sizes, key=lambda size: size.model != scale.main)
        for seed in range(size.seeds)
        for format in four_formats(scale.pattern)
    ]


def sweep(scale: Scale, losses: Losses = NO_LOSSES) -> list[Run]:
    """Perplexity over N:8 for both formats (figure 2, appendix table of raw perplexities)."""
    return [
        run_of(scale, scale.main, f"{weight}-{pattern}", seed, f"sweep, {pattern}")
        for seed in range(scale.seeds["sweep"])
        for pattern in scale.patterns
        for weight in ("full", "ternary")
    ]


def ablations(scale: Scale, losses: Losses = NO_LOSSES) -> list[Run]:
    """Validation perplexity and flip rate of the four training designs (figure 4)."""
    return [
        run_of(scale, scale.main, format, seed, f"ablation, {name}")
        for seed in range(scale.seeds["ablations"])
        for name, format in ABLATIONS.items()
    ]


def schedule(scale: Scale, losses: Losses = NO_LOSSES) -> list[Run]:
    """Dense-to-sparse training: only the last rho percent of the steps are sparse (table 4)."""
    runs = []
    for seed in range(scale.seeds["schedule"]):
        for percent in scale.sparse_percents:
            format = "ternary-6:8" if percent else "ternary-8:8"
            fraction = percent / 100 if percent else 1.0
            purpose = f"schedule, {percent} % of the steps sparse"
            runs.append(run_of(scale, scale.main, format, seed, purpose, sparse_fraction=fraction))
    return runs


def mask_source(scale: Scale, losses: Losses = NO_LOSSES) -> list[Run]:
    """Mask from master weights against mask from ternary codes (section 4.3)."""
    return [
        run_of(scale, scale.main, format, seed, f"mask source, {format}")
        for seed in range(scale.seeds["ablations"])
        for format in (ABLATIONS["baseline"], ABLATIONS["mask from quantized weight"])
    ]


def analyses(scale: Scale, losses: Losses = NO_LOSSES) -> list[Run]:
    """Dense models whose weights are looked at during training (heat maps, histograms, thresholds)."""
    return [
        run_of(scale, size.model, format, seed, f"analysis, {format}")
        for size in scale.sizes
        for seed in range(size.seeds)
        for format in ("full-8:8", "ternary-8:8")
    ]


EXPERIMENTS: dict[str, Callable[..., list[Run]]] = {
    "table2": table2,
    "sweep": sweep,
    "ablations": ablations,
    "schedule": schedule,
    "mask-source": mask_source,
    "analyses": analyses,
    "search": search,
    "own-rates": own_rates,
    "recipe": recipe,
    "near-zero": near_zero,
}
"""By the name used on the command line; of a scale and the losses there are already. Table 1 scores the
models of table 2 and trains none."""

BESIDE_THE_PAPER: dict[str, Callable[..., list[Run]]] = {"ideas": ideas}
"""Run where they are named alone, and not with `all`."""

_ALL = EXPERIMENTS | BESIDE_THE_PAPER


def plan(
    scale: Scale,
    experiments: Sequence[str],
    seeds: int | None = None,
    losses: Losses | None = None,
) -> list[Run]:
    """All runs of some experiments, each once, in the order in which to train them.

    `losses` are those of finished runs by name: from them follows which runs a search still lacks.

    Seed 0 of everything comes first, and within a seed the main size, so that a set that was cut
    short is still a whole one at fewer seeds; or (`size_by_size`) all seeds of the main size, then
    those of the largest. `seeds` replaces every number of seeds of the scale.

    Raises `UserError` for an unknown experiment.
    """
    if unknown := [name for name in experiments if name not in _ALL]:
        raise UserError(f"experiment {unknown[0]!r} is unknown: choose one of {', '.join(_ALL)}")
    if seeds is not None:
        scale = with_seeds(scale, seeds)
    runs: dict[str, Run] = {}
    for name in experiments:
        for run in _ALL[name](scale, losses or {}):
            runs.setdefault(run.name, run)
    sizes = [size.model for size in scale.sizes]

    def order(run: Run) -> tuple[int, ...]:
        place, other = sizes.index(run.config.model), run.config.model != scale.main
        return (other, -place, run.config.seed) if scale.size_by_size else (run.config.seed, other)

    return sorted(runs.values(), key=order)


def with_seeds(scale: Scale, seeds: int) -> Scale:
    """The scale with that many seeds of every experiment. Raises `UserError` below 1."""
    if seeds < 1:
        raise UserError(f"seeds={seeds}: at least 1")
    sizes = tuple(dataclasses.replace(size, seeds=seeds) for size in scale.sizes)
    return dataclasses.replace(
        scale,
        sizes=sizes,
        seeds={name: seeds if count else 0 for name, count in scale.seeds.items()},
    )
