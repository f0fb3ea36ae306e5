# SPDX-License-Identifier: Apache-2.0
"""Every built-in score, quantiser, activation and schedule against its source's formula, in NumPy."""

import numpy as np
import pytest
import torch
from scipy.linalg import hadamard
from torch.fx.experimental.proxy_tensor import make_fx

import reference
from factories import make_layer, tiny_model
from sparse_bitnet.errors import UserError
from sparse_bitnet.layer_config import SparseBitConfig
from sparse_bitnet.nn.convert import convert_, selected
from sparse_bitnet.nn.layer import SparseBitLinear
from sparse_bitnet.nn.straight_through import InputQuantizer
from sparse_bitnet.ops.nm_mask import nm_mask
from sparse_bitnet.ops.quantize_int8 import quantize_int8
from sparse_bitnet.ops.select_ternary import absmean, quantize_ternary
from sparse_bitnet.pattern import NMPattern
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet.training.schedule import phase
from sparse_bitnet.variants.registry import Matrix, find

MATRIX = Matrix()


def chosen(text: str) -> tuple[np.ndarray, ...]:
    """Weight, codes, mask and scale of a layer of that format."""
    layer = make_layer(text)
    selection = layer.select()
    weight = layer.weight.detach()
    return tuple(
        None if part is None else part.double().numpy()
        for part in (weight, selection.codes, selection.mask, selection.weight_scale)
    )


def test_magnitude_and_absmean_are_the_op() -> None:
    """Ranked and quantised by the registered functions as by the one op that computes both."""
    weight = torch.randn(20, 48)
    ranked = find("score", "magnitude").call(weight)
    assert torch.equal(nm_mask(ranked, NMPattern(6, 8)), nm_mask(weight, NMPattern(6, 8)))
    codes, scale = find("quantizer", "absmean").call(weight, None, matrix=MATRIX)
    assert torch.equal(scale, absmean(weight))
    assert torch.equal(codes.to(torch.int8), quantize_ternary(weight)[0])


def test_wanda_ranks_by_weight_times_the_norm_of_the_inputs() -> None:
    layer = make_layer("ternary-6:8,score=wanda").train()
    magnitude = nm_mask(layer.weight, NMPattern(6, 8))
    assert torch.equal(layer.select().mask, magnitude)
    x = torch.randn(3, 5, 48) * torch.rand(48) * 10
    with selected(layer):
        layer(x[:1]).sum().backward()
        layer(x[1:]).sum().backward()
    norm = x.flatten(0, 1).double().square().mean(0).sqrt()
    np.testing.assert_allclose(layer.input_norm, norm, rtol=1e-5)
    expected = reference.top_n((layer.weight.detach().double().abs() * norm).numpy(), 6, 8)
    np.testing.assert_array_equal(layer.select().mask, expected)
    assert not torch.equal(layer.select().mask, magnitude)
    with selected(layer.eval()):
        layer(10 * x)
    np.testing.assert_allclose(layer.input_norm, norm, rtol=1e-5)


def test_sr_ste_adds_the_decay_of_pruned_weights_once_a_step() -> None:
    plain, layer = make_layer("ternary-6:8"), make_layer("ternary-6:8,score=sr-ste:strength=0.5")
    x = torch.randn(4, 48)
    for each in (plain, layer):
        with selected(each):
            each(x).sum().backward()
            each(x).sum().backward()
    mask = plain.select().mask
    expected = plain.weight.grad + 0.5 * plain.weight * ~mask
    torch.testing.assert_close(layer.weight.grad, expected)
    twin = make_layer("ternary-6:8,score=sr-ste:strength=0.5")
    twin.weight, layer.weight.grad = layer.weight, None
    with selected(torch.nn.ModuleList([layer, twin])):
        (layer(x) + twin(x)).sum().backward()
    torch.testing.assert_close(layer.weight.grad, expected)


