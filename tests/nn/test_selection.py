# SPDX-License-Identifier: Apache-2.0
"""Mask and codes of one optimiser step: reused, counted, and never stale."""

import copy

import pytest
import torch
from torch import nn

from factories import VARIANTS, make_layer
from sparse_bitnet.nn.layer import SparseBitLinear, select_layers_


class TestSelection:
    def test_selected_forward_and_backward_are_the_same(self) -> None:
        for text in VARIANTS.values():
            layer, x = make_layer(text), torch.randn(4, 48, requires_grad=True)
            layer(x).square().sum().backward()
            expected = layer(x), x.grad.clone(), layer.weight.grad.clone()
            x.grad = None
            layer.zero_grad()
            layer.select_()
            y = layer(x)
            y.square().sum().backward()
            for got, want in zip((y, x.grad, layer.weight.grad), expected, strict=True):
                assert torch.equal(got, want)
            layer.release_()
            assert torch.equal(layer(x), expected[0])

    @pytest.mark.parametrize("change", ["in place", "replaced", "loaded", "functional"])
    def test_a_selection_never_meets_another_weight(self, change: str) -> None:
        layer, x = make_layer("ternary-6:8"), torch.randn(4, 48)
        # Both of version 0, so that a replacement shows by its identity alone.
        layer.weight, other = nn.Parameter(torch.randn(20, 48)), torch.randn(20, 48)
        expected = copy.deepcopy(layer)
        expected.load_state_dict({"weight": other, "bias": layer.bias.detach()})
        layer.select_()
        if change == "functional":
            state = {"weight": other, "bias": layer.bias}
            y = torch.func.functional_call(layer, state, (x,))
        else:
            if change == "in place":
                with torch.no_grad():
                    layer.weight.copy_(other)
            elif change == "replaced":
                layer.weight = nn.Parameter(other)
            else:
                layer.load_state_dict({"weight": other, "bias": layer.bias.detach()})
            assert not layer.is_selected
            y = layer(x)
        assert torch.equal(y, expected(x))

    @pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}])
    def test_every_optimiser_implementation_ends_the_selection(self, options: dict[str, bool]):
        layer, x = make_layer("ternary-6:8"), torch.randn(4, 48)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, **options)
        layer.select_()
        layer(x).sum().backward()
        assert layer.is_selected
        optimizer.step()
        assert not layer.is_selected

    def test_flips_count_changes_between_training_selections(self) -> None:
        layer = make_layer("ternary-6:8")
        layer.select_()
        assert layer.mask_flips is None
        first = layer.mask
        layer.release_()
        layer.select_()
        assert layer.mask_flips == 0
        with torch.no_grad():
            layer.weight.normal_()
        layer.select_()
        assert layer.mask_flips == (layer.mask ^ first).sum()
        assert layer.mask_flips > 0

    def test_first_sparse_step_flips_what_it_prunes(self) -> None:
        for text in ("ternary-6:8", "full-6:8"):
            layer = make_layer(text)
            layer.kept = layer.config.pattern.m
            layer.select_()
            assert layer.mask_flips is None
            layer.release_()
            layer.select_()
            assert layer.mask_flips == 0
            layer.release_()
            layer.kept = None
            layer.select_()
            assert layer.mask_flips == layer.weight.numel() // 4

    @pytest.mark.parametrize("text", ["ternary-6:8,quantizer=per-group:size=16", "full-2:4"])
    def test_layers_selected_together_equal_each_alone(self, text: str, monkeypatch) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        layers = [make_layer(text, out_features=rows).to(device) for rows in (20, 1, 33)]
        alone = copy.deepcopy(layers)
        if device == "cpu":  # where layers have no key
            monkeypatch.setattr(SparseBitLinear, "selection_key", text)
        for _ in range(3):
            select_layers_(layers)
            for layer, other in zip(layers, alone, strict=True):
                other.select_()
                pairs = [(layer.mask_flips, other.mask_flips), (layer.mask, other.mask)]
                for ours, theirs in [*pairs, *zip(layer.current, other.current, strict=True)]:
                    assert ours is theirs is None or torch.equal(ours, theirs)
                layer.weight.data.copy_(other.weight.data.normal_())

    def test_a_layer_that_moves_selects_again(self) -> None:
        layer = make_layer("ternary-6:8")
        layer.select_()
        layer.to("cpu")
        assert layer.is_selected
        layer.to("meta")
        assert not layer.is_selected
        assert layer.mask is None

    def test_selection_works_in_inference_mode(self) -> None:
        with torch.inference_mode():
            layer, x = make_layer("ternary-6:8"), torch.randn(4, 48)
            expected = layer(x)
            layer.select_()
            assert layer.is_selected
            assert torch.equal(layer(x), expected)

    def test_a_copy_of_a_selected_layer_selects_for_itself(self) -> None:
        layer, x = make_layer("ternary-6:8"), torch.randn(4, 48)
        layer.select_()
        assert torch.equal(copy.deepcopy(layer)(x), layer(x))
