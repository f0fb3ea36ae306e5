# SPDX-License-Identifier: Apache-2.0
"""Functions registered by users: in text forms, in training, in checkpoints, in packed files."""

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from factories import make_layer, tiny_model, train_on_one_batch
from sparse_bitnet.checkpoint.load import from_pretrained
from sparse_bitnet.checkpoint.open_checkpoint import open_checkpoint
from sparse_bitnet.checkpoint.trained import save_pretrained
from sparse_bitnet.errors import UserError
from sparse_bitnet.export.pack_checkpoint import pack_checkpoint
from sparse_bitnet.layer_config import SparseBitConfig
from sparse_bitnet.nn.convert import convert_, selected, sparse_layers
from sparse_bitnet.nn.selection import Selection, select
from sparse_bitnet.ops.nm_mask import nm_mask
from sparse_bitnet.pattern import NMPattern
from sparse_bitnet.variants import registry
from sparse_bitnet.variants.registry import (
    Matrix,
    register_activation,
    register_quantizer,
    register_schedule,
    register_score,
)

FORMATS = (
    "ternary-6:8,score=wanda",
    "ternary-2:4,score=s-ste",
    "full-2:4,score=s-ste",
    "ternary-6:8,score=random:seed=2",
    "ternary-6:8,quantizer=twn",
    "ternary-3:4,quantizer=binary",
    "ternary-6:8,activation=int4-hadamard",
    "ternary-6:8,quantizer=per-group:size=16",
)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A score and a quantiser of this module, gone afterwards."""
    monkeypatch.setattr(
        registry, "_ENTRIES", {kind: dict(entries) for kind, entries in registry._ENTRIES.items()}
    )

    @register_score("smallest")
    def smallest(weight: Tensor, *, power: float = 1.0) -> Tensor:
        return -(weight.abs() ** power)

    @register_quantizer("loud")
    def loud(weight: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        return weight.sign() * 2, weight.abs().mean()


def test_text_forms_round_trip(own: None) -> None:
    config = SparseBitConfig.parse("ternary-6:8,score=smallest:power=2")
    assert config.score == "smallest:power=2.0"
    assert SparseBitConfig.parse(str(config)) == config
    assert config.to_dict()["registered_by"] == f"score={__name__}"
    assert SparseBitConfig.from_dict(config.to_dict()) == config
    assert SparseBitConfig.parse("ternary-6:8,score=smallest:power=1").score == "smallest"
    assert "registered_by" not in SparseBitConfig.parse("ternary-6:8,score=wanda").to_dict()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("ternary-6:8,score=wnda", r"score='wnda' is not registered \(did you mean wanda\?\)"),
        ("ternary-6:8,score=random:sed=1", "'sed=1' is not field=value with one of: seed"),
        ("ternary-6:8,score=magnitude:x=1", "with one of: it has none"),
        ("ternary-6:8,score=random:seed=1:seed=2", "seed is given twice; leave one out"),
        ("ternary-6:8,score=random:seed=a", "'a' is not a finite number"),
        ("ternary-6:8,score=sr-ste:strength=nan", "'nan' is not a finite number"),
        ("full-6:8,quantizer=twn", "quantizer=twn needs weight=ternary"),
        ("ternary-8:8,score=wanda", "score=wanda needs a mask, but 8:8 keeps all"),
        ("ternary-6:8,mask_source=ternary,score=wanda", "leave out score"),
        ("ternary-6:8,mask_source=ternary,schedule=lambda", "blending schedule"),
    ],
)
def test_invalid_formats_are_refused(text: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason) as raised:
        SparseBitConfig.parse(text)
    assert "\n" not in str(raised.value)


def test_invalid_names_are_refused() -> None:
    with pytest.raises(UserError, match="'wanda' is taken"):
        register_score("wanda")(lambda weight: weight)
    with pytest.raises(UserError, match="names are letters"):
        register_schedule("a:b")
    with pytest.raises(UserError, match="its field power needs a number"):
        register_activation("powerful")(lambda x, *, power=None: x)


def test_a_registered_score_ranks_by_value(own: None) -> None:
    layer = make_layer("ternary-6:8,score=smallest")
    groups = layer.weight.detach().abs().unflatten(-1, (-1, 8))
    pruned = (~layer.select().mask).unflatten(-1, (-1, 8))
    assert torch.equal(pruned, groups >= groups.topk(2, -1).values[..., 1:])


def test_wrong_results_of_registered_functions_are_refused(own: None) -> None:
    with pytest.raises(UserError, match="quantizer loud: its codes are not -1, 0 and 1"):
        make_layer("ternary-6:8,quantizer=loud").select()
    register_quantizer("unrounded")(lambda weight, mask: (weight.clamp(-1, 1), weight.abs().mean()))
    with pytest.raises(UserError, match="quantizer unrounded: its codes are not -1, 0 and 1"):
        make_layer("ternary-6:8,quantizer=unrounded").select()
    register_score("narrow")(lambda weight: weight[:, :1])
    with pytest.raises(UserError, match=r"narrow returned \[20, 1\] for a weight of \[20, 48\]"):
        make_layer("ternary-6:8,score=narrow").select()
    register_activation("whole")(lambda x: (x, x))
    with pytest.raises(UserError, match="activation whole: returned"):
        make_layer("ternary-6:8,activation=whole")(torch.randn(1, 48))
    register_quantizer("odd")(lambda weight, mask: (weight.sign(), torch.ones(3)))
    with pytest.raises(UserError, match=r"quantizer odd: a scale of \[3\]"):
        make_layer("ternary-6:8,quantizer=odd").select()


def test_a_scale_of_some_rows_is_refused_whatever_the_score_asked_for(own: None) -> None:
    register_score("shared")(
        lambda weight, *, matrix: weight.abs() / matrix.max(weight.abs().max())
    )
    register_quantizer("local")(lambda weight, mask: (weight.sign(), weight.abs().mean()))
    config = SparseBitConfig.parse("ternary-6:8,score=shared,quantizer=local")
    rows = Matrix()
    rows.reduce_sum = rows.reduce_max = torch.clone
    with pytest.raises(UserError, match="quantizer local: its scale is that of some rows"):
        select(torch.randn(20, 48), config, matrix=rows)


@pytest.mark.parametrize("rows", [0, 1, 4])
@pytest.mark.parametrize("quantizer", [*registry._ENTRIES["quantizer"]])
def test_two_processes_quantise_their_rows_as_one_does_all(quantizer: str, rows: int) -> None:
    config = SparseBitConfig.parse(f"ternary-6:8,score=random,quantizer={quantizer}")
    weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    both, held = threading.Barrier(2), [torch.empty(0)] * 2

    def process(rank: int) -> Selection:
        def held_by_both(parts: Tensor) -> Tensor:
            held[rank] = parts
            both.wait()
            every = torch.stack(held)
            both.wait()
            return every

        matrix = Matrix(first_row=rank * rows)
        matrix.reduce_sum = lambda parts: held_by_both(parts).sum(0)
        matrix.reduce_max = lambda parts: held_by_both(parts).amax(0)
        try:
            return select(weight[rows:] if rank else weight[:rows], config, matrix=matrix)
        except BaseException:
            both.abort()
            raise

    whole = select(weight, config)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(process, range(2))
    for part in ("codes", "mask", "value"):
        if (wanted := getattr(whole, part)) is not None:
            joined = torch.cat([getattr(first, part), getattr(second, part)])
            torch.testing.assert_close(joined, wanted)
    effective = torch.cat([first.effective(weight[:rows]), second.effective(weight[rows:])])
    torch.testing.assert_close(effective, whole.effective(weight))
    assert first.weight_scale.dim() == second.weight_scale.dim() == whole.weight_scale.dim()


def trained(text: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """A tiny model after two steps."""
    model = convert_(tiny_model(dtype=dtype), SparseBitConfig.parse(text)).train()
    train_on_one_batch(model, torch.arange(64).view(2, 32) % 96, steps=2)
    return model.eval()


@pytest.mark.parametrize("text", FORMATS)
def test_saved_and_packed_it_computes_the_same(text: str, tmp_path: Path) -> None:
    model, ids = trained(text), torch.arange(32)[None]
    expected = model(ids).logits
    save_pretrained(model, tmp_path / "saved")
    assert torch.equal(from_pretrained(tmp_path / "saved")(ids).logits, expected)
    source = open_checkpoint(tmp_path / "saved")
    for name, layer in sparse_layers(model).items():
        assert torch.equal(source.effective(name), layer.select().effective(layer.weight))
    if text.startswith("ternary") and "per-group" not in text:
        pack_checkpoint(tmp_path / "saved", tmp_path / "packed", embeddings="float32")
        packed = from_pretrained(tmp_path / "packed")
        torch.testing.assert_close(packed(ids).logits, expected, rtol=1e-5, atol=1e-5)
    else:
        with pytest.raises(UserError, match="export --to dense"):
            pack_checkpoint(tmp_path / "saved", tmp_path / "packed")
        assert not (tmp_path / "packed").exists()


def test_norms_of_the_inputs_come_back_and_are_followed(tmp_path: Path) -> None:
    model, ids = trained(FORMATS[0], torch.bfloat16), torch.arange(32)[None]
    save_pretrained(model, tmp_path / "saved")
    loaded = from_pretrained(tmp_path / "saved", dtype=torch.bfloat16).train()
    layers = sparse_layers(loaded)
    for name, layer in sparse_layers(model).items():
        assert torch.equal(layers[name].input_norm, layer.input_norm)
        assert layers[name].input_norm.dtype == torch.float32
        assert torch.equal(layers[name].select().mask, layer.select().mask)
        layers[name]._seen[:-1], layers[name]._seen[-1] = 1e30, 0
    with selected(loaded):
        loaded(input_ids=ids, labels=ids).loss.backward()
    assert all(layer.input_norm.max() < 1e3 for layer in layers.values())


def test_a_checkpoint_is_refused_by_name_where_its_score_is_not_registered(
    own: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = trained("ternary-6:8,score=smallest:power=2"), torch.arange(32)[None]
    save_pretrained(model, tmp_path / "saved")
    assert torch.equal(from_pretrained(tmp_path / "saved")(ids).logits, model(ids).logits)
    entry = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    assert entry["format"]["registered_by"] == f"score={__name__}"
    del registry._ENTRIES["score"]["smallest"]
    for opened in (from_pretrained, open_checkpoint):
        with pytest.raises(
            UserError, match=f"'smallest' is not registered here: import {__name__}"
        ):
            opened(tmp_path / "saved")
    monkeypatch.setitem(registry._ENTRIES["score"], "smallest", registry._ENTRIES["score"]["wanda"])
    with pytest.raises(UserError, match=f"comes from {__name__}, but sparse_bitnet"):
        open_checkpoint(tmp_path / "saved")


def test_a_module_named_in_the_environment_is_imported(
    own: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_scores.py").write_text(
        "from sparse_bitnet.variants.registry import register_score\n"
        "@register_score('mine')\ndef mine(weight):\n    return weight.abs()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv(registry.IMPORTED, "my_scores")
    assert SparseBitConfig.parse("ternary-6:8,score=mine").to_dict()["registered_by"]
    monkeypatch.setenv(registry.IMPORTED, "no_such_module")
    with pytest.raises(UserError, match="cannot import no_such_module"):
        SparseBitConfig.parse("ternary-6:8,score=other")


def test_calibration_prunes_without_training(tmp_path: Path) -> None:
    batches = [torch.arange(64).view(2, 32), torch.arange(32)[None]]
    model = tiny_model()
    seen: list[Tensor] = []
    down = model.model.layers[1].mlp.down_proj
    hook = down.register_forward_pre_hook(lambda module, args: seen.append(args[0].flatten(0, 1)))
    with torch.no_grad():
        for batch in batches:
            model(batch)
    hook.remove()
    convert_(model, SparseBitConfig.parse("full-6:8,score=wanda"), calibration=batches)
    layer = sparse_layers(model)["model.layers.1.mlp.down_proj"]
    norm = torch.cat(seen).double().square().mean(0).sqrt()
    torch.testing.assert_close(layer.input_norm, norm.float())
    expected = nm_mask((layer.weight.abs() * norm).detach(), NMPattern(6, 8))
    assert torch.equal(layer.select().mask, expected)
    save_pretrained(model, tmp_path / "pruned")
    again = from_pretrained(tmp_path / "pruned")(batches[1]).logits
    assert torch.equal(again, model.eval()(batches[1]).logits)
    with pytest.raises(UserError, match="the calibration text is empty"):
        convert_(tiny_model(), "full-6:8,score=wanda", calibration=[])
    for batch in ({"input_ids": torch.ones(1, 4)}, torch.ones(1, 4), torch.ones(1, 4).byte(), [1]):
        with pytest.raises(UserError, match=r"must be token ids, int64 \[batch, sequence\]"):
            convert_(tiny_model(), "full-6:8,score=wanda", calibration=[batch])
    with pytest.raises(UserError, match="calibration has no effect on score=magnitude"):
        convert_(tiny_model(), "full-6:8", calibration=batches)
    spoilt = tiny_model()
    spoilt.get_input_embeddings().weight.data[3] = float("nan")
    with pytest.raises(UserError, match="inputs that are not finite"):
        convert_(spoilt, "full-6:8,score=wanda", calibration=batches)


def test_calibration_keeps_modes_and_norms_of_unreached_layers() -> None:
    class Routed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(8, 8)
            self.first, self.never = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8).eval()

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.never(self.first(self.embed(input_ids))[:0])

    config = SparseBitConfig.parse("full-6:8,score=wanda")
    model = convert_(Routed(), config, calibration=[torch.arange(8)[None]])
    assert model.first.input_norm.all()
    assert not model.never.input_norm.any()
    assert [module.training for module in model.children()] == [True, True, False]
