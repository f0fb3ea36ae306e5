# SPDX-License-Identifier: Apache-2.0
"""A model trained with embeddings=ternary computes the same in every form that keeps them ternary."""

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from factories import tiny_model
from packed_models import all_logits
from sparse_bitnet.checkpoint.load import from_pretrained
from sparse_bitnet.checkpoint.open_checkpoint import find_checkpoint, open_checkpoint
from sparse_bitnet.engine.engine_options import EngineOptions
from sparse_bitnet.errors import UserError
from sparse_bitnet.export.export_checkpoint import export
from sparse_bitnet.export.export_config import ExportConfig
from sparse_bitnet.export.pack_checkpoint import pack_checkpoint
from sparse_bitnet.export.verify import check_packed
from sparse_bitnet.generation.open_model import open_engine
from sparse_bitnet.nn.convert import convert_
from sparse_bitnet.nn.ternary_tables import TernaryHead, quantize_table, rounded_tables
from sparse_bitnet.training.loss import SummedLoss

FORMAT = "ternary-6:8,embeddings=ternary"


def test_tied_tables_train_and_are_packed_and_exported(make_checkpoint, tmp_path) -> None:
    folder = make_checkpoint(FORMAT)
    model, ids = from_pretrained(folder), torch.arange(30)[None]
    masters, values = model.lm_head.weight, quantize_table(model.lm_head.weight).values()
    assert model.get_input_embeddings().weight is masters
    assert torch.equal(model.get_input_embeddings()(ids)[0], values[:30])
    logits = model(ids).logits
    assert torch.equal(logits, F.linear(model.model(ids)[0], values))
    engine = open_engine(str(folder), EngineOptions(engine="transformers"))
    assert type(engine._model.lm_head) is torch.nn.Linear
    assert np.array_equal(all_logits(engine, ids[0].tolist()), logits[0].detach().numpy())
    loss = SummedLoss(model)(ids, ids)
    assert loss.item() == pytest.approx(F.cross_entropy(logits[0], ids[0], reduction="sum").item())
    loss.backward()
    assert masters.grad is not None
    assert masters.grad.count_nonzero() > values.count_nonzero(), "the gradient passes zero codes"

    assert pack_checkpoint(folder, tmp_path / "packed").metadata.embeddings == "ternary"
    assert check_packed(folder, tmp_path / "packed") == 0
    export(folder, tmp_path / "gguf", ExportConfig(format="gguf-q2_0"))
    export(folder, tmp_path / "bitnet", ExportConfig(format="bitnet", embeddings="f32"))
    for path in ("gguf/model-Q2_0.gguf", "packed", "bitnet"):
        read: Any = open_checkpoint(tmp_path / path)
        if path.endswith(".gguf"):
            assert read.gguf.block_type("token_embd.weight").name == "Q2_0"
        assert torch.equal(torch.as_tensor(read.read("model.embed_tokens.weight")), values), path
    assert type(convert_(find_checkpoint(folder).load(), "ternary-6:8").lm_head) is torch.nn.Linear


def test_tables_are_rounded_for_a_while_even_if_that_raises() -> None:
    model: Any = convert_(tiny_model(), FORMAT)
    weight, masters = model.lm_head.weight, model.lm_head.weight.clone()
    with contextlib.suppress(InterruptedError), rounded_tables(model):
        assert type(model.lm_head) is torch.nn.Linear
        assert torch.equal(weight, quantize_table(masters).values())
        raise InterruptedError
    assert type(model.lm_head) is TernaryHead
    assert torch.equal(weight, masters)


def test_rows_without_groups_are_refused() -> None:
    with pytest.raises(UserError, match="in groups of 32; Qwen2ForCausalLM has"):
        convert_(tiny_model(hidden_size=48), FORMAT)
