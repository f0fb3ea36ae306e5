# SPDX-License-Identifier: Apache-2.0
"""Convert any transformers causal LM, make one training step, save it, and load it back.

pip install ".[train]"
python examples/convert_a_model.py                     # a tiny Llama with random weights
python examples/convert_a_model.py PATH_OR_HUB_ID      # a model of yours
python examples/convert_a_model.py PATH_OR_HUB_ID full-2:4
"""

import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from sparse_bitnet import convert_, save_pretrained, selected, sparse_layers


def tiny_llama() -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def main(path_or_hub_id: str | None = None, text_form: str = "ternary-6:8") -> PreTrainedModel:
    """Convert, train one step, save and load; return the loaded model."""
    if path_or_hub_id is None:
        model = tiny_llama()
    else:
        model = AutoModelForCausalLM.from_pretrained(path_or_hub_id, dtype=torch.float32)
    convert_(model, text_form)
    layers = sparse_layers(model)
    print(f"{type(model).__name__}: {len(layers)} layers are {text_form} now, the first of them")
    print(f"  {next(iter(layers))}: {next(iter(layers.values()))}")

    ids = torch.arange(64).view(2, 32) % model.config.vocab_size
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    with selected(model):  # mask and codes once for all that a step computes
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    optimizer.step()
    model.eval()
    print(f"one step: loss {loss.item():.4f} -> {model(input_ids=ids, labels=ids).loss.item():.4f}")

    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(model, f"{folder}/model")
        loaded = AutoModelForCausalLM.from_pretrained(f"{folder}/model")
    same = torch.equal(loaded(ids).logits, model(ids).logits)
    print(
        f"saved and loaded back: {'the same logits, bit for bit' if same else 'DIFFERENT logits'}"
    )
    return loaded


if __name__ == "__main__":
    main(*sys.argv[1:])
