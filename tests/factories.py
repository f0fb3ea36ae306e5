# SPDX-License-Identifier: Apache-2.0
"""Small layers and models that tests build."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from sparse_bitnet.checkpoint.checkpoint import Checkpoint
from sparse_bitnet.nn.convert import selected
from sparse_bitnet.nn.layer import SparseBitConfig, SparseBitLinear

# The paper's variants, as named in its section "Optimization design", and sparse full precision.
VARIANTS = {
    "baseline": "ternary-6:8",
    "mask without grad": "ternary-6:8,mask_gradient=masked",
    "mask from quantized weight": "ternary-6:8,mask_source=ternary",
    "sparse before quant": "ternary-6:8,scale_source=masked",
    "full": "full-6:8",
}


def make_layer(
    text: str, in_features: int = 48, out_features: int = 20, dtype: torch.dtype = torch.float32
) -> SparseBitLinear:
    torch.manual_seed(3)
    config = SparseBitConfig.parse(text)
    layer = SparseBitLinear(in_features, out_features, dtype=dtype, config=config, name="test")
    with torch.no_grad():
        layer.bias.uniform_(-1, 1)
    return layer


MODEL_FAMILIES = ("qwen2", "llama", "qwen3", "gpt_neox")


GEMMA: dict[str, Any] = {
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"],
}

HUNYUAN = {
    "head_dim": 24,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0},
}

QWEN35 = {
    **{"head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 6, "num_hidden_layers": 4},
}
"""Two key heads for six value heads, so that grouped and tiled heads differ."""

BART = {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96}

MOE = {
    **{"moe_intermediate_size": 48, "shared_expert_intermediate_size": 64},
    **{"num_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"},
    "tie_word_embeddings": False,
}

ZAMBA2 = {
    **{"intermediate_size": 64, "num_hidden_layers": 4, "num_mem_blocks": 1, "chunk_size": 8},
    **{"mamba_headdim": 16, "n_mamba_heads": 8, "mamba_d_state": 8},
    "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
}
"""Two blocks share their attention and feed-forward weights."""


def tiny_config(family: str, **changes: Any) -> Any:
    """A two-layer transformers config: hidden 64, ffn 96, vocabulary 96."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    classes: dict[str, tuple[Any, dict[str, Any]]] = {
        "qwen2": (transformers.Qwen2Config, {}),
        "llama": (transformers.LlamaConfig, {}),
        "qwen3": (transformers.Qwen3Config, {"head_dim": 16}),
        "mistral": (transformers.MistralConfig, {"sliding_window": 7}),
        "gemma3_text": (transformers.Gemma3TextConfig, GEMMA),
        "hunyuan_v1_dense": (transformers.HunYuanDenseV1Config, HUNYUAN),
        "qwen3_5_text": (transformers.Qwen3_5TextConfig, QWEN35),
        "bart": (transformers.BartConfig, BART),
        "gpt2": (transformers.GPT2Config, {"n_inner": 96}),
        "falcon": (transformers.FalconConfig, {}),
        "doge": (transformers.DogeConfig, {}),
        "qwen2_moe": (transformers.Qwen2MoeConfig, MOE),
        "zamba2": (transformers.Zamba2Config, ZAMBA2),
        "bitnet": (transformers.BitNetConfig, {"hidden_act": "relu2"}),
        "granite": (transformers.GraniteConfig, {}),
        "lfm2": (transformers.Lfm2Config, {"layer_types": ["conv", "full_attention"]}),
        "cohere": (transformers.CohereConfig, {}),
        "gpt_neox": (transformers.GPTNeoXConfig, {}),
    }
    config_class, own = classes[family]
    grouped = {} if family == "gpt_neox" else {"num_key_value_heads": 2}
    return config_class(**(sizes | grouped | own | changes))


def tiny_model(
    family: str = "qwen2", *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> nn.Module:
    """A dense causal LM of `tiny_config`."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = tiny_config(family, **changes)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def train_on_one_batch(model: Any, ids: torch.Tensor, steps: int = 12) -> list[float]:
    """Train a converted model on the same int64 [sequences, tokens] again; return the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        with selected(model):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def randomise_vectors_(model: nn.Module, mean: float = 0.0, std: float = 0.5) -> nn.Module:
    """Give biases and norms other values than their initial ones."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean, std)
    return model


@torch.no_grad()
def logits_of(model: Any, tokens: Sequence[int]) -> np.ndarray:
    """float32 [tokens, vocab] of a transformers model."""
    return model(torch.tensor([list(tokens)])).logits[0].float().numpy()


def edit_json(path: Path, **changes: Any) -> None:
    """Give keys of the JSON object in a file other values; `...` removes a key."""
    content = json.loads(path.read_text("utf-8")) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def edit_quantization(folder: Path, **changes: Any) -> None:
    """Give quantization settings in a folder's config.json other values."""
    entry = json.loads((folder / "config.json").read_text("utf-8"))["quantization_config"]
    edit_json(folder / "config.json", quantization_config=entry | changes)


def changed_tensors(tensors: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Tensors with other values, or those that a function returns; None removes a tensor."""
    values = {
        name: change(tensors[name]) if callable(change) else change
        for name, change in changes.items()
    }
    return {name: value for name, value in (tensors | values).items() if value is not None}


def edit_tensors(folder: Path, changes: dict[str, Any]) -> None:
    """Change the tensors of a folder by `changed_tensors`."""
    tensors = changed_tensors(load_file(folder / "model.safetensors"), changes)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def changed(checkpoint: Checkpoint, **values: Any) -> Checkpoint:
    """A copy of an opened checkpoint with other attributes or methods."""
    other = copy.copy(checkpoint)
    for name in ("stored", "dense_linears", "embeddings"):
        vars(other).pop(name, None)
    vars(other).update(values)
    return other
