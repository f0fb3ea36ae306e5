"""What changes from step to step: the learning rate, and whether the mask is on. Steps count from 1."""

import math

from sparse_bitnet.training.config import TrainConfig


def learning_rate(config: TrainConfig, step: int) -> float:
    """Learning rate of optimiser step `step`, 1 <= step <= config.steps.

    Linear warm-up to the peak, then a cosine to `final_learning_rate_fraction` of it, or (wsd) the peak
    until the last `decay_fraction` of the steps and a straight line down.
    """
    peak, last = config.learning_rate, config.learning_rate * config.final_learning_rate_fraction
    warmup = round(config.steps * config.warmup_fraction)
    if step <= warmup:
        return peak * step / warmup
    remaining = max(1, config.steps - warmup)
    progress = (step - warmup) / remaining
    if config.schedule == "cosine":
        return last + (peak - last) * 0.5 * (1 + math.cos(math.pi * progress))
    decay = max(1, round(config.steps * config.decay_fraction))
    falling = (step - (config.steps - decay)) / decay
    return peak if falling <= 0 else peak + (last - peak) * min(1.0, falling)


def is_sparse(config: TrainConfig, step: int) -> bool:
    """Whether step `step` uses the N:M mask (dense-to-sparse: only the last share of the steps)."""
    return step >= config.first_sparse_step
