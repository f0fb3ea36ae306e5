# SPDX-License-Identifier: Apache-2.0
"""The GPU inference path in plain PyTorch: merged layers, routes, fixed cache, decode steps."""

import pytest
import torch

from factories import make_layer, tiny_model
from sparse_bitnet.engine.gpu.blocks import Block, Int8Head, int8_head_, prepare_, split_attention
from sparse_bitnet.engine.gpu.decode import SlotDecoder
from sparse_bitnet.engine.gpu.linear import RoutePolicy, TernaryLinear
from sparse_bitnet.engine.gpu.measure import measure_, measured_policy, ternary_layers
from sparse_bitnet.errors import UserError
from sparse_bitnet.nn.convert import convert_, selected
from sparse_bitnet.nn.layer import SparseBitConfig
from sparse_bitnet.ops.tuning_cache import LayerShape, TuningCache
from sparse_bitnet.pattern import NMPattern

ROUTES = ["dense", "sparse", "packed"]


def sparse_model(text: str = "ternary-6:8", family: str = "qwen2"):
    model = convert_(tiny_model(family), SparseBitConfig.parse(text)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.uniform_(-0.1, 0.1)
    return model


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("text", ["ternary-6:8", "ternary-2:4", "ternary-8:8", "ternary-7:8"])
def test_a_layer_gives_the_bits_of_the_trained_one(text, route):
    trained = make_layer(text)
    chosen = trained.select()
    layer = TernaryLinear(
        chosen.codes,
        chosen.weight_scale,
        trained.bias,
        trained.config.pattern,
        RoutePolicy(always=route),
    )
    for shape in ((48,), (2, 3, 48), (80, 48)):
        x = torch.randn(shape)
        assert torch.equal(layer(x), trained(x))
    # 7:8 and 8:8 have no sparse form and run dense.
    assert (layer.compressed is not None) == (route == "sparse" and text[-3] in "62")


def test_the_table_decides_and_only_the_forms_it_uses_are_kept():
    trained = make_layer("ternary-6:8")
    chosen = trained.select()
    shape = LayerShape(20, 48, NMPattern(6, 8))
    table = TuningCache(fastest={shape: {1: "packed", 64: "packed", 128: "sparse"}})
    policy = RoutePolicy(table=table)
    layer = TernaryLinear(
        chosen.codes, chosen.weight_scale, trained.bias, shape.pattern, policy, name="up"
    )
    assert [policy.choose(shape, tokens) for tokens in (1, 64, 128)] == [
        "packed",
        "packed",
        "sparse",
    ]
    assert layer.compressed is not None
    assert layer.weight_packed is not None
    for tokens in (1, 200):
        x = torch.randn(tokens, 48)
        assert torch.equal(layer(x), trained(x))
    plain = TernaryLinear(chosen.codes, chosen.weight_scale, None, shape.pattern, RoutePolicy())
    assert plain.compressed is None
    assert plain.weight_packed is None
    layer.set_policy_(RoutePolicy(always="packed"))
    layer.drop_unused_()
    assert layer.compressed is None
    assert layer.weight_packed is not None


def test_a_models_own_shapes_are_measured_once():
    model, table = prepare_(sparse_model(), RoutePolicy()), TuningCache()
    assert measure_(table, model, (1, 70), 2)
    assert table.fastest.keys() == ternary_layers(model).keys()
    assert all(found.keys() == {1, 70} for found in table.fastest.values())
    assert not measure_(table, model)


def test_the_environment_can_force_a_product(monkeypatch):
    model = prepare_(sparse_model(), RoutePolicy())
    for kernel, always in (("auto", None), ("cusparselt", "sparse"), ("triton", "packed")):
        monkeypatch.setenv("SPARSE_BITNET_KERNEL", kernel)
        assert measured_policy(model).always == always
        kept = model.model.layers[0].qkv
        assert (kept.compressed is not None) == (always == "sparse")
        assert (kept.weight_packed is not None) == (always == "packed")


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("route", ROUTES)
def test_a_model_gives_the_same_logits(family, route):
    model = sparse_model(family=family)
    ids = torch.randint(0, 96, (2, 17))
    with torch.no_grad(), selected(model):
        expected = model(ids).logits
    prepare_(model, RoutePolicy(always=route))
    assert all(isinstance(layer, Block) for layer in model.model.layers)
    found = SlotDecoder(model, 2, 17).prompt(slice(None), ids, keep=17)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_packed_checkpoints_are_prepared_too(tmp_path):
    from sparse_bitnet.checkpoint.hub import save_pretrained
    from sparse_bitnet.checkpoint.load import from_pretrained
    from sparse_bitnet.export.pack_checkpoint import pack_checkpoint

    model = sparse_model()
    save_pretrained(model, tmp_path / "model")
    pack_checkpoint(tmp_path / "model", tmp_path / "packed", embeddings="float32")
    ids = torch.randint(0, 96, (1, 9))
    with torch.no_grad():
        expected = model.eval()(ids).logits
    packed = prepare_(from_pretrained(tmp_path / "packed").eval(), RoutePolicy(always="packed"))
    found = SlotDecoder(packed, 1, 9).prompt(slice(None), ids, keep=9)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_what_the_kernels_do_not_take_is_refused():
    for model, why in (
        (sparse_model("full-6:8"), r"layer 0\.q_proj: the GPU kernels take ternary"),
        (sparse_model(family="gpt_neox"), "runs qwen2, qwen3, llama, the model is gpt_neox"),
        (tiny_model(use_sliding_window=True, max_window_layers=1), "sliding_attention"),
        (
            tiny_model(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
            "no ropes that follow the length, the model has dynamic",
        ),
        (tiny_model(hidden_act="gelu"), "SwiGLU"),
    ):
        with pytest.raises(UserError, match=why):
            prepare_(model, RoutePolicy())
    mixed = sparse_model()
    mixed.model.layers[1].self_attn.k_proj = tiny_model().model.layers[1].self_attn.k_proj
    with pytest.raises(UserError, match=r"layer 1\.q_proj and what shares its input are not all"):
        prepare_(mixed, RoutePolicy())


def test_a_packed_layer_with_a_norm_of_its_own_is_refused(tmp_path):
    from sparse_bitnet.checkpoint.hub import save_pretrained
    from sparse_bitnet.checkpoint.load import from_pretrained
    from sparse_bitnet.export.pack_checkpoint import pack_checkpoint

    save_pretrained(sparse_model(), tmp_path / "model")
    pack_checkpoint(tmp_path / "model", tmp_path / "packed")
    packed = from_pretrained(tmp_path / "packed").eval()
    packed.model.layers[0].mlp.down_proj.norm = torch.nn.RMSNorm(96)
    with pytest.raises(UserError, match=r"layer 0\.down_proj has a norm of its own"):
        prepare_(packed, RoutePolicy())


def test_dense_layers_are_merged_and_unchanged():
    model, ids = tiny_model(), torch.randint(0, 96, (2, 6))
    with torch.no_grad():
        expected = model(ids).logits
    prepare_(model, RoutePolicy())
    found = SlotDecoder(model, 2, 6).prompt(slice(None), ids, keep=6)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3"])
def test_steps_over_the_fixed_cache_equal_the_whole_forward(family):
    model, ids = sparse_model(family=family), torch.randint(0, 96, (3, 12))
    with torch.no_grad(), selected(model):
        expected = model(ids).logits
    prepare_(model, RoutePolicy(always="dense"))
    decoder = SlotDecoder(model, 3, 12)
    for _ in range(2):
        found = [decoder.prompt(slice(None), ids[:, :4])[:, -1]]
        found = [decoder.prompt(slice(None), ids[:, 4:7], 4)[:, -1]]
        found += [decoder.step(ids[:, at], [at] * 3) for at in range(7, 12)]
        torch.testing.assert_close(torch.stack(found, 1), expected[:, 6:], rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_split_attention_attends_up_to_each_position():
    from torch.nn.attention.flex_attention import flex_attention

    query, keys, values = (
        torch.randn(2, 4, 1, 16),
        torch.randn(2, 2, 9, 16),
        torch.randn(2, 2, 9, 16),
    )
    positions = torch.tensor([3, 8])
    found = split_attention(flex_attention, query, keys, values, positions, {"enable_gqa": True})
    for row, last in enumerate(positions.tolist()):
        expected = torch.nn.functional.scaled_dot_product_attention(
            query[row], keys[row, :, : last + 1], values[row, :, : last + 1], enable_gqa=True
        )
        torch.testing.assert_close(found[row], expected)


def test_the_int8_head_is_near_the_one_it_replaces():
    model = sparse_model()
    ids = torch.randint(0, 96, (2, 6))
    with torch.no_grad():
        expected = model(ids).logits
        int8_head_(model)
        found = model(ids).logits
    assert isinstance(model.lm_head, Int8Head)
    assert model.lm_head.codes.dtype == torch.int8
    assert (found - expected).abs().max() < 0.02 * expected.abs().max()
