# SPDX-License-Identifier: Apache-2.0
"""What the fields of a training run's config may be, each alone and beside the others. Free of torch."""

import dataclasses
import math
import numbers
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

from sparse_bitnet.errors import UserError
from sparse_bitnet.host import MOST_THREADS

_ABOVE_0 = (
    *("steps", "batch_size", "sequence_length", "learning_rate", "epsilon", "temperature"),
    *("top_logits", "threads", "vocab_size", "loss_chunk_tokens"),
)
_NOT_BELOW_0 = (
    *("validation_every", "validation_tokens", "layer_metrics_every", "checkpoint_every"),
    *("keep_checkpoints", "lora", "weight_decay", "final_weight_decay_fraction", "gradient_clip"),
    *("final_learning_rate_fraction", "ce_weight", "logits_weight", "relations_weight"),
)
_FROM_0_TO_1 = ("sparse_fraction", "warmup_fraction", "decay_fraction")
_BELOW_1 = ("beta1", "beta2")
_OF_63_BITS = ("steps", "seed", "vocab_size")

_NEEDS = (
    *(("sub_norms", "init"), ("lora", "init")),
    *((name, "teacher") for name in ("logit_cache", "temperature", "ce_weight", "logits_weight")),
    *(("relations_weight", "teacher"), ("relations_layer", "relations_weight")),
    *(("top_logits", "logit_cache"), ("logit_cache", "logits_weight")),
    ("temperature", "logits_weight"),
)
"""(field, another): what is asked for with the first does nothing without the second."""


def check_config(config: Any, asked_for_nothing: Mapping[str, Any]) -> None:
    """Raise `UserError` that names the field of a `TrainConfig` and says what it may be.

    `asked_for_nothing`: values of the fields that others need, by which they ask for nothing.
    """
    for field in dataclasses.fields(config):
        check_kind(field.name, getattr(config, field.name), field.type)

    def require(names: tuple[str, ...], holds: Callable[[Any], bool], reason: str) -> None:
        for name in names:
            value = getattr(config, name)
            _require(value is None or holds(value), name, value, reason)

    require(_ABOVE_0, lambda value: value > 0, "must be above 0")
    require(_OF_63_BITS, lambda value: abs(value) < 2**63, "is too large")
    require(("threads",), lambda value: value <= MOST_THREADS, f"at most {MOST_THREADS:,}")
    require(_FROM_0_TO_1, lambda value: 0 <= value <= 1, "must lie in 0..1")
    require(_BELOW_1, lambda value: 0 <= value < 1, "must lie in 0..1, below 1")
    require(_NOT_BELOW_0, lambda value: value >= 0, "cannot be negative")
    for name, other in _NEEDS:
        value = getattr(config, name)
        if value != asked_for_nothing[name] and not getattr(config, other):
            raise UserError(
                f"{name}={value} does nothing without {other}: give --{other.replace('_', '-')}, or "
                "leave it out"
            )
    if not (config.ce_weight or config.logits_weight or config.relations_weight):
        raise UserError("ce_weight, logits_weight and relations_weight are 0: nothing is learnt")
    if config.logit_cache is not None and config.relations_weight:
        raise UserError("relations_weight needs the teacher itself: leave out the logit_cache")
    if config.schedule == "wsd" and config.warmup_fraction + config.decay_fraction > 1:
        raise UserError(
            "warmup_fraction and decay_fraction are above 1 together: leave steps between"
        )
    batch, micro = config.batch_size, config.micro_batch_size
    if micro is not None and (micro < 1 or batch % micro):
        raise UserError(f"micro_batch_size={micro} does not divide batch_size={batch}")


def check_kind(name: str, value: object, kind: Any) -> None:
    """Raise `UserError` for a value of another type than the field's, and for NaN and infinity."""
    kinds = typing.get_args(kind) or (kind,)
    if typing.get_origin(kind) is Literal:
        return _require(value in kinds, name, value, f"choose one of {kinds}")
    abstract = {int: numbers.Integral, float: numbers.Real}
    found = isinstance(value, tuple(abstract.get(each, each) for each in kinds))
    words = " or ".join(each.__name__ for each in kinds).replace("NoneType", "null")
    _require(found, name, repr(value), f"must be of type {words}")
    finite = not isinstance(value, float) or math.isfinite(value)
    _require(finite, name, value, "must be a finite number")


def _require(condition: bool, name: str, value: object, reason: str) -> None:
    if not condition:
        raise UserError(f"{name}={value}: {reason}")
