# SPDX-License-Identifier: Apache-2.0
"""The scripts in examples/ run, and layers that they put into other trainers compute what ours do."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_module

from factories import tiny_model
from sparse_bitnet.errors import UserError
from sparse_bitnet.nn.convert import convert_, sparse_layers
from sparse_bitnet.nn.layer import SparseBitConfig, SparseBitLinear
from sparse_bitnet.pattern import NMPattern
from sparse_bitnet.variants import registry

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ignore_warnings = pytest.mark.filterwarnings("ignore")


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_example_transformers_trainer_runs() -> None:
    trainer = example("transformers_trainer").main(steps=6)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert logs[-1]["loss"] < logs[0]["loss"]
    assert "flip_rate" in logs[-1]


def test_example_own_score_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_ENTRIES", {k: dict(v) for k, v in registry._ENTRIES.items()})
    losses = example("own_score").main(steps=4)
    assert losses[-1] < losses[0]
    assert "def column_norm" in (EXAMPLES.parent / "docs" / "extending.md").read_text()


def test_example_chat_lora_runs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("trl")
    before, beside, merged = example("chat_lora").main(steps=8)
    assert beside < before
    assert merged < before
    assert "saved and loaded: the same logits" in capsys.readouterr().out


def test_example_train_chat_runs(capsys: pytest.CaptureFixture[str]) -> None:
    answer = example("train_chat").main(steps=40)
    assert "is" in answer
    assert "bit for bit" in " ".join(capsys.readouterr().out.split())


def test_example_convert_a_model_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_model("gpt_neox").save_pretrained(tmp_path)
    loaded = example("convert_a_model").main(str(tmp_path), "full-2:4")
    assert "the same logits, bit for bit" in capsys.readouterr().out
    assert {str(layer.config) for layer in sparse_layers(loaded).values()} == {"full-2:4"}


@pytest.fixture
def torchao_nm() -> Any:
    pytest.importorskip("torchao", reason="torchao is not installed")
    return example("torchao_nm")


def results(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    y = model(x)
    F.mse_loss(y, x).backward()
    return [y.detach(), *(part.grad for part in model.parameters())]


@ignore_warnings
@pytest.mark.parametrize("text", ["6:8", "2:4", "8:8"])
def test_layers_of_torchao_compute_what_ours_do(torchao_nm: Any, text: str) -> None:
    class Weight(torchao_nm.NMWeight):
        pattern = NMPattern.parse(text)

    torch.manual_seed(0)
    x = torch.randn(5, 16)
    ours, theirs = (
        nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 16)) for _ in range(2)
    )
    theirs.load_state_dict(ours.state_dict())
    convert_(ours, SparseBitConfig.parse(f"ternary-{text}"), filter_fn=lambda module, name: True)
    torchao_nm.apply_nm_(theirs, Weight)
    for mine, other in zip(results(ours, x), results(theirs, x), strict=True):
        torch.testing.assert_close(torch.as_tensor(other), mine, rtol=1e-4, atol=1e-5)
    codes = theirs[0].weight.masked_codes(torch.tensor(0.01))
    assert (codes.view(16, -1, Weight.pattern.m) != 0).sum(-1).max() <= Weight.pattern.n


@ignore_warnings
def test_shards_of_torchao_send_masked_codes(torchao_nm: Any) -> None:
    from torchao.prototype.quantized_training.bitnet import _unpack_i2_in_i8

    weight = torchao_nm.NMWeight(torch.randn(4, 16), torch.tensor(0.5))
    (packed,), (scale,) = weight.fsdp_pre_all_gather(None)
    assert packed.shape == (4, 4)
    assert torch.equal(_unpack_i2_in_i8(packed), weight.masked_codes(scale))


@pytest.fixture
def torchtitan_nm() -> Any:
    pytest.importorskip("torchtitan", reason="torchtitan is not installed")
    return example("torchtitan_nm")


def built(torchtitan_nm: Any, **options: Any) -> Any:
    from torchtitan.models.qwen3 import model_registry

    converter = torchtitan_nm.NMConverter.Config(**options)
    model = model_registry("debugmodel", converters=[converter]).model.build()
    model.init_states()
    return model


@ignore_warnings
def test_layers_of_torchtitan_but_the_head_compute_what_ours_do(torchtitan_nm: Any) -> None:
    model = built(torchtitan_nm, format="ternary-2:4", dense_layers=["*head", "*.wo"])
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    dense = [name for name, module in linears.items() if not isinstance(module, SparseBitLinear)]
    assert {name.rpartition(".")[2] for name in dense} == {"wo", "lm_head"}
    theirs = model.layers["0"].feed_forward.w1
    ours = SparseBitLinear.from_linear(theirs, SparseBitConfig.parse("ternary-2:4"), "ours")
    x = torch.randn(3, theirs.in_features)
    results = []
    for layer in (ours, theirs):
        y = layer(x)
        (gradient,) = torch.autograd.grad(y.square().sum(), layer.weight)
        results.append((y, gradient))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@ignore_warnings
def test_unsupported_settings_of_torchtitan_are_refused(torchtitan_nm: Any, mesh: DeviceMesh):
    with pytest.raises(UserError, match=r"layers\.0\."):
        built(torchtitan_nm, format="ternary-5:7")
    layer = built(torchtitan_nm).layers["0"].feed_forward.w1
    distribute_module(layer, mesh)
    with pytest.raises(UserError, match="tensor parallelism"):
        layer(torch.randn(1, layer.in_features))
