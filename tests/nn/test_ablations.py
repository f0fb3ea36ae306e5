# SPDX-License-Identifier: Apache-2.0
"""Each ablation of the paper differs from the baseline where it should, and only there."""

import torch

from factories import VARIANTS, make_layer
from sparse_bitnet.nn.layer import SparseBitConfig
from sparse_bitnet.nn.selection import select


class TestAblations:
    def test_mask_without_grad_changes_the_gradient_only(self) -> None:
        baseline, ablation = (
            make_layer(VARIANTS["baseline"]),
            make_layer(VARIANTS["mask without grad"]),
        )
        x, grad_y = torch.randn(16, 48), torch.randn(16, 20)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        outputs = [baseline(inputs[0]), ablation(inputs[1])]
        assert torch.equal(*outputs)
        for y in outputs:
            y.backward(grad_y)
        mask = baseline.select().mask
        assert torch.equal(inputs[0].grad, inputs[1].grad)
        assert torch.equal(baseline.bias.grad, ablation.bias.grad)
        assert torch.equal(ablation.weight.grad, baseline.weight.grad * mask)
        assert not torch.equal(ablation.weight.grad, baseline.weight.grad)

    def test_mask_from_quantized_weight_keeps_the_first_not_the_largest(self) -> None:
        weight = torch.tensor([[0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3]])
        master = select(weight, SparseBitConfig.parse("ternary-6:8"))
        codes = select(weight, SparseBitConfig.parse("ternary-6:8,mask_source=ternary"))
        assert master.mask.tolist() == [[False] * 2 + [True] * 6]
        assert codes.mask.tolist() == [[True] * 6 + [False] * 2]
        assert master.weight_scale == codes.weight_scale
        assert not torch.equal(master.codes, codes.codes)

    def test_sparse_before_quant_lowers_the_scale_and_never_loses_a_code(self) -> None:
        weight = torch.randn(64, 64)
        baseline = select(weight, SparseBitConfig.parse("ternary-6:8"))
        ablation = select(weight, SparseBitConfig.parse("ternary-6:8,scale_source=masked"))
        assert torch.equal(baseline.mask, ablation.mask)
        assert ablation.weight_scale < baseline.weight_scale
        assert (ablation.codes.abs() >= baseline.codes.abs()).all()
        assert not torch.equal(ablation.codes, baseline.codes)

    def test_order_alone_makes_no_difference(self) -> None:
        """With the dense scale, mask-then-round is round-then-mask: only the scale differs."""
        layer = make_layer("ternary-6:8")
        chosen = layer.select()
        masked = layer.weight * chosen.mask
        codes = select(masked, SparseBitConfig.parse("ternary-8:8")).codes
        rounded_at_dense_scale = (masked / chosen.weight_scale).round().clamp(-1, 1)
        assert torch.equal(rounded_at_dense_scale, chosen.codes.float())
        assert not torch.equal(codes, chosen.codes)
