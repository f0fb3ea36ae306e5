# SPDX-License-Identifier: Apache-2.0
"""Checkpoints through transformers' from_pretrained: bit for bit, or refused with one line."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from factories import MODEL_FAMILIES, edit_json, edit_tensors, tiny_model
from one_process import run_python
from sparse_bitnet.checkpoint.load import from_pretrained
from sparse_bitnet.checkpoint.quantizers import register
from sparse_bitnet.checkpoint.trained import save_pretrained
from sparse_bitnet.errors import UserError
from sparse_bitnet.export.pack_checkpoint import pack_checkpoint
from sparse_bitnet.nn.convert import convert_, sparse_layers
from sparse_bitnet.nn.layer import SparseBitConfig

FORMATS = (
    "ternary-6:8",
    "full-2:4",
    "ternary-8:8",
    "ternary-6:8,mask_gradient=masked,ste=clipped",
    "ternary-6:8,dense_layers=down_proj+model.layers.0.*",
)
IDS, EMBEDDINGS = torch.arange(24).view(2, 12), "ternary-6:8,embeddings=ternary"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that tests copy; never written to."""
    folder = tmp_path_factory.mktemp("hub") / "saved"
    save_pretrained(convert_(tiny_model(seed=4), SparseBitConfig()), folder)
    return folder


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    """A checkpoint to be damaged."""
    return shutil.copytree(saved, tmp_path / "copied")


def assert_same_model(one: torch.nn.Module, other: torch.nn.Module) -> None:
    first, second = one.state_dict(), other.state_dict()
    assert list(first) == list(second)
    assert all(torch.equal(first[name], second[name]) for name in first)
    formats = [{n: layer.config for n, layer in sparse_layers(m).items()} for m in (one, other)]
    assert formats[0] == formats[1]
    assert torch.equal(one.eval()(IDS).logits, other.eval()(IDS).logits)


class TestRoundTrip:
    @pytest.mark.parametrize("text", FORMATS)
    def test_every_format_loads_bit_for_bit(self, text: str, tmp_path: Path) -> None:
        model = convert_(tiny_model(), SparseBitConfig.parse(text))
        save_pretrained(model, tmp_path / "out")
        assert_same_model(from_pretrained(tmp_path / "out"), model)

    @pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
    @pytest.mark.parametrize("family", MODEL_FAMILIES)
    def test_transformers_alone_loads_every_family(self, family: str, tied: bool, tmp_path: Path):
        model = convert_(tiny_model(family, tie_word_embeddings=tied), SparseBitConfig())
        model.save_pretrained(tmp_path)
        assert_same_model(AutoModelForCausalLM.from_pretrained(tmp_path), model)

    def test_layers_that_a_filter_left_dense_stay_dense(self, tmp_path: Path) -> None:
        model = convert_(tiny_model(), SparseBitConfig(), lambda m, name: name.endswith("up_proj"))
        save_pretrained(model, tmp_path / "out")
        assert_same_model(from_pretrained(tmp_path / "out"), model)
        base = AutoModel.from_pretrained(tmp_path / "out")
        assert list(sparse_layers(base)) == [f"layers.{i}.mlp.up_proj" for i in range(2)]

    def test_heads_that_were_not_stored_stay_dense(self, saved: Path, tmp_path: Path) -> None:
        scores = AutoModelForSequenceClassification.from_pretrained(saved, num_labels=1)
        assert sparse_layers(scores).keys() == sparse_layers(from_pretrained(saved)).keys()
        save_pretrained(convert_(tiny_model(tie_word_embeddings=True).model, "full-6:8"), tmp_path)
        assert type(from_pretrained(tmp_path).lm_head) is torch.nn.Linear
        tied = convert_(tiny_model(tie_word_embeddings=True), "full-6:8", lambda *_: True)
        save_pretrained(tied, tmp_path)
        assert_same_model(from_pretrained(tmp_path), tied)

    def test_bfloat16_masters_load_bit_for_bit(self, tmp_path: Path) -> None:
        model = convert_(tiny_model(dtype=torch.bfloat16), SparseBitConfig())
        save_pretrained(model, tmp_path / "out")
        loaded = from_pretrained(tmp_path / "out", dtype="auto")
        assert loaded.dtype == torch.bfloat16
        assert_same_model(pickle.loads(pickle.dumps(loaded)), model)

    def test_reconverted_after_loading_saves_the_new_format(self, saved: Path, tmp_path: Path):
        model = convert_(from_pretrained(saved), SparseBitConfig.parse("full-2:4"))
        model.save_pretrained(tmp_path)
        assert_same_model(from_pretrained(tmp_path), model)


