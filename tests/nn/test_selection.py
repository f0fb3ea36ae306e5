# SPDX-License-Identifier: Apache-2.0
"""Mask and codes of one optimiser step: reused, counted, and never stale."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from factories import VARIANTS, make_layer
from sparse_bitnet.nn.convert import selected
from sparse_bitnet.nn.layer import SparseBitLinear
from sparse_bitnet.nn.selection import Selection
from sparse_bitnet.ops.mask_words import pack_mask
from sparse_bitnet.ops.nm_mask import nm_mask
from sparse_bitnet.ops.select_ternary import quantize_ternary
from sparse_bitnet.pattern import NMPattern


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

    def test_release_follows_the_weight_again(self) -> None:
        layer, x = make_layer("ternary-6:8"), torch.randn(4, 48)
        layer.select_()
        with torch.no_grad():
            layer.weight.neg_()
        fresh = make_layer("ternary-6:8")
        with torch.no_grad():
            fresh.weight.neg_()
        layer.release_()
        assert torch.equal(layer(x), fresh(x))

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
    def test_every_optimiser_implementation_ends_the_selection(
        self, options: dict[str, bool]
    ) -> None:
        layer, x = make_layer("ternary-6:8"), torch.randn(4, 48)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, **options)
        layer.select_()
        layer(x).sum().backward()
        assert layer.is_selected
        optimizer.step()
        assert not layer.is_selected

    def test_flips_between_consecutive_training_selections(self) -> None:
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

    def test_evaluation_between_steps_leaves_mask_and_flips_alone(self) -> None:
        layer, x = make_layer("full-6:8"), torch.randn(4, 48)
        layer.select_()
        layer.release_()
        before = layer.mask.clone()
        with torch.no_grad():
            layer.weight.normal_()
        layer.eval()
        layer.select_()
        expected = F.linear(x, layer.weight * nm_mask(layer.weight, NMPattern(6, 8)), layer.bias)
        assert torch.equal(layer(x), expected)
        layer.select_()
        layer.release_()
        assert torch.equal(layer.mask, before)
        assert layer.mask_flips is None
        layer.train()
        layer.select_()
        assert layer.mask_flips == (layer.mask ^ before).sum()

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

    def test_masks_are_kept_as_bits_and_as_bools_only_where_a_step_needs_them(self) -> None:
        for text in VARIANTS.values():
            layer = make_layer(text)
            layer.select_()
            expected = layer.select().mask
            config = layer.config
            is_dense = config.pattern.is_dense
            needed = config.weight == "full" or config.mask_gradient == "masked"
            assert (layer.state.current.mask is None) == (is_dense or not needed)
            assert (layer.mask_words is None) == is_dense
            for _ in range(2):
                assert (layer.mask is None) if is_dense else torch.equal(layer.mask, expected)
                layer.release_()
                assert layer.state.current is None
            if not is_dense:
                layer.mask_words = pack_mask(~expected, config.pattern.m)
                layer.select_()
                assert layer.mask_flips == expected.numel()

    @pytest.mark.parametrize("text", VARIANTS.values())
    @pytest.mark.parametrize("training", [True, False])
    def test_an_overridden_selection_is_that_of_every_forward(
        self, text: str, training: bool
    ) -> None:
        class FirstOfEachGroup(SparseBitLinear):
            def select(self) -> Selection:
                mask = torch.arange(self.in_features).expand_as(self.weight) % 8 < 6
                if self.config.weight == "full":
                    return Selection(None, mask, None)
                codes, scale = quantize_ternary(self.weight)
                return Selection(codes * mask, mask, scale)

        layer = make_layer(text).train(training)
        layer.__class__ = FirstOfEachGroup
        x = torch.randn(4, 48)
        expected = layer(x)
        assert not torch.equal(expected, make_layer(text)(x))
        for flips in (None, 0):
            with selected(layer):
                assert torch.equal(layer(x), expected)
                assert torch.equal(layer.mask, layer.select().mask)
                assert layer.mask_flips == (flips if training else None)
        assert (layer.mask is not None) == training

    def test_a_selection_moves_with_its_layer(self) -> None:
        layer = make_layer("ternary-6:8")
        layer.select_()
        layer.to("meta")
        assert all(part.is_meta for part in layer.state.current if part is not None)
        assert layer.state.mask_words.is_meta

    def test_dense_format_has_no_flips(self) -> None:
        layer = make_layer("ternary-8:8")
        for _ in range(2):
            layer.select_()
            assert layer.mask is None
            assert layer.mask_flips is None

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_recomputation_uses_the_selection(self, use_reentrant: bool) -> None:
        layer, x = make_layer("ternary-6:8"), torch.randn(4, 48, requires_grad=True)
        layer(x).square().sum().backward()
        expected, x.grad = (x.grad, layer.weight.grad), None
        layer.weight.grad = None
        layer.select_()
        checkpoint(layer, x, use_reentrant=use_reentrant).square().sum().backward()
        assert torch.equal(x.grad, expected[0])
        assert torch.equal(layer.weight.grad, expected[1])

    def test_inference_mode(self) -> None:
        with torch.inference_mode():
            layer, x = make_layer("ternary-6:8"), torch.randn(4, 48)
            expected = layer(x)
            layer.select_()
            assert layer.is_selected
            assert torch.equal(layer(x), expected)

    def test_deepcopy_of_a_selected_layer(self) -> None:
        layer, x = make_layer("ternary-6:8"), torch.randn(4, 48)
        layer.select_()
        assert torch.equal(copy.deepcopy(layer)(x), layer(x))
