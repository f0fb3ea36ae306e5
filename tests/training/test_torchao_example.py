# SPDX-License-Identifier: Apache-2.0
"""examples/torchao_nm.py: torchao's BitNet training with N:M masks computes what our layer does."""

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sparse_bitnet.nn.convert import convert_
from sparse_bitnet.nn.layer import SparseBitConfig
from sparse_bitnet.pattern import NMPattern

pytest.importorskip("torchao", reason="torchao is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def example():
    path = Path(__file__).resolve().parents[2] / "examples" / "torchao_nm.py"
    spec = importlib.util.spec_from_file_location("torchao_nm", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def results(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    y = model(x)
    F.mse_loss(y, x).backward()
    return [y.detach(), *(part.grad for part in model.parameters())]


@pytest.mark.parametrize("text", ["6:8", "2:4", "8:8"])
def test_forward_and_gradients_are_those_of_our_layer(example, text):
    class Weight(example.NMWeight):
        pattern = NMPattern.parse(text)

    torch.manual_seed(0)
    x = torch.randn(5, 16)
    ours, theirs = (
        nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 16)) for _ in range(2)
    )
    theirs.load_state_dict(ours.state_dict())
    convert_(ours, SparseBitConfig.parse(f"ternary-{text}"), filter_fn=lambda module, name: True)
    example.apply_nm_(theirs, Weight)
    for mine, other in zip(results(ours, x), results(theirs, x), strict=True):
        torch.testing.assert_close(torch.as_tensor(other), mine, rtol=1e-4, atol=1e-5)
    codes = theirs[0].weight.masked_codes(torch.tensor(0.01))
    assert (codes.view(16, -1, Weight.pattern.m) != 0).sum(-1).max() <= Weight.pattern.n


def test_shards_send_masked_codes(example):
    from torchao.prototype.quantized_training.bitnet import _unpack_i2_in_i8

    weight = example.NMWeight(torch.randn(4, 16), torch.tensor(0.5))
    (packed,), (scale,) = weight.fsdp_pre_all_gather(None)
    assert packed.shape == (4, 4)
    assert torch.equal(_unpack_i2_in_i8(packed), weight.masked_codes(scale))
