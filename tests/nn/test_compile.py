# SPDX-License-Identifier: Apache-2.0
"""torch.compile(fullgraph=True) computes what eager computes: codes, masks, outputs, gradients."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from factories import make_layer, tiny_model
from sparse_bitnet.nn.convert import convert_, quantization_config, selected
from sparse_bitnet.nn.layer import SparseBitConfig

FORMATS = (
    *("ternary-6:8", "ternary-6:8,mask_source=ternary", "ternary-6:8,scale_source=masked"),
    *("ternary-6:8,mask_gradient=masked,ste=clipped", "full-6:8", "full-6:8,activation=int8"),
    *("ternary-6:8,score=wanda", "full-2:4,score=s-ste", "ternary-3:4,quantizer=binary"),
    "ternary-6:8,activation=int4-hadamard",
    "ternary-6:8,quantizer=per-group:size=16",
)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def forward_backward(layer: nn.Module, forward, shape: tuple[int, ...], dtype) -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.randn(shape).to(dtype).requires_grad_()
    layer.zero_grad()
    y = forward(x)
    y.backward(torch.randn(y.shape).to(dtype))
    return [y, x.grad, layer.weight.grad, layer.bias.grad]


@pytest.mark.parametrize(
    ("text", "dtype", "shape"),
    [(text, torch.float32, (2, 3, 48)) for text in FORMATS]
    + [("ternary-6:8", torch.bfloat16, (4, 48)), ("ternary-6:8", torch.float32, (0, 48))],
    ids=str,
)
def test_whole_graph_equals_eager(text: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Traced forward and backward in one graph, each operator as eager runs it; with a selection, and
    without one, after a step."""
    layer = make_layer(text, dtype=dtype)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=False)
    for step in (selected(layer), nullcontext()):
        with step:
            eager = forward_backward(layer, layer, shape, dtype)
            traced = forward_backward(layer, compiled, shape, dtype)
        assert all(torch.equal(*pair) for pair in zip(eager, traced, strict=True))


def test_inductor_gives_identical_codes_masks_outputs_and_gradients() -> None:
    single, half = make_layer("ternary-6:8"), make_layer("ternary-6:8", dtype=torch.bfloat16)
    batched, empty, flat = torch.randn(2, 3, 48), torch.randn(0, 48), torch.randn(4, 48).bfloat16()

    def everything() -> tuple[list[Tensor], list[Tensor]]:
        outputs = [single(batched), single(empty), half(flat)]
        return outputs, [*single.select()[:3], *half.select()[:3]]

    def results(function) -> list[Tensor]:
        outputs, chosen = function()
        loss = sum(y.float().square().sum() for y in outputs)
        return [*outputs, *chosen, *torch.autograd.grad(loss, [single.weight, half.weight])]

    compiled = torch.compile(everything, fullgraph=True)
    for pair in zip(results(everything), results(compiled), strict=True):
        assert torch.equal(*pair)


def test_training_steps_of_a_model_do_not_recompile() -> None:
    """New masks and codes at every step run through the one graph."""
    model = convert_(tiny_model(num_hidden_layers=1), SparseBitConfig()).train()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    ids = torch.randint(0, 96, (2, 16))
    entry = quantization_config(compiled, SparseBitConfig())
    assert entry["modules_to_not_convert"] == ["lm_head"]

    def loss(forward) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return forward(input_ids=ids, labels=ids).loss

    for step in range(4):
        with torch.compiler.set_stance("default" if step == 0 else "fail_on_recompile"):
            with selected(compiled):
                compiled_loss = loss(compiled)
                compiled_loss.backward()
                assert torch.equal(compiled_loss, loss(model))
            optimizer.step()
            optimizer.zero_grad()
