# SPDX-License-Identifier: Apache-2.0
"""examples/torchtitan_nm.py: torchtitan's models are built with layers that compute what ours do."""

import runpy
from pathlib import Path

import pytest
import torch

from sparse_bitnet.errors import UserError
from sparse_bitnet.layer_config import SparseBitConfig
from sparse_bitnet.nn.layer import SparseBitLinear

pytest.importorskip("torchtitan", reason="torchtitan is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(Path(__file__).parents[2] / "examples" / "torchtitan_nm.py"))


def built(example, **options):
    from torchtitan.models.qwen3 import model_registry

    converter = example["NMConverter"].Config(**options)
    model = model_registry("debugmodel", converters=[converter]).model.build()
    model.init_states()
    return model


def test_all_linear_layers_but_the_head_compute_what_ours_do(example):
    model = built(example, format="ternary-2:4", dense_layers=["*head", "*.wo"])
    linears = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
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


def test_unsupported_settings_are_refused(example):
    with pytest.raises(UserError, match=r"layers\.0\."):
        built(example, format="ternary-5:7")
    model = built(example)
    layer = model.layers["0"].feed_forward.w1
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        torch.distributed.tensor.distribute_module(layer, mesh)
        with pytest.raises(UserError, match="tensor parallelism"):
            layer(torch.randn(1, layer.in_features))
    finally:
        torch.distributed.destroy_process_group()
