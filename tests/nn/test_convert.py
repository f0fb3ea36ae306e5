# SPDX-License-Identifier: Apache-2.0
"""convert_ on the model families, sparse_layers, and one selection per optimiser step."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from factories import MODEL_FAMILIES, tiny_model, train_on_one_batch
from sparse_bitnet.errors import UserError
from sparse_bitnet.nn.convert import convert_, selected, sparse_layers
from sparse_bitnet.nn.layer import SparseBitConfig, SparseBitLinear

TERNARY = SparseBitConfig()
ATTENTION = [f"self_attn.{name}_proj" for name in "qkvo"]
MLP = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
BLOCK_LAYERS = {
    "qwen2": ("model.layers", ATTENTION + MLP),
    "llama": ("model.layers", ATTENTION + MLP),
    "qwen3": ("model.layers", ATTENTION + MLP),
    "gpt_neox": (
        "gpt_neox.layers",
        ["attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"],
    ),
}


def batch() -> Tensor:
    return torch.randint(0, 96, (2, 16))


def test_format_can_be_given_as_text() -> None:
    formats = {
        str(layer.config) for layer in sparse_layers(convert_(tiny_model(), "full-2:4")).values()
    }
    assert formats == {"full-2:4"}
    with pytest.raises(UserError, match="format 'ternary': write ternary-n:m"):
        convert_(tiny_model(), "ternary")


def test_a_config_that_two_models_share_is_left_as_it_was() -> None:
    model = tiny_model()
    student = convert_(type(model)(model.config), "full-2:4")
    assert not hasattr(model.config, "quantization_config")
    assert student.model.layers[0].self_attn.config is student.config


class TestFamilies:
    @pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
    @pytest.mark.parametrize("family", MODEL_FAMILIES)
    def test_exactly_the_linears_of_the_blocks_are_converted(self, family: str, tied: bool) -> None:
        model = tiny_model(family, tie_word_embeddings=tied)
        before = dict(model.named_parameters())
        assert convert_(model, TERNARY) is model
        after = dict(model.named_parameters())
        assert list(before) == list(after)
        assert all(before[name] is after[name] for name in before)
        blocks, names = BLOCK_LAYERS[family]
        expected = {f"{blocks}.{index}.{name}" for index in range(2) for name in names}
        assert set(sparse_layers(model)) == expected
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        assert type(head) is nn.Linear
        assert type(embedding) is nn.Embedding
        assert (head.weight is embedding.weight) == tied

    @pytest.mark.parametrize("family", MODEL_FAMILIES)
    def test_converted_model_learns_one_batch(self, family: str) -> None:
        losses = train_on_one_batch(convert_(tiny_model(family), TERNARY), batch())
        assert losses[-1] < 0.6 * losses[0]

    @pytest.mark.parametrize("family", MODEL_FAMILIES)
    def test_converted_model_generates(self, family: str) -> None:
        model, ids = convert_(tiny_model(family), TERNARY).eval(), batch()
        expected = model.generate(ids, max_new_tokens=4, do_sample=False)
        with selected(model):
            assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), expected)


class TestConvert:
    def test_a_model_without_repeated_blocks_keeps_its_head_dense(self) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed = nn.Embedding(8, 8)
                self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

            def get_output_embeddings(self) -> nn.Module:
                return self.head

        assert list(sparse_layers(convert_(Model(), TERNARY))) == ["body"]

    def test_dense_layers_hold_for_layers_converted_before_and_under_a_filter(self) -> None:
        model = convert_(tiny_model(), TERNARY)
        weights = [layer.weight for layer in sparse_layers(model).values()]
        config = SparseBitConfig(dense_layers=("down_proj",))
        convert_(model, config, lambda module, name: "mlp" in name)
        layers = sparse_layers(model)
        assert not any("down_proj" in name for name in layers)
        assert type(model.model.layers[0].mlp.down_proj) is nn.Linear
        assert {id(weight) for weight in weights} <= {id(p) for p in model.parameters()}

    def test_a_layer_that_no_pattern_divides_may_stay_dense(self) -> None:
        model = tiny_model(intermediate_size=172)
        name = r"layer model\.layers\.0\.mlp\.down_proj"
        with pytest.raises(UserError, match=f"{name}: in_features 172 is not a multiple of 8"):
            convert_(model, TERNARY)
        groups = SparseBitConfig.parse("ternary-4:4,quantizer=per-group:size=64")
        with pytest.raises(UserError, match=r"down_proj: .*size=64 does not divide a row of 172"):
            convert_(model, groups)
        assert not sparse_layers(model)
        assert getattr(model.config, "quantization_config", None) is None
        convert_(model, SparseBitConfig(dense_layers=("down_proj",)))
        assert len(sparse_layers(model)) == 12

    def test_converting_again_takes_the_new_config(self) -> None:
        model = convert_(tiny_model(), TERNARY)
        names = list(sparse_layers(model))
        config = SparseBitConfig.parse("full-2:4")
        convert_(model, config)
        assert list(sparse_layers(model)) == names
        assert all(layer.config == config for layer in sparse_layers(model).values())
        assert model.config.quantization_config["format"] == config.to_dict()

    def test_a_layer_at_two_places_stays_one_and_shared_weights_stay_shared(self) -> None:
        shared, other = nn.Linear(8, 8), nn.Linear(8, 8)
        other.weight = shared.weight
        model = convert_(nn.Sequential(shared, other, shared), TERNARY)
        assert model[0] is model[2]
        assert isinstance(model[0], SparseBitLinear)
        assert model[0].weight is model[1].weight

    @pytest.mark.parametrize("bias", [True, False])
    def test_a_layer_keeps_hooks_mode_bias_type_and_device(self, bias: bool) -> None:
        linear = nn.Linear(8, 8, bias=bias, dtype=torch.bfloat16, device="meta")
        handle = linear.register_forward_hook(lambda layer, args, y: y[:1])
        model = convert_(nn.Sequential(linear).eval(), TERNARY)
        x = torch.empty(2, 8, dtype=torch.bfloat16, device="meta")
        assert model(x).shape == (1, 8)
        handle.remove()
        assert model(x).shape == (2, 8)
        assert not model[0].training
        assert (model[0].bias is not None) == bias
        assert "bias" in model[0]._parameters
        assert (model[0].weight.dtype, model[0].weight.device.type) == (torch.bfloat16, "meta")
        with torch.no_grad():
            convert_(model.float(), "ternary-6:8,quantizer=per-channel")(x.float())

    def test_other_subclasses_of_linear_are_not_converted(self) -> None:
        attention = nn.MultiheadAttention(16, 2)
        before = type(attention.out_proj)
        model = nn.Sequential(attention, nn.Linear(16, 16))
        with pytest.raises(
            UserError, match=r"80% of the weights .*: 0\.in_proj_weight, 0\.out_proj"
        ):
            convert_(model, TERNARY)
        convert_(model, TERNARY, lambda module, name: True)
        assert type(attention.out_proj) is before

    def test_a_layer_with_a_computed_weight_is_not_converted(self) -> None:
        model = nn.Sequential(prune.l1_unstructured(nn.Linear(8, 8), "weight", 0.5))
        with pytest.raises(UserError, match="no linear layer to convert"):
            convert_(model, TERNARY)

    def test_a_bare_linear_cannot_be_replaced_in_place(self) -> None:
        with pytest.raises(UserError, match="wrap it"):
            convert_(nn.Linear(8, 8), TERNARY)
        (offloaded := nn.Linear(8, 8)).forward = lambda x: x
        with pytest.raises(UserError, match="layer 0 has a forward of its own"):
            convert_(nn.Sequential(offloaded), TERNARY)


class TestSelected:
    def test_outermost_selected_releases_even_after_an_error(self) -> None:
        layers = list(sparse_layers(model := convert_(tiny_model(), TERNARY)).values())
        with selected(model):
            with selected(model):
                model(batch())
            assert all(layer.is_selected for layer in layers)
        with pytest.raises(RuntimeError, match="of the user"), selected(model):
            raise RuntimeError("of the user")
        assert not any(layer.is_selected for layer in layers)

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_checkpointing_changes_no_gradient(self, use_reentrant: bool) -> None:
        plain, ids = convert_(tiny_model(), TERNARY).train(), batch()
        checkpointed = copy.deepcopy(plain)
        checkpointed.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        for model in (plain, checkpointed):
            with selected(model):
                model(input_ids=ids, labels=ids).loss.backward()
        for ours, theirs in zip(plain.parameters(), checkpointed.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)

    def test_evaluation_does_not_change_flip_counts(self) -> None:
        ids = batch()

        def flips(evaluate: bool) -> list[list[Tensor | None]]:
            trained, counts = convert_(tiny_model(), TERNARY).train(), []
            optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
            for _ in range(3):
                with selected(trained):
                    counts.append([layer.mask_flips for layer in sparse_layers(trained).values()])
                    trained(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if evaluate:
                    with torch.no_grad(), selected(trained.eval()):
                        trained(ids)
                    trained.train()
            return counts

        plain = flips(evaluate=False)
        assert plain == flips(evaluate=True)
        assert all(count is None for count in plain[0])
        assert all(sum(counts) > 0 for counts in plain[1:])


def test_weights_that_are_read_past_their_layer_stay_as_they_act() -> None:
    from transformers import MambaConfig, MambaForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 32, "state_size": 4}
    with pytest.warns(UserWarning, match=r"4 matrices of Mamba.* stay as they are, 48% .*out_proj"):
        names = sparse_layers(convert_(MambaForCausalLM(MambaConfig(**sizes)), TERNARY))
    assert {name.rpartition(".")[2] for name in names} == {"in_proj"}
    model = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True))
    trained = convert_(model, TERNARY).eval()(x := torch.randn(2, 3, 16))
    with torch.no_grad():
        torch.testing.assert_close(model(x), trained, rtol=1e-4, atol=1e-4)
    with pytest.raises(UserError, match=r"the input is torch\.int64, not floating-point"):
        model[0].linear1(torch.ones(1, 16, dtype=torch.int64))
