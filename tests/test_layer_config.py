# SPDX-License-Identifier: Apache-2.0
"""SparseBitConfig: its text form, its dict form, and the combinations that it refuses."""

import dataclasses
from typing import Literal, get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_bitnet.errors import UserError
from sparse_bitnet.layer_config import SparseBitConfig
from sparse_bitnet.pattern import NMPattern

CHOICES = {
    field.name: get_args(field.type)
    for field in dataclasses.fields(SparseBitConfig)
    if get_origin(field.type) is Literal
}


def forms() -> st.SearchStrategy[str]:
    """Every text that `parse` accepts, each field given or left out."""
    fields = [name for name in CHOICES if name != "weight"]

    @st.composite
    def draw_form(draw: st.DrawFn) -> str:
        m = draw(st.integers(1, 32))
        text = f"{draw(st.sampled_from(CHOICES['weight']))}-{draw(st.integers(1, m))}:{m}"
        for field in draw(st.permutations(fields)):
            if draw(st.booleans()):
                text += f",{field}={draw(st.sampled_from(CHOICES[field]))}"
        globs = draw(st.lists(st.from_regex(r"[a-z0-9_.*\[\]?-]+", fullmatch=True), max_size=3))
        return text + (f",dense_layers={'+'.join(globs)}" if globs else "")

    return draw_form()


ABLATIONS = ("mask_gradient=masked", "mask_source=ternary", "scale_source=masked")


class TestConfig:
    @given(forms())
    def test_text_form_and_dict_round_trip(self, text: str) -> None:
        try:
            config = SparseBitConfig.parse(text)
        except UserError:
            return
        assert SparseBitConfig.parse(str(config)) == config
        assert SparseBitConfig.from_dict(config.to_dict()) == config
        assert hash(SparseBitConfig.from_dict(config.to_dict())) == hash(config)

    @pytest.mark.parametrize(
        "text",
        ["ternary-6:8", "full-2:4", "ternary-8:8", "full-8:8", "full-6:8,activation=int8"]
        + [f"ternary-6:8,{ablation}" for ablation in ABLATIONS],
    )
    def test_text_form_is_short(self, text: str) -> None:
        assert str(SparseBitConfig.parse(text)) == text

    def test_the_four_cells_have_short_texts(self) -> None:
        ternary, full = SparseBitConfig.parse("ternary-6:8"), SparseBitConfig.parse("full-6:8")
        assert (ternary.weight, ternary.activation) == ("ternary", "int8")
        assert (full.weight, full.activation) == ("full", "none")
        assert SparseBitConfig.parse("ternary-8:8").pattern.is_dense
        assert SparseBitConfig() == ternary

    def test_pattern_may_be_text(self) -> None:
        assert SparseBitConfig(pattern="2:4").pattern == NMPattern(2, 4)

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("full-6:8,mask_source=ternary", "mask_source=ternary needs weight=ternary"),
            ("full-6:8,ste=clipped", "ste=clipped needs weight=ternary"),
            ("full-6:8,embeddings=ternary", "embeddings=ternary needs weight=ternary"),
            ("ternary-8:8,mask_gradient=masked", "needs a mask, but 8:8 keeps all"),
            ("ternary-6:8,mask_source=ternary,scale_source=masked", "set at most one of them"),
            ("ternary-6:8,mask_source=codes", r"choose one of \('master', 'ternary'\)"),
            ("ternary-6:8,order=mask", "not field=value with one of activation"),
            ("ternary-6:8,weight=full", "not field=value"),
            ("ternary-6:8,ste", "'ste' is not field=value"),
            ("ternary-6:8,score=wanda,score=random", "score is given twice; leave one out"),
            ("ternary6:8", "write ternary-n:m or full-n:m"),
            ("ternary-6:8,dense_layers=", "dense_layers='': give names of layers"),
            ("ternary-6:8,dense_layers=a++b", "give names of layers"),
            ("bf16-6:8", "write ternary-n:m or full-n:m"),
            ("ternary-6-8", "write it as n:m"),
            ("", "write ternary-n:m or full-n:m"),
        ],
    )
    def test_invalid_configs_are_one_line(self, text: str, reason: str) -> None:
        with pytest.raises(UserError, match=reason) as raised:
            SparseBitConfig.parse(text)
        assert "\n" not in str(raised.value)

    def test_dense_layers_are_globs_over_names_and_their_ends(self) -> None:
        config = SparseBitConfig.parse("ternary-6:8,dense_layers=down_proj+layers.0.*")
        assert config.dense_layers == ("down_proj", "layers.0.*")
        dense = ("down_proj", "model.layers.3.mlp.down_proj", "model.layers.0.mlp.up_proj")
        assert all(config.keeps_dense(name) for name in dense)
        assert not config.keeps_dense("model.layers.10.mlp.up_proj")
        assert not config.keeps_dense("model.layers.1.mlp.updown_proj")
        with pytest.raises(UserError, match="give names of layers"):
            SparseBitConfig(dense_layers=(1,))  # type: ignore[arg-type]

    def test_dicts_with_missing_or_unknown_fields_are_refused(self) -> None:
        values = SparseBitConfig().to_dict()
        with pytest.raises(UserError, match="lacks pattern"):
            SparseBitConfig.from_dict({k: v for k, v in values.items() if k != "pattern"})
        with pytest.raises(UserError, match="unknown depth"):
            SparseBitConfig.from_dict({**values, "depth": "1"})
        with pytest.raises(UserError, match="not a table of fields"):
            SparseBitConfig.from_dict("ternary-6:8")  # type: ignore[arg-type]
        with pytest.raises(UserError, match="pattern=68"):
            SparseBitConfig.from_dict({**values, "pattern": 68})
