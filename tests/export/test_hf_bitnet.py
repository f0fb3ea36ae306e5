# SPDX-License-Identifier: Apache-2.0
"""Hugging Face bitnet: bytes, refusals, and transformers' own loader."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from factories import changed, tiny_model
from sparse_bitnet.checkpoint.checkpoint import Checkpoint
from sparse_bitnet.checkpoint.trained import save_pretrained
from sparse_bitnet.errors import UserError
from sparse_bitnet.export.export_checkpoint import check_folder_format, export
from sparse_bitnet.export.export_config import ExportConfig
from sparse_bitnet.nn.convert import convert_
from sparse_bitnet.nn.layer import SparseBitConfig
from sparse_bitnet.packing.two_bits import pack_row_planes, unpack_row_planes


@given(blocks=st.integers(1, 9), columns=st.integers(1, 33), seed=st.integers(0, 2**32 - 1))
def test_packing_is_transformers_own_and_exact(random_codes, blocks: int, columns: int, seed: int):
    from transformers.integrations.bitnet import pack_weights

    codes = random_codes(4 * blocks, columns, seed)
    packed = pack_row_planes(codes)
    assert torch.equal(packed, pack_weights(codes.clone()))
    assert torch.equal(unpack_row_planes(packed), codes)


def test_rows_that_do_not_divide_are_refused_by_name(source: Checkpoint) -> None:
    name = "model.layers.0.mlp.up_proj"
    other = changed(source, layers=source.layers | {name: (190, 64)})
    with pytest.raises(UserError, match=rf"layer {name} has 190 rows.*compressed-tensors-w8a8"):
        check_folder_format(other, "bitnet")


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox"])
def test_transformers_computes_the_same_for_every_family(tmp_path: Path, family: str) -> None:
    model = convert_(tiny_model(family), SparseBitConfig.parse("ternary-2:4")).eval()
    save_pretrained(model, tmp_path / "model")
    export(tmp_path / "model", tmp_path / "out", ExportConfig(format="bitnet", embeddings="f32"))
    ids = torch.arange(32)[None]
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        expected = model(ids).logits
        read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
        torch.testing.assert_close(read(ids).logits, expected, rtol=0, atol=0.01)