@pytest.mark.parametrize(
    ("weight_format", "dtype"),
    [("full", torch.float32), ("ternary", torch.float32), ("ternary", torch.bfloat16)],
)
def test_s_ste_shrinks_by_the_largest_pruned_weight(weight_format: str, dtype: torch.dtype) -> None:
    layer = make_layer(f"{weight_format}-2:4,score=s-ste").to(dtype)
    weight = layer.weight.detach().double().numpy()
    groups = np.abs(weight).reshape(20, 12, 4)
    threshold = np.sort(groups, -1)[..., 1:2]  # the (n+1)-th largest of 4
    soft = np.sign(weight) * np.maximum(groups - threshold, 0).reshape(weight.shape)
    selection = layer.select()
    if weight_format == "full":
        np.testing.assert_allclose(selection.value, soft, atol=1e-7)
        x = torch.randn(3, 48)
        torch.testing.assert_close(layer(x), x @ selection.value.t() + layer.bias)
    else:
        scale = np.abs(soft).mean()
        assert selection.weight_scale.item() == pytest.approx(scale, rel=1e-6)
        np.testing.assert_array_equal(selection.codes, np.clip(np.rint(soft / scale), -1, 1))


def test_random_masks_are_those_of_seed_and_position() -> None:
    masks = [make_layer(f"ternary-6:8,score=random:seed={s}").select().mask for s in (0, 0, 1)]
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])
    score = find("score", "random")
    weight = torch.randn(64, 96)
    whole = score.call(weight, matrix=MATRIX)
    part = score.call(weight[40:], matrix=Matrix(first_row=40))
    assert torch.equal(whole[40:], part)
    assert whole.min() >= 0
    assert whole.max() < 1
    assert whole.mean().item() == pytest.approx(0.5, abs=0.02)
    assert abs(np.corrcoef(whole[:, 1:].flatten(), whole[:, :-1].flatten())[0, 1]) < 0.05


def test_quantisers_of_one_scale_equal_their_formulas() -> None:
    weight, codes, mask, scale = chosen("ternary-6:8,quantizer=absmax")
    assert scale == pytest.approx(np.abs(weight).max(), rel=1e-6)
    np.testing.assert_array_equal(codes, np.clip(np.rint(weight / scale), -1, 1) * mask)

    weight, codes, mask, scale = chosen("ternary-6:8,quantizer=twn")
    beyond = np.abs(weight) > 0.7 * np.abs(weight).mean()
    np.testing.assert_array_equal(codes, np.sign(weight) * beyond * mask)
    assert scale == pytest.approx(np.abs(weight)[(beyond * mask) > 0].mean(), rel=1e-6)

    weight, codes, mask, scale = chosen("ternary-3:4,quantizer=binary")
    np.testing.assert_array_equal(codes, np.where(weight >= 0, 1, -1) * mask)
    assert scale == pytest.approx(np.abs(weight)[mask > 0].mean(), rel=1e-6)
    assert (np.abs(codes).reshape(20, 12, 4).sum(-1) == 3).all()


@pytest.mark.parametrize(("quantizer", "size"), [("per-channel", 48), ("per-group:size=16", 16)])
def test_quantisers_of_many_scales_equal_their_formulas(quantizer: str, size: int) -> None:
    weight, codes, mask, scale = chosen(f"ternary-6:8,quantizer={quantizer}")
    groups = np.abs(weight).reshape(20, -1, size).mean(-1)
    np.testing.assert_allclose(scale, groups, rtol=1e-6)
    spread = np.repeat(groups, size, 1)
    np.testing.assert_array_equal(codes, np.clip(np.rint(weight / spread), -1, 1) * mask)

    layer, x = make_layer(f"ternary-6:8,quantizer={quantizer}"), torch.randn(4, 48)
    x.requires_grad_()
    y = layer(x)
    y.sum().backward()
    x_codes, activation_scale = quantize_int8(x)
    effective = torch.tensor(codes * spread).float()
    torch.testing.assert_close(y, (x_codes * activation_scale) @ effective.t() + layer.bias)
    torch.testing.assert_close(x.grad, effective.sum(0).expand(4, -1))
    torch.testing.assert_close(
        layer.weight.grad, (x_codes * activation_scale).sum(0).expand(20, -1)
    )


def test_int4_hadamard_equals_its_formula() -> None:
    x = torch.randn(3, 48)
    inputs = InputQuantizer(SparseBitConfig.parse("ternary-6:8,activation=int4-hadamard"))
    rotated = inputs.transform(x)
    matrix = torch.tensor(hadamard(16)).float() / 4
    torch.testing.assert_close(rotated.view(3, 3, 16), x.view(3, 3, 16) @ matrix)
    codes, scale = inputs.codes(rotated)
    values = rotated.double().numpy()
    expected = np.abs(values).mean(-1, keepdims=True) / np.sqrt(7)
    np.testing.assert_allclose(scale, expected, rtol=1e-5)
    np.testing.assert_array_equal(codes, np.clip(np.rint(values / expected), -8, 7))

    layer = make_layer("ternary-6:8,activation=int4-hadamard")
    effective = layer.select().effective(layer.weight)
    torch.testing.assert_close(layer(x), (codes * scale) @ effective.t() + layer.bias)


