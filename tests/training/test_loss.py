# SPDX-License-Identifier: Apache-2.0
"""Chunked cross-entropy against torch's own, forward and backward."""

import pytest
import torch
import torch.nn.functional as F

from factories import tiny_model
from sparse_bitnet.checkpoint.build_model import build_model
from sparse_bitnet.errors import UserError
from sparse_bitnet.nn.layer import SparseBitConfig
from sparse_bitnet.training import loss as loss_module
from sparse_bitnet.training.loss import SummedLoss, chunked_loss, mean_token_loss


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_chunked_loss_equals_torch(chunk, ignored, compiled, monkeypatch):
    monkeypatch.setattr(loss_module, "_compiled", lambda chunk, _: chunk)
    torch.manual_seed(0)
    hidden = torch.randn(37, 16, requires_grad=True)
    weight = torch.randn(53, 16, requires_grad=True)
    labels = torch.randint(0, 53, (37,))
    if ignored:
        labels[::3] = -100
    expected = F.cross_entropy(hidden @ weight.t(), labels, reduction="sum", ignore_index=-100)
    expected_grads = torch.autograd.grad(expected * 0.5, (hidden, weight))
    loss, _ = chunked_loss(hidden, weight, labels, chunk_tokens=chunk, compiled=compiled)
    grads = torch.autograd.grad(loss * 0.5, (hidden, weight))
    assert loss.dtype == torch.float64
    torch.testing.assert_close(loss.float(), expected, rtol=1e-6, atol=0)
    for grad, wanted in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, wanted, rtol=1e-5, atol=1e-6)


def test_autocast_stays_close():
    torch.manual_seed(0)
    hidden, weight = torch.randn(64, 32), torch.randn(100, 32) * 0.1
    labels = torch.randint(0, 100, (64,))
    exact, _ = chunked_loss(hidden, weight, labels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded, _ = chunked_loss(hidden, weight, labels)
    assert rounded.item() == pytest.approx(exact.item(), rel=2**-8)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2", {}),
        ("granite", {"logits_scaling": 8.0}),
        ("cohere", {"logit_scale": 0.3}),
        ("gemma3_text", {"final_logit_softcapping": 0.5}),
    ],
)
def test_the_loss_of_a_model_equals_transformers(family, changes, monkeypatch):
    monkeypatch.setattr(loss_module, "_compiled", lambda chunk, _: chunk)
    model = tiny_model(family, **changes)
    tokens = torch.randint(0, 96, (2, 33))
    expected = model(input_ids=tokens, labels=tokens).loss
    expected.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    for compiled in (False, True):
        loss = SummedLoss(model, 9, compiled)(tokens[:, :-1], tokens[:, 1:])
        torch.testing.assert_close((loss / 64).float(), expected, rtol=1e-5, atol=0)
    (SummedLoss(model, 9)(tokens[:, :-1], tokens[:, 1:]) / 64).backward()
    for parameter, wanted in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-4, atol=1e-6)


def test_mean_token_loss_weights_by_token_and_restores_the_mode():
    model = build_model("qwen2.5-1m", SparseBitConfig.parse("ternary-6:8"), vocab_size=256).train()
    tokens = torch.randint(0, 256, (3, 17))
    labels = tokens[:, 1:].clone()
    labels[1, 4:] = -100
    whole, count = mean_token_loss(SummedLoss(model), [(tokens[:, :-1], labels)])
    parts, _ = mean_token_loss(
        SummedLoss(model), [(tokens[i : i + 1, :-1], labels[i : i + 1]) for i in range(3)]
    )
    assert count == 16 + 4 + 16
    assert whole == pytest.approx(parts, rel=1e-6)
    assert model.training
    with pytest.raises(UserError, match="no token"):
        mean_token_loss(SummedLoss(model), [])


def test_only_one_chunk_of_logits_exists_at_a_time():
    tokens, vocab, chunk = 512, 4096, 32
    hidden = torch.randn(tokens, 8, requires_grad=True)
    weight = torch.randn(vocab, 8, requires_grad=True)
    labels = torch.randint(0, vocab, (tokens,))
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    with Watch():
        chunked_loss(hidden, weight, labels, chunk_tokens=chunk)[0].backward()
    assert largest == chunk * vocab
