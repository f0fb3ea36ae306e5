# SPDX-License-Identifier: Apache-2.0
"""Schedules of learning rate, weight decay, kept weights and quantised share. Steps count from 1."""

import math

from sparse_bitnet.errors import UserError
from sparse_bitnet.layer_config import REGISTERED, SparseBitConfig
from sparse_bitnet.training.config import TrainConfig


def learning_rate(config: TrainConfig, step: int) -> float:
    """Return the learning rate of optimiser step `step`, 1 <= step <= config.steps.

    Linear warm-up to the peak, then a cosine to `final_learning_rate_fraction` of it, or (wsd) the peak
    until the last `decay_fraction` of the steps and a straight line down.
    """
    peak, last = config.learning_rate, config.learning_rate * config.final_learning_rate_fraction
    warmup = round(config.steps * config.warmup_fraction)
    if step <= warmup:
        return peak * step / warmup
    progress = (step - warmup) / (config.steps - warmup)
    if config.schedule == "cosine":
        return last + (peak - last) * 0.5 * (1 + math.cos(math.pi * progress))
    decay = round(config.steps * config.decay_fraction)
    falling = step - (config.steps - decay)
    return peak if falling <= 0 else peak + (last - peak) * falling / decay


def weight_decay_factor(config: TrainConfig, step: int) -> float:
    """Return the weight decay of optimiser step `step` relative to the first."""
    return 1 + (config.final_weight_decay_fraction - 1) * (step - 1) / max(1, config.steps - 1)


def format_of(config: TrainConfig) -> SparseBitConfig:
    """Return the parsed format. Raises `UserError` for a `sparse_fraction` beside a dense pattern or a
    schedule, and as `phase`."""
    format = SparseBitConfig.parse(config.format)
    if config.sparse_fraction != 1 and format.pattern.is_dense:
        raise UserError(f"sparse_fraction={config.sparse_fraction} needs a mask: {format} has none")
    if config.sparse_fraction != 1 and format.schedule != REGISTERED["schedule"]:
        raise UserError(
            f"sparse_fraction={config.sparse_fraction} contradicts schedule={format.schedule} of the "
            "format, which itself decides when masks begin: leave one of them out"
        )
    if config.sparse_fraction and not round(config.steps * config.sparse_fraction):
        raise UserError(f"sparse_fraction={config.sparse_fraction} of {config.steps} steps is none")
    phase(config, format, 1)
    return format


def phase(config: TrainConfig, format: SparseBitConfig, step: int) -> tuple[int, float]:
    """Return `phase_at` for a run's step; only the last `sparse_fraction` of its steps use the mask."""
    if step <= config.steps - round(config.steps * config.sparse_fraction):
        return format.pattern.m, 1.0
    return phase_at(format, step, config.steps)


def phase_at(format: SparseBitConfig, step: int, steps: int) -> tuple[int, float]:
    """Return how many of every m weights step `step` of `steps` keeps by the format's schedule, and the
    share of quantised values in its forward.

    Raises `UserError` for a schedule that returns impossible values.
    """
    schedule, m = format.variant("schedule"), format.pattern.m
    kept, blend = schedule.call((step - 1) / steps, format.pattern.n, m)
    blends = schedule.blends or blend == 1
    if not (1 <= kept <= m and 0 <= blend <= 1 and blends):
        raise UserError(
            f"schedule {schedule.text}: step {step} would keep {kept} of {m} and blend {blend}"
            + ("" if blends else ", which needs register_schedule(..., blends=True)")
        )
    return kept, float(blend)
