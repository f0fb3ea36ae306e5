# SPDX-License-Identifier: Apache-2.0
"""TrainConfig: validation, JSON, and what may differ between the parts of one run."""

import dataclasses

import pytest

from factories import edit_json
from sparse_bitnet.errors import UserError
from sparse_bitnet.training.config import TrainConfig, read_config
from sparse_bitnet.training.recipes import RECIPES


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"colour": 1}, "missing or unknown keys colour"),
        ({"steps": ...}, "missing or unknown keys steps"),
        ({"model_type": "llama"}, "is that of a model, not of a run"),
    ],
)
def test_a_config_of_something_else_is_refused(tmp_path, changes, reason):
    with pytest.raises(UserError, match="not a run folder: it has no config"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(TrainConfig().to_json())
    edit_json(tmp_path / "config.json", **changes)
    with pytest.raises(UserError, match=reason):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("steps", 0), ("learning_rate", -1.0), ("sparse_fraction", 1.5), ("beta2", 1.0)),
        *(("schedule", "linear"), ("precision", "fp8"), ("micro_batch_size", 3)),
        *(("keep_checkpoints", -1), ("learning_rate", float("inf"))),
        *(("weight_decay", float("nan")), ("epsilon", 0.0), ("final_learning_rate_fraction", -0.1)),
        *(("threads", 0), ("threads", 10**5), ("vocab_size", -3), ("vocab_size", 10**20)),
        *(("seed", 10**30), ("data_seed", 10**30), ("steps", "10"), ("steps", 2.5), ("lora", 8)),
        *(("data", None), ("ce_weight", 0.3), ("top_logits", 8)),
    ],
)
def test_bad_values_are_one_line(field, value):
    with pytest.raises(UserError, match=field) as caught:
        TrainConfig(**{field: value})
    assert "\n" not in str(caught.value)


def test_difference_ignores_where_and_how_often(tmp_path):
    base = TrainConfig()
    assert base.difference(dataclasses.replace(base, out="elsewhere", checkpoint_every=1)) == {}
    other = dataclasses.replace(base, learning_rate=1e-4, format="full-6:8")
    assert base.difference(other).keys() == {"learning_rate", "format"}
    (tmp_path / "config.json").write_text(other.to_json())
    assert read_config(tmp_path) == other
    taught = dataclasses.replace(base, teacher="t")
    caches = [dataclasses.replace(taught, logit_cache=cache) for cache in ("a", "b")]
    assert caches[0].difference(caches[1]) == {}
    assert taught.difference(caches[0]) == {"logit_cache": (None, "a")}, "its highest logits alone"


def test_the_paper_recipe_is_the_papers_table():
    config = RECIPES["paper"]()
    assert (config.beta1, config.beta2, config.epsilon) == (0.9, 0.95, 1e-5)
    assert (config.learning_rate, config.warmup_fraction, config.schedule) == (1e-5, 0.5, "cosine")
    assert (config.weight_decay, config.gradient_clip) == (0.1, 1.0)
    assert (config.micro_batch_size, config.batch_size, config.sequence_length) == (16, 64, 2048)
    assert config.precision == "bf16"
    assert config.steps * config.tokens_per_step == pytest.approx(50e9, rel=1e-5)


def test_a_damaged_config_is_one_line(tmp_path):
    (tmp_path / "config.json").write_bytes(b"[" * 100_000)
    with pytest.raises(UserError, match=r"config\.json is damaged: not [^\n]*$"):
        read_config(tmp_path)