def test_int8_hadamard_keeps_the_products_of_weights_before() -> None:
    x, linear = torch.randn(3, 192), torch.nn.Linear(192, 20)
    before, text = linear.weight.detach().clone(), "full-8:8,activation=int8-hadamard:block=32"
    layer = SparseBitLinear.from_linear(linear, SparseBitConfig.parse(text), "a")
    signs = torch.tensor([1 - 2 * (place * 0x9E3779B1 >> 16 & 1) for place in range(192)])
    matrix = torch.block_diag(*[torch.tensor(hadamard(32)).float() / 32**0.5] * 6)
    torch.testing.assert_close(layer.weight.detach(), (before * signs) @ matrix)
    torch.testing.assert_close(layer.inputs.transform(x), (x * signs) @ matrix)
    with torch.no_grad():  # also where it is compiled for inference
        compiled = torch.compile(layer.inputs.transform, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), (x * signs) @ matrix)
    nodes = make_fx(lambda x: layer.inputs.transform(x))(x).graph.nodes
    assert max(n for node in nodes for n in node.args if type(n) is int) < 1 << 31, "as in Triton"
    assert SparseBitLinear.from_linear(layer, layer.config, "a").weight is layer.weight
    with pytest.raises(UserError, match="rotated for activation=int8-hadamard:block=32"):
        SparseBitLinear.from_linear(layer, SparseBitConfig(), "a")
    with pytest.raises(UserError, match=r"layer .*64 is not a power of two that divides 96 inputs"):
        convert_(tiny_model("qwen2", hidden_size=96), SparseBitConfig.parse(text[:-9]))
    mlp = (model := tiny_model("qwen2")).model.layers[0].mlp
    mlp.up_proj.weight = mlp.gate_proj.weight
    with pytest.raises(UserError, match=r"up_proj share their weight, which .* cannot rotate"):
        convert_(model, SparseBitConfig.parse(text.replace("32", "16")))
    tied = tiny_model("qwen2", tie_word_embeddings=True)
    with pytest.raises(UserError, match=r"embed_tokens and lm_head share their weight"):
        convert_(tied, SparseBitConfig.parse(text.replace("32", "16")), lambda *_: True)


def test_schedules_equal_their_formulas() -> None:
    def phases(text: str, steps: int = 8, **more: float) -> list[tuple[int, float]]:
        config = TrainConfig(steps=steps, **more)
        return [phase(config, SparseBitConfig.parse(text), step) for step in range(1, steps + 1)]

    assert phases("ternary-6:8") == [(6, 1.0)] * 8
    for fraction, sparse in ((0.0, 0), (0.25, 2), (0.5, 4), (1.0, 8)):
        expected = [(8, 1.0)] * (8 - sparse) + [(6, 1.0)] * sparse
        assert phases("ternary-6:8", sparse_fraction=fraction) == expected
        assert phases(f"ternary-6:8,schedule=dense-to-sparse:rho={fraction}") == expected
    assert [n for n, _ in phases("ternary-6:8,schedule=gradual")] == [8, 8, 7, 7, 6, 6, 6, 6]
    blends = phases("ternary-8:8,schedule=lambda:until=0.5")
    assert blends == [(8, b) for b in (0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0)]


def test_a_blend_lies_between_full_precision_and_quantised() -> None:
    layer, x = make_layer("ternary-6:8"), torch.randn(4, 48)
    quantised = layer.select().effective(layer.weight)
    masked = layer.weight * layer.select().mask
    layer.blend = 0.25
    selection = layer.select()
    torch.testing.assert_close(selection.value, masked * 0.75 + quantised * 0.25)
    x_codes, activation_scale = quantize_int8(x)
    blended = x * 0.75 + x_codes * activation_scale * 0.25
    torch.testing.assert_close(layer(x), blended @ selection.value.t() + layer.bias)
