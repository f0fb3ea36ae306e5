# SPDX-License-Identifier: Apache-2.0
"""One training run of an experiment: its whole config, and its name. Free of torch.

A run that several experiments ask for is one run: its name is a readable prefix and a hash of its
config, so equal configs have one name and different ones never share it.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparse_bitnet.layer_config import SparseBitConfig
from sparse_bitnet.presets import PRESETS
from sparse_bitnet.training.config import ADDED_LATER, TrainConfig, as_written_now
from sparse_bitnet_paper.scales import Scale

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


def run_of(scale: Scale, model: str, format: str, seed: int, purpose: str, **changes: Any) -> Run:
    """A run of the scale's recipe, but for `changes` of its fields."""
    changes = {"learning_rate": scale.learning_rate(model)} | changes
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
