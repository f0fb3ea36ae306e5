# SPDX-License-Identifier: Apache-2.0
"""The paper's tables and figures as lists of complete runs. Free of torch.

A run that several experiments ask for is one run: its name is a readable prefix and a hash of its
config, so equal configs have one name and different ones never share it. Within one experiment runs
differ in the format (or its schedule) alone: learning rate, steps, order of the batches and initial
weights are those of the scale and the seed.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparse_bitnet.errors import UserError
from sparse_bitnet.experiments.scales import Scale, four_formats
from sparse_bitnet.layer_config import SparseBitConfig
from sparse_bitnet.presets import PRESETS
from sparse_bitnet.training.config import ADDED_LATER, TrainConfig, as_written_now

ABLATIONS = {
    "baseline": "ternary-6:8",
    "mask without grad": "ternary-6:8,mask_gradient=masked",
    "mask from quantized weight": "ternary-6:8,mask_source=ternary",
    "sparse before quant": "ternary-6:8,scale_source=masked",
}
"""The paper's names of its four variants (figure 4), and their formats."""

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

NOT_IN_NAME = frozenset(
    ("data", "out", "checkpoint_every", "keep_checkpoints", "tensorboard", "wandb")
)
"""Fields of a config that change neither the weights nor what is measured of them."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run of an experiment."""

    config: TrainConfig
    """Complete but for `data` and `out`."""

    purpose: str
    """What it is in its table or figure."""

    plain_name: bool = False
    """Whether seed and format alone make its name."""

    @property
    def name(self) -> str:
        """Prefix for people, then 10 hexadecimal digits of a hash of the config, unless plain."""
        config = self.config
        if self.plain_name:
            return f"seed-{config.seed}/{config.format.replace(':', 'of')}"
        parts = [config.model.removeprefix("qwen2.5-"), re.sub(r"[:,=]", "-", config.format)]
        if config.sparse_fraction != 1:
            parts.append(f"rho{100 * config.sparse_fraction:g}")
        parts += [f"lr{config.learning_rate:g}", f"seed{config.seed}", config_hash(config)]
        return "-".join(parts)

    def differences(self, stored: Mapping[str, Any]) -> str:
        """Fields in which a stored config of this name differs, in words; empty if none does."""
        stored = as_written_now(stored)
        return ", ".join(
            f"{name} {stored[name]!r} there, {value!r} here"
            for name, value in dataclasses.asdict(self.config).items()
            if name not in NOT_IN_NAME and name in stored and stored[name] != value
        )

    @property
    def is_dense(self) -> bool:
        """Whether nothing is pruned."""
        return SparseBitConfig.parse(self.config.format).pattern.is_dense


def config_hash(config: TrainConfig) -> str:
    """10 hexadecimal digits that two configs share only if they are the same run."""
    values = {
        name: value
        for name, value in dataclasses.asdict(config).items()
        if name not in NOT_IN_NAME and not (name in ADDED_LATER and value == ADDED_LATER[name])
    }
    if values["compile"] != "auto":  # as it was written before there was a third choice
        values["compile"] = values["compile"] == "on"
    text = json.dumps(values, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=5).hexdigest()


def table2(scale: Scale, losses: Losses = NO_LOSSES) -> list[Run]:
    """Perplexity of the four models at each size (table 2); also what tables 1 and 4.4 look at."""
    return [
        _run(scale, size.model, format, seed, f"table 2, {format} at {size.model}")
        for size in sorted(scale.sizes, key=lambda size: size.model != scale.main)
        for seed in range(size.seeds)
        for format in four_formats(scale.pattern)
    ]


def sweep(scale: Scale, losses: Losses = NO_LOSSES) -> list[Run]:
    """Perplexity over N:8 for both formats (figure 2, appendix table of raw perplexities)."""
    return [
        _run(scale, scale.main, f"{weight}-{pattern}", seed, f"sweep, {pattern}")
        for seed in range(scale.seeds["sweep"])
        for pattern in scale.patterns
        for weight in ("full", "ternary")
    ]


def ablations(scale: Scale, losses: Losses = NO_LOSSES) -> list[Run]:
    """Validation perplexity and flip rate of the four training designs (figure 4)."""
    return [
        _run(scale, scale.main, format, seed, f"ablation, {name}")
        for seed in range(scale.seeds["ablations"])
        for name, format in ABLATIONS.items()
    ]


def ideas(scale: Scale, losses: Losses = NO_LOSSES) -> list[Run]:
    """Each score, quantiser, activation and schedule against the paper's; no part of its own set."""
    return [
        _run(scale, scale.main, format, seed, f"idea, {name}")
        for seed in range(scale.seeds.get("ideas", 1))
        for name, format in IDEAS.items()
    ]


