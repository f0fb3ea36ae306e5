# SPDX-License-Identifier: Apache-2.0
"""A block that `fully_shard` gathers is one graph to a compiler, with the products of sharded layers."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from factories import make_layer, tiny_model
from sparse_bitnet.nn.convert import convert_, set_phase_, sparse_layers
from sparse_bitnet.nn.layer import SparseBitConfig
from sparse_bitnet.nn.selection import select
from sparse_bitnet.ops.nm_mask import nm_mask
from sparse_bitnet.pattern import NMPattern
from sparse_bitnet.training.sharded_linear import prepare_linears_, selected_shards


@pytest.mark.parametrize("text", ["ternary-6:8", "full-6:8", "ternary-6:8,activation=none"])
def test_a_sharded_block_is_one_graph_for_all_steps(text: str, mesh: DeviceMesh) -> None:
    def losses(counter: CompileCounterWithBackend | None) -> list[float]:
        torch.manual_seed(0)
        model = convert_(tiny_model(num_hidden_layers=1), SparseBitConfig.parse(text))
        (block,) = model.get_decoder().layers
        prepare_linears_(block, torch.float32)
        if counter is not None:
            torch._dynamo.reset()
            block.forward = torch.compile(block.forward, fullgraph=True, backend=counter)
        fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        ids = torch.arange(32).view(2, 16) * 5 % 96
        curve = []
        for _ in range(3):
            with selected_shards(sparse_layers(model).values(), lambda parts: parts):
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            curve.append(loss.item())
        return curve

    counter = CompileCounterWithBackend("aot_eager")
    assert losses(counter) == losses(None)
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("text", "kept", "blend"),
    [("ternary-6:8", 6, 0.5), ("ternary-6:8,scale_source=masked", 7, 1.0)],
)
def test_rows_get_the_scale_of_the_whole_in_every_phase(
    text: str, kept: int, blend: float, mesh: DeviceMesh
) -> None:
    layer = make_layer(text)
    upper, lower = layer.weight.detach().clone(), torch.randn(12, 48)
    matrix, pattern = torch.cat([upper, lower]), NMPattern(kept, 8)
    whole = select(matrix, layer.config, kept=kept, blend=blend)
    elsewhere = lower * nm_mask(lower, pattern) if "masked" in text else lower
    parts = torch.tensor([elsewhere.abs().double().sum(), lower.numel()])
    block = torch.nn.Sequential(layer)
    prepare_linears_(block, torch.float32)
    fully_shard(block, mesh=mesh)
    set_phase_([layer], kept, blend)
    with selected_shards([layer], lambda own: own + parts):
        torch.testing.assert_close(layer.selection.weight_scale, whole.weight_scale)
