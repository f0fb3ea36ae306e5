# SPDX-License-Identifier: Apache-2.0
"""Folders of Qwen3.5 with an image encoder: the language model in them is opened, trained and packed."""

import warnings
from pathlib import Path

import pytest
import torch

from factories import edit_tensors, tiny_config
from packed_models import load_reference, reference_logits
from sparse_bitnet.checkpoint.build_model import build_model
from sparse_bitnet.checkpoint.open_checkpoint import open_checkpoint
from sparse_bitnet.checkpoint.trained import save_pretrained
from sparse_bitnet.export.pack_checkpoint import pack_checkpoint
from sparse_bitnet.nn.convert import sparse_layers

TOKENS = list(range(1, 40))


@pytest.mark.parametrize("ties", [True, False])
def test_the_language_model_of_a_composite_folder(tmp_path: Path, ties: bool) -> None:
    """Tensors of the encoder and of layers that predict several tokens are ignored by name; the gates of
    linear attention stay dense without a warning."""
    from transformers import AutoModelForImageTextToText, Qwen3_5Config

    sizes = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16}
    text = tiny_config("qwen3_5_text", tie_word_embeddings=ties).to_dict()
    vision = sizes | {"out_hidden_size": 64, "num_position_embeddings": 16}
    config = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=ties)
    whole = AutoModelForImageTextToText.from_config(config).eval()
    whole.save_pretrained(tmp_path / "whole")
    edit_tensors(tmp_path / "whole", {"mtp.fc.weight": torch.zeros(64, 128)})

    source = open_checkpoint(tmp_path / "whole")
    assert source.config["model_type"] == "qwen3_5_text"
    assert source.others.keys() >= {"model.embed_tokens.weight", "model.norm.weight"}
    with torch.no_grad():
        expected = whole(input_ids=torch.tensor([TOKENS])).logits[0]
    assert torch.equal(torch.from_numpy(reference_logits(tmp_path / "whole", TOKENS)), expected)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = build_model("", "ternary-6:8", init=tmp_path / "whole").eval()
    assert not any(name.endswith(("in_proj_a", "in_proj_b")) for name in sparse_layers(model))
    assert len(sparse_layers(model)) == 4 * 3 + 3 * 3 + 4
    save_pretrained(model, tmp_path / "trained")
    with torch.no_grad():
        trained = model(torch.tensor([TOKENS])).logits
        assert torch.equal(
            load_reference(tmp_path / "trained")(torch.tensor([TOKENS])).logits, trained
        )
    pack_checkpoint(tmp_path / "trained", tmp_path / "packed", embeddings="float32")
    packed = torch.from_numpy(reference_logits(tmp_path / "packed", TOKENS))
    torch.testing.assert_close(packed, trained[0], atol=1e-5, rtol=0)