def schedule(scale: Scale, losses: Losses = NO_LOSSES) -> list[Run]:
    """Dense-to-sparse training: only the last rho percent of the steps are sparse (table 4)."""
    runs = []
    for seed in range(scale.seeds["schedule"]):
        for percent in scale.sparse_percents:
            format = "ternary-6:8" if percent else "ternary-8:8"
            fraction = percent / 100 if percent else 1.0
            purpose = f"schedule, {percent} % of the steps sparse"
            runs.append(_run(scale, scale.main, format, seed, purpose, sparse_fraction=fraction))
    return runs


def mask_source(scale: Scale, losses: Losses = NO_LOSSES) -> list[Run]:
    """Mask from master weights against mask from ternary codes (section 4.3)."""
    return [
        _run(scale, scale.main, format, seed, f"mask source, {format}")
        for seed in range(scale.seeds["ablations"])
        for format in (ABLATIONS["baseline"], ABLATIONS["mask from quantized weight"])
    ]


def analyses(scale: Scale, losses: Losses = NO_LOSSES) -> list[Run]:
    """Dense models whose weights are looked at during training (heat maps, histograms, thresholds)."""
    return [
        _run(scale, size.model, format, seed, f"analysis, {format}")
        for size in scale.sizes
        for seed in range(size.seeds)
        for format in ("full-8:8", "ternary-8:8")
    ]


def search(scale: Scale, losses: Losses = NO_LOSSES) -> list[Run]:
    """The four models at other learning rates, for each as far as its best is not the outermost."""
    return [
        _at_rate(scale, format, rate, seed)
        for seed in range(scale.seeds["search"])
        for format in four_formats(scale.pattern)
        for rate in _rates(scale, format, losses)[0]
    ]


def own_rates(scale: Scale, losses: Losses = NO_LOSSES) -> list[Run]:
    """Table 2 at the main size, each of the four models at its own best rate; after the search."""
    best = {format: _rates(scale, format, losses)[1] for format in four_formats(scale.pattern)}
    return [
        _at_rate(scale, format, rate, seed)
        for seed in range(scale.seeds.get("own-rates", 0))
        for format, rate in best.items()
        if rate is not None
    ]


def recipe(scale: Scale, losses: Losses = NO_LOSSES) -> list[Run]:
    """The four models with what the published code does otherwise, one thing at a time."""
    return [
        _run(scale, scale.main, format, seed, f"recipe, {name}", **changes)
        for seed in range(scale.seeds.get("recipe", 0))
        for name, changes in published_recipe(scale).items()
        for format in four_formats(scale.pattern)
    ]


def published_recipe(scale: Scale) -> dict[str, dict[str, Any]]:
    """By name the fields in which the published code's training differs from ours."""
    ours = scale.recipe
    steps = scale.size(scale.main).steps * ours.batch_size // _PUBLISHED_BATCH
    return {
        f"{_PUBLISHED_BATCH} sequences a step": {
            "batch_size": _PUBLISHED_BATCH,
            "micro_batch_size": ours.batch_size,
            "steps": steps,
        },
        "end rate 1e-5": {"final_learning_rate_fraction": 1e-5 / ours.learning_rate},
        "weight decay falling to 0": {"final_weight_decay_fraction": 0.0},
        "bf16 masters": {"masters": "bf16"},
        "uniform initial weights": {"initial_weights": "uniform"},
    }


def near_zero(scale: Scale, losses: Losses = NO_LOSSES) -> list[Run]:
    """The dense models from both initial distributions at every rate: where near-zero mass falls."""
    return [
        _run(
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
        for rate in (scale.search[0] / 10, *scale.search)
        for format in ("full-8:8", "ternary-8:8")
    ]


def _at_rate(scale: Scale, format: str, rate: float, seed: int) -> Run:
    return _run(scale, scale.main, format, seed, f"search, {rate:g}", learning_rate=rate)


def _rates(scale: Scale, format: str, losses: Losses) -> tuple[list[float], float | None]:
    """Rates to try for a format, ascending, and the best of them; None before all have been tried."""
    rates = sorted(scale.search)
    for added in range(scale.wider + 1):
        found = [losses.get(_at_rate(scale, format, rate, 0).name) for rate in rates]
        known = [loss for loss in found if loss is not None]
        if not rates or len(known) < len(rates):
            break
        best = known.index(min(known))
        if 0 < best < len(rates) - 1 or added == scale.wider:
            return rates, rates[best]
        rates = [rates[0] / 2, *rates] if best == 0 else [*rates, 2 * rates[-1]]
    return rates, None


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
        raise UserError(f"experiment {unknown[0]!r} is unknown: choose among {', '.join(_ALL)}")
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


def _run(scale: Scale, model: str, format: str, seed: int, purpose: str, **changes: Any) -> Run:
    steps = changes.pop("steps", scale.size(model).steps)
    # Cadence follows from the format, so that every experiment asks for the very same dense run.
    parsed = SparseBitConfig.parse(format)
    dense = parsed.pattern.is_dense
    if scale.dense_layers:
        parsed = dataclasses.replace(parsed, dense_layers=scale.dense_layers)
    parsed.check_dense_layers(PRESETS[model].linears, model)
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
    return Run(config=config, purpose=purpose, plain_name=scale.plain_names)
