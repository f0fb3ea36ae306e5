# SPDX-License-Identifier: Apache-2.0
"""Rotary frequencies, and values of missing fields, are transformers'."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from factories import tiny_config
from packed_models import FAMILIES
from sparse_bitnet.checkpoint.config_fields import LINEAR_SIZES, rope_of, text_config_of
from sparse_bitnet.engine.architecture import MODEL_TYPES, read_rope
from sparse_bitnet.errors import UserError

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize("theta", [10_000.0, 1_000_000.0, 500_000])
@pytest.mark.parametrize(
    "fields",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 3.0},
        {**LLAMA3, "original_max_position_embeddings": 512},
        YARN,
        {**YARN, "attention_factor": 1.5, "beta_fast": 16.0, "beta_slow": 2.0},
        {**YARN, "mscale": 0.7, "mscale_all_dim": 1.1, "truncate": False},
    ],
    ids=lambda fields: f"{fields['rope_type']}-{len(fields)}",
)
def test_frequencies_are_those_of_transformers(fields: dict[str, Any], theta: float) -> None:
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=2,
        max_position_embeddings=2048,
        rope_parameters={**fields, "rope_theta": theta},
    )
    expected = LlamaRotaryEmbedding(config)
    for written in (config.to_dict(), old_form(config.to_dict())):
        rope = read_rope(written, 128, "test")
        assert rope.inverse_frequencies.dtype == np.float32
        torch.testing.assert_close(
            torch.from_numpy(rope.inverse_frequencies), expected.inv_freq, rtol=3e-7, atol=0
        )
        assert rope.scaling == pytest.approx(expected.attention_scaling, rel=1e-12)


def test_frequencies_of_hunyuan_are_those_of_transformers() -> None:
    """A rope called dynamic has a constant base, which `alpha` stretches."""
    from transformers.models.hunyuan_v1_dense import modeling_hunyuan_v1_dense as hunyuan

    config = tiny_config("hunyuan_v1_dense")
    rope = read_rope(old_form(config.to_dict()), config.head_dim, "test")
    expected = hunyuan.HunYuanDenseV1RotaryEmbedding(config).inv_freq
    torch.testing.assert_close(
        torch.from_numpy(rope.inverse_frequencies), expected, rtol=3e-7, atol=0
    )


def old_form(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields as transformers 4 wrote them."""
    fields = dict(config.pop("rope_parameters"))
    theta = fields.pop("rope_theta")
    fields["type"] = fields.pop("rope_type")
    return {**config, "rope_theta": theta, "rope_scaling": fields}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
        {"rope_scaling": {"type": "linear", "factor": 3.0}, "rope_theta": 77.0},
        {"rope_scaling": YARN, "rope_parameters": None},
        {"rope_scaling": {}, "rope_theta": 77.0},
        {"rope_parameters": None},
        {"rope_parameters": None, "rope_theta": 77.0, "rope_local_base_freq": 33.0},
        {"rope_parameters": {**LLAMA3}, "original_max_position_embeddings": 8},
    ],
)
def test_rope_fields_are_read_as_transformers_reads_them(family: str, changes: dict[str, Any]):
    written = tiny_config(family).to_dict() | {"vocab_size": 96} | copy.deepcopy(changes)
    if family == "gemma3_text" and changes.get("rope_parameters"):
        with pytest.raises(UserError, match="are not a table that transformers reads"):
            rope_of(written, "test")
        return
    standard = AutoConfig.for_model(**copy.deepcopy(written)).to_dict()
    for local in (False, True):
        ours, expected = (rope_of(each, "test", local=local) for each in (written, standard))
        assert {name: ours.get(name) for name in expected if name != "type"} == {
            name: value for name, value in expected.items() if name != "type"
        }


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 2.0}},
            "'dynamic'; use --engine transformers",
        ),
        ({"rope_theta": None}, "rope_theta is None"),
        ({"rope_theta": True}, "rope_theta is True"),
        ({"rope_theta": -1}, "rope_theta is -1"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "factor is None"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"rope_theta": 10**400}, "rope_theta is 1000+"),
        ({"rope_theta": 1e-300}, "rope_theta is 1e-300, not a positive|not finite"),
        ({"rope_parameters": {**YARN, "rope_theta": 1}}, "not finite"),
        ({"rope_parameters": {**YARN, "rope_theta": 1e4, "beta_fast": 5e-324}}, "not finite"),
        *(
            (
                {"rope_parameters": {**YARN, "rope_theta": 1e4, "attention_factor": value}},
                f"attention_factor is {shown}, not a positive number",
            )
            for value, shown in ((1e308, "1e[+]308"), (0, "0"))
        ),
        ({"rope_theta": 1e4, "rope_scaling": [1]}, "not a table"),
        (
            {"rope_theta": 1e4, "rope_scaling": {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor 0.5",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear"}}}, "not a table"),
    ],
)
def test_unsupported_ropes_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_rope({"max_position_embeddings": 512} | config, 64, "test")


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_missing_fields_have_transformers_defaults(model_type: str) -> None:
    whole = AutoConfig.for_model(model_type).to_dict()
    left_out = {"rms_norm_eps", "max_position_embeddings", "hidden_act", "hidden_activation"}
    left_out |= LINEAR_SIZES.keys()
    written = {name: value for name, value in whole.items() if name not in left_out}
    assert text_config_of(written) == whole
