# SPDX-License-Identifier: Apache-2.0
"""The paper's tables and figures as lists of complete training runs. Free of torch and pandas.

Within one experiment runs differ in the format (or its schedule) alone: learning rate, steps, order of
the batches and initial weights are those of the scale and the seed. A run that several experiments ask
for is one run: its name holds a hash of its config.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sparse_bitnet.errors import UserError
from sparse_bitnet.layer_config import SparseBitConfig
from sparse_bitnet.presets import PRESETS
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet_paper.paper import paper
from sparse_bitnet_paper.scales import Scale, four_formats

NOT_IN_NAME = frozenset(("data", "out", "checkpoint_every", "keep_checkpoints", "tensorboard"))
"""Fields of a config that change neither the weights nor what is measured of them."""

ABLATIONS = {
    "baseline": "ternary-6:8",
    "mask without grad": "ternary-6:8,mask_gradient=masked",
    "mask from quantized weight": "ternary-6:8,mask_source=ternary",
    "sparse before quant": "ternary-6:8,scale_source=masked",
}
"""The paper's names of its four training designs (figure 4), and their formats."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run of an experiment."""

    config: TrainConfig
    """Complete except for `data` and `out`."""
    name: str
    """Readable prefix and `config_hash`."""

    @property
    def is_dense(self) -> bool:
        """Whether nothing is pruned."""
        return SparseBitConfig.parse(self.config.format).pattern.is_dense


def config_hash(config: TrainConfig) -> str:
    """Return 10 hexadecimal digits that two configs share only if they are the same run.

    Fields at their defaults do not count, so that a field added to `TrainConfig` renames no run.
    """
    defaults = dataclasses.asdict(TrainConfig())
    values = {
        name: value
        for name, value in dataclasses.asdict(config).items()
        if name not in NOT_IN_NAME and value != defaults[name]
    }
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=5).hexdigest()


def run_of(scale: Scale, model: str, format: str, seed: int, **changes: Any) -> Run:
    """Return a run of the scale's recipe with `changes` of its fields."""
    # Cadence follows from the format, so that every experiment asks for the very same dense run.
    parsed = SparseBitConfig.parse(format)
    dense = parsed.pattern.is_dense
    if scale.dense_layers:
        parsed = dataclasses.replace(parsed, dense_layers=scale.dense_layers)
    parsed.check_dense_layers(PRESETS[model].linears, model)
    steps = next(size.steps for size in scale.sizes if size.model == model)
    config = dataclasses.replace(
        scale.recipe,
        model=model,
        format=str(parsed),
        seed=seed,
        data_seed=seed,
        steps=steps,
        validation_every=max(1, steps // scale.validations),
        checkpoint_every=max(1, steps // (scale.snapshots if dense else 4)),
        keep_checkpoints=0 if dense else 1,
        **changes,
    )
    rho = "" if config.sparse_fraction == 1 else f"-rho{100 * config.sparse_fraction:g}"
    shown = model.removeprefix("qwen2.5-") + "-" + re.sub(r"[:,=]", "-", config.format) + rho
    name = f"{shown}-lr{config.learning_rate:g}-seed{seed}-{config_hash(config)}"
    return Run(config=config, name=name)


def table2(scale: Scale) -> list[Run]:
    """Perplexity of the four models at each size (tables 1 and 2), whose weights are figures 5 to 7."""
    return [
        run_of(scale, size.model, format, seed)
        for size in sorted(scale.sizes, key=lambda size: size.model != scale.main)
        for seed in range(size.seeds)
        for format in four_formats(scale.pattern)
    ]


def sweep(scale: Scale) -> list[Run]:
    """Perplexity over N:8 for both formats (figure 2, appendix table of raw perplexities)."""
    return [
        run_of(scale, scale.main, f"{weight}-{pattern}", seed)
        for seed in range(scale.seeds["sweep"])
        for pattern in scale.patterns
        for weight in ("full", "ternary")
    ]


def ablations(scale: Scale) -> list[Run]:
    """Validation perplexity and flip rate of the four training designs (figure 4, section 4.3)."""
    seeds = range(scale.seeds["ablations"])
    return [run_of(scale, scale.main, format, s) for s in seeds for format in ABLATIONS.values()]


def schedule(scale: Scale) -> list[Run]:
    """Dense-to-sparse training: only the last rho percent of the steps are sparse (table 4)."""
    return [
        run_of(scale, scale.main, "ternary-6:8", seed, sparse_fraction=percent / 100)
        if percent
        else run_of(scale, scale.main, "ternary-8:8", seed)
        for seed in range(scale.seeds["schedule"])
        for percent in scale.sparse_percents
    ]


def search(scale: Scale) -> list[Run]:
    """The four models at each learning rate of a size's search."""
    return [
        run_of(scale, size.model, format, seed, learning_rate=rate)
        for size in scale.sizes
        for seed in range(scale.seeds["search"])
        for format in four_formats(scale.pattern)
        for rate in size.search
    ]


def ideas(scale: Scale) -> list[Run]:
    """Scores, quantizers, activations and schedules that the paper does not use, against the paper's."""
    seeds, formats = range(scale.seeds["ideas"]), paper()["ideas"].values()
    return [run_of(scale, scale.main, format, seed) for seed in seeds for format in formats]


EXPERIMENTS: dict[str, Callable[[Scale], list[Run]]] = {
    "table2": table2,
    "sweep": sweep,
    "ablations": ablations,
    "schedule": schedule,
    "search": search,
}
"""Experiments by their names on the command line. Table 1 scores the models of table 2."""

_ALL = EXPERIMENTS | {"ideas": ideas}


def plan(scale: Scale, experiments: Sequence[str], seeds: int | None = None) -> list[Run]:
    """Return all runs of some experiments, each once, in the order in which to train them.

    Seed 0 of everything comes first, and within a seed the main size, so that a set that was cut short
    is still a whole one at fewer seeds. `seeds` replaces every number of seeds of the scale.

    Raises `UserError` for an unknown experiment, and if there are no runs.
    """
    if unknown := [name for name in experiments if name not in _ALL]:
        raise UserError(
            f"experiment {unknown[0]!r} is unknown: choose all, table1, {', '.join(_ALL)}"
        )
    if seeds is not None and seeds < 1:
        raise UserError(f"--seeds {seeds}: must be at least 1")
    if seeds is not None:
        sizes = tuple(dataclasses.replace(size, seeds=seeds) for size in scale.sizes)
        scale = dataclasses.replace(scale, sizes=sizes, seeds=dict.fromkeys(scale.seeds, seeds))
    runs: dict[str, Run] = {}
    for name in experiments:
        for run in _ALL[name](scale):
            runs.setdefault(run.name, run)
    if not runs:
        raise UserError(f"scale {scale.name} has no runs of {', '.join(experiments)}")
    return sorted(runs.values(), key=lambda run: (run.config.seed, run.config.model != scale.main))
