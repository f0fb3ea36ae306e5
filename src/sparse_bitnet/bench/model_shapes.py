# SPDX-License-Identifier: Apache-2.0
"""config.json of the models whose speed is measured: presets, and what others publish."""

from typing import Any

from sparse_bitnet.bench.random_codes import WEIGHT_STD
from sparse_bitnet.errors import UserError
from sparse_bitnet.presets import PRESETS, Shape

END_OF_TEXT_ID = 257
"""Of the random models' tokenizer: after the 256 bytes and one merge."""


def _sizes(
    model_type: str, hidden: int, ffn: int, layers: int, heads: int, kv: int, vocab: int, tied: bool
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "dtype": "float32",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "max_position_embeddings": 40960,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "pad_token_id": None,
    }


PUBLISHED: dict[str, dict[str, Any]] = {
    "bitnet-2b4t": {
        **_sizes("bitnet", 2560, 6912, 30, 20, 5, 128256, tied=True),
        "hidden_act": "relu2",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    },
    "qwen3-1.7b": {
        **_sizes("qwen3", 2048, 6144, 28, 16, 8, 151936, tied=True),
        "head_dim": 128,
    },
    "qwen3-8b": {
        **_sizes("qwen3", 4096, 12288, 36, 32, 8, 151936, tied=False),
        "head_dim": 128,
    },
    "falcon-e-3b": {
        **_sizes("llama", 2048, 13312, 32, 16, 2, 32768, tied=False),
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 32768,
    },
    "llama3-8b": {
        **_sizes("llama", 4096, 14336, 32, 32, 8, 128256, tied=False),
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    },
}
"""config.json of models that others publish, ternary or made so, as far as speed depends on it."""


def config_of_model(name: str, *, tokenizer: bool = True) -> dict[str, Any]:
    """The config.json of a preset or a published shape. Raises `UserError` for another name."""
    if name in PUBLISHED:
        return {**PUBLISHED[name], "eos_token_id": END_OF_TEXT_ID if tokenizer else None}
    if name not in PRESETS:
        raise UserError(
            f"model {name!r} is not a preset: choose one of {', '.join([*PRESETS, *PUBLISHED])}"
        )
    return config_of(PRESETS[name], tokenizer=tokenizer)


def config_of(shape: Shape, *, tokenizer: bool = True) -> dict[str, Any]:
    """The config.json of a preset, as transformers writes it for `models.preset_config`."""
    hidden, ffn = shape.hidden_size, shape.intermediate_size
    heads, kv = shape.num_attention_heads, shape.num_key_value_heads
    layers, vocab = shape.num_hidden_layers, shape.vocab_size
    return _sizes("qwen2", hidden, ffn, layers, heads, kv, vocab, tied=True) | {
        "architectures": ["Qwen2ForCausalLM"],
        "max_position_embeddings": shape.max_position_embeddings,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 28,
        "layer_types": ["full_attention"] * layers,
        "attention_dropout": 0.0,
        "initializer_range": WEIGHT_STD,
        "use_cache": True,
        "eos_token_id": END_OF_TEXT_ID if tokenizer else None,
    }
