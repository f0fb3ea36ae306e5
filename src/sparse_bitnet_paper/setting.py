# SPDX-License-Identifier: Apache-2.0
"""What all results of one folder have in common: scale, sizes, recipe, text and precision."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparse_bitnet.checkpoint.model_folder import read_json
from sparse_bitnet.errors import UserError
from sparse_bitnet.training.config import TrainConfig, as_written_now
from sparse_bitnet_paper.scales import Scale

SETTING = "setting.json"
SETTING_VERSION = 1

MAY_CHANGE = ("summary", "learning_rates", "patterns", "sparse_percents")
"""What of a setting says which runs are wanted, and nothing about those that are there."""

ADDED_LATER: dict[str, Any] = {"pattern": "6:8", "dense_layers": [], "learning_rates": {}}
"""Of settings; those written before have these."""

_NEEDED = {"data", "main", "patterns", "precision", "recipe", "scale", "sizes", "text"}

_WHICH_RUNS = ("seeds", "wider", "workers", "size_by_size", "plain_names", "needs_gpu")
"""Of a scale; in no setting."""


def make_setting(
    scale: Scale, data: Mapping[str, Any], device: str, precision: str
) -> dict[str, Any]:
    """Everything that all results of one folder have in common, as JSON.

    Args:
        scale: its numbers; seeds, sizes and rates, which may be added later, names and workers do not
            count.
        data: identity of the training and of the validation text.
        device: "cpu" or "cuda".
        precision: resolved compute type.
    """
    values = {n: v for n, v in dataclasses.asdict(scale).items() if n not in _WHICH_RUNS}
    setting = {
        "version": SETTING_VERSION,
        "scale": values.pop("name"),
        **values,
        "sizes": {size.model: size.steps for size in scale.sizes},
        "learning_rates": {s.model: s.learning_rate for s in scale.sizes if s.learning_rate},
        "recipe": _shared(scale.recipe),
        "data": data,
        "device": device,
        "precision": precision,
    }
    return json.loads(json.dumps(setting))  # as a file gives it back


def read_setting(path: Path) -> dict[str, Any]:
    """Raises `UserError` where there is none, or of another version."""
    if not path.is_file():
        raise UserError(f"{path.parent} holds no results: it has no {path.name}")
    setting = ADDED_LATER | read_json(path)
    if setting.get("version") != SETTING_VERSION:
        raise UserError(f"{path}: version {setting.get('version')}, expected {SETTING_VERSION}")
    if missing := _NEEDED - setting.keys():
        raise UserError(f"{path} is damaged: it has no {', '.join(sorted(missing))}")
    return setting


def setting_changes(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """In words what makes results of two settings incomparable."""
    there: dict[str, Any] = {n: wanted[n] if n in MAY_CHANGE else stored.get(n) for n in wanted}
    there["sizes"] = wanted["sizes"] | there["sizes"]
    # Fields of the recipe that did not exist when it was written have their defaults.
    there["recipe"] = _shared(TrainConfig()) | as_written_now(there["recipe"])
    return _differences(there, wanted)


def _shared(recipe: TrainConfig) -> dict[str, Any]:
    """The fields of a recipe that a scale's runs have in common."""
    own = ("data", "out", "model", "format", "seed", "data_seed", "steps", "sparse_fraction")
    return {name: value for name, value in dataclasses.asdict(recipe).items() if name not in own}


def _differences(old: Any, new: Any, where: str = "") -> list[str]:
    """Leaves that differ between two JSON values, as "a.b old -> new"."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for key in sorted(old.keys() | new.keys()):
            found += _differences(old.get(key), new.get(key), f"{where}.{key}" if where else key)
        return found
    return [] if old == new else [f"{where} {json.dumps(old)} -> {json.dumps(new)}"]