@pytest.mark.parametrize("order", ["sparse_bitnet, transformers", "transformers, sparse_bitnet"])
def test_a_fresh_process_loads_after_either_order_of_imports(
    order: str, saved: Path, tmp_path: Path
) -> None:
    script = f"""
import {order}, sys, torch
torch.set_num_threads(1)
model = transformers.AutoModelForCausalLM.from_pretrained({str(saved)!r})
torch.save((model.state_dict(), model(torch.arange(24).view(2, 12)).logits), sys.argv[1])
"""
    run_python(script, str(tmp_path / "loaded.pt"))
    state, logits = torch.load(tmp_path / "loaded.pt")
    model = from_pretrained(saved)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(IDS).logits, logits)


class TestRefusals:
    @pytest.mark.parametrize("load", [from_pretrained, AutoModelForCausalLM.from_pretrained])
    @pytest.mark.parametrize(
        ("change", "line"),
        [
            (lambda c: c.update(version=2), r"version 2 is not readable .* upgrade sparse-bitnet"),
            (lambda c: c.update(version="1"), "version 1 is not readable"),
            (lambda c: c.pop("version"), "quantization_config lacks version"),
            (lambda c: c.pop("format"), "quantization_config lacks format"),
            (lambda c: c.pop("modules_to_not_convert"), "lacks modules_to_not_convert"),
            (lambda c: c.update(modules_to_not_convert="lm_head"), "not a list of names"),
            (lambda c: c["format"].pop("pattern"), r"config\.json: .* lacks pattern"),
            (lambda c: c["format"].update(depth=3), "unknown depth"),
            (lambda c: c.update(format="ternary-6:8"), "not a table of fields"),
            (lambda c: c["format"].update(weight="binary"), "choose one of"),
            (
                lambda c: c["format"].update(pattern="5:6"),
                r"q_proj: in_features 64 .* multiple of 6",
            ),
        ],
    )
    def test_a_config_with_a_wrong_field_is_refused(self, load, change, line: str, copied) -> None:
        entry = json.loads((copied / "config.json").read_text())["quantization_config"]
        change(entry)
        edit_json(copied / "config.json", quantization_config=entry)
        with pytest.raises(UserError, match=line) as raised:
            load(copied)
        assert "\n" not in str(raised.value)

    def test_a_weight_of_another_shape_is_refused(self, copied: Path) -> None:
        name = "model.layers.1.mlp.up_proj.weight"
        edit_tensors(copied, {name: torch.zeros(8, 64)})
        with pytest.raises(
            UserError, match=rf"{name} is \[8, 64\], its config\.json needs \[96, 64\]"
        ):
            from_pretrained(copied)
        with pytest.raises(RuntimeError):
            AutoModelForCausalLM.from_pretrained(copied)

    @pytest.mark.parametrize(
        "name",
        [
            *("model.norm.weight", "model.layers.0.self_attn.q_proj.bias"),
            "model.layers.1.mlp.up_proj.weight",
        ],
    )
    def test_a_missing_weight_is_refused(self, name: str, copied: Path) -> None:
        edit_tensors(copied, {name: None})
        with pytest.raises(UserError, match=f"lacks {name}: the files are incomplete"):
            from_pretrained(copied)

    def test_a_truncated_file_is_refused(self, copied: Path) -> None:
        file = copied / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-5000])
        with pytest.raises(UserError, match=r"cannot load a model from .*incomplete") as raised:
            from_pretrained(copied)
        assert "\n" not in str(raised.value)

    @pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "."])
    def test_missing_file_or_folder_is_one_line(self, missing: str, copied: Path) -> None:
        shutil.rmtree(copied) if missing == "." else (copied / missing).unlink()
        with pytest.raises(
            UserError, match=r"cannot load a model from|no such folder|holds no"
        ) as raised:
            from_pretrained(copied)
        assert "\n" not in str(raised.value)

    def test_saving_an_unconverted_model_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="has no SparseBitLinear to save; use convert_ first"):
            save_pretrained(tiny_model(), tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_saving_layers_of_two_formats_is_refused(self, tmp_path: Path) -> None:
        model = convert_(tiny_model(), SparseBitConfig())
        with pytest.raises(
            UserError, match=r"layer .*q_proj would stay ternary-6:8 beside full-6:8"
        ):
            convert_(model, "full-6:8", lambda m, name: name.endswith("up_proj"))
        convert_(model.model.layers[0].mlp, "full-6:8")
        with pytest.raises(UserError, match="one checkpoint holds one format"):
            save_pretrained(model, tmp_path / "out")

    def test_saving_a_new_head_or_adapters_is_refused(self, tmp_path: Path) -> None:
        model = convert_(tiny_model(tie_word_embeddings=False, hidden_size=64), EMBEDDINGS)
        model.resize_token_embeddings(130)
        with pytest.raises(UserError, match="a new embedding or head: call convert_ again"):
            save_pretrained(model, tmp_path / "out")
        model.peft_config = {"default": None}
        with pytest.raises(UserError, match="has adapters: merge them first"):
            save_pretrained(model, tmp_path / "out")
        with pytest.raises(UserError, match="has adapters: convert it first"):
            convert_(model, "ternary-6:8")

    def test_saving_over_other_files_is_refused(self, tmp_path: Path) -> None:
        model = convert_(tiny_model(), SparseBitConfig())
        (tmp_path / "thesis.txt").write_text("years of work")
        with pytest.raises(UserError, match="neither empty nor a checkpoint; choose another"):
            save_pretrained(model, tmp_path)
        with pytest.raises(UserError, match=r"cannot write .*thesis\.txt"):
            save_pretrained(model, tmp_path / "thesis.txt")
        (tmp_path / "config.json").touch()
        with pytest.raises(UserError, match=r"holds thesis\.txt, no checkpoint's: choose another"):
            save_pretrained(model, tmp_path)
        assert (tmp_path / "thesis.txt").read_text() == "years of work"

    def test_saving_replaces_a_checkpoint_and_fills_an_empty_folder(self, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        for text in FORMATS[:2]:
            model = convert_(tiny_model(), SparseBitConfig.parse(text))
            save_pretrained(model, tmp_path / "out")
            assert_same_model(from_pretrained(tmp_path / "out"), model)
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
        (tmp_path / "out" / "tokenizer.json").write_text("{}")
        save_pretrained(model, tmp_path / "out")
        assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
        for name in ("checkpoint-5", "models"):
            (other := tmp_path / "out" / name).mkdir()
            with pytest.raises(UserError, match=rf"holds {name}, no checkpoint's: choose"):
                save_pretrained(model, tmp_path / "out")
            other.rmdir()


@pytest.mark.parametrize("kind", ["trained", "packed"])
def test_transformers_alone_refuses_the_folder_and_says_what_to_import(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    folder = saved
    if kind == "packed":
        register()
        folder = tmp_path / "packed"
        pack_checkpoint(saved, folder)
    for name in ("sparse_bitnet", "sparse_bitnet_packed"):
        monkeypatch.delitem(AUTO_QUANTIZATION_CONFIG_MAPPING, name, raising=False)
    with pytest.raises(ValueError, match="pip install sparse-bitnet, then import sparse_bitnet"):
        AutoModelForCausalLM.from_pretrained(folder)
    assert "import sparse_bitnet" in (folder / "README.md").read_text()
    monkeypatch.undo()
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.config._attn_implementation == "sdpa"
    asked = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    assert asked.config._attn_implementation == "eager"


def test_blocks_that_share_weights_are_stored_once(tmp_path: Path) -> None:
    model = convert_(tiny_model("zamba2").eval(), SparseBitConfig())
    save_pretrained(model, tmp_path)
    loaded = from_pretrained(tmp_path).eval()
    first, second = (loaded.model.layers[place].shared_transformer for place in (1, 3))
    assert first.feed_forward.down_proj.weight is second.feed_forward.down_proj.weight
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
