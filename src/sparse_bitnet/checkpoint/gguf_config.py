# SPDX-License-Identifier: Apache-2.0
"""config.json from the metadata of a GGUF file, and the metadata from config.json."""

import functools
from typing import Any

import numpy as np

from sparse_bitnet.checkpoint.config_fields import (
    FULL,
    GEMMA3,
    LINEAR,
    MOST_LAYERS,
    WINDOWED,
    Fields,
    all_but_every,
    check_experts,
    check_fields,
    head_size,
    linear_attention_layers,
    of_all_layers,
    rope_of,
    shown,
    unread_setting,
    windows_of,
)
from sparse_bitnet.checkpoint.declared_rotation import PREFIX
from sparse_bitnet.checkpoint.gguf_architectures import ARCHITECTURES, LINEAR_NORM, GgufArchitecture
from sparse_bitnet.checkpoint.gguf_file import GgufFile
from sparse_bitnet.checkpoint.model_folder import LINEAR_NORMS
from sparse_bitnet.errors import UserError

ROPE_FACTORS = "rope_freqs.weight"
FORMAT, WEIGHT_SCALES = "sparse_bitnet.format", "sparse_bitnet.weight_scales"
"""Metadata keys of our exports, ignored by other readers: the training format, and each layer's scale in
float32, which blocks hold in float16."""

_LAYERS = "block_count"
_SIZES = {
    _LAYERS: "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
"""Metadata key, without the architecture's name -> field of config.json; other fields need a rule."""
_KV_HEADS, _EPSILON = "attention.head_count_kv", "attention.layer_norm_rms_epsilon"
_HEAD_SIZES = ("attention.key_length", "attention.value_length", "rope.dimension_count")
_WINDOW, _PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
_ROPE_BASE, _LOCAL_ROPE_BASE = "rope.freq_base", "rope.freq_base_swa"
_LINEAR_SIZES = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
"""Metadata key, after state space models -> field of linear attention."""
_INNER, _INTERVAL = "ssm.inner_size", "full_attention_interval"
_RECURRENT, _PREDICTING = "attention.recurrent_layers", "nextn_predict_layers"
_SECTIONS = "rope.dimension_sections"
"""Numbers of rotated pairs for the time, height and width of a position, which are equal in text."""
_OF_QWEN35 = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")
"""Rope parameters that a file of Qwen3.5 has other keys for, or none."""
_SCALING = "rope.scaling"
_KINDS = ("linear", "yarn")
_READ = (
    *(*_SIZES, _KV_HEADS, _EPSILON, *_HEAD_SIZES, _ROPE_BASE),
    *("rope.scale_linear", "vocab_size", "pooling_type", "attention.layer_norm_epsilon"),
    *(f"{_SCALING}.{key}" for key in ("type", "factor", "original_context_length", "finetuned")),
)
"""Keys of any architecture that are accepted: read, or without effect on these decoders."""
_AS_HERE = {
    **{"attention.causal": True, "tensor_data_layout": "Meta AI original pth"},
    **dict.fromkeys((f"{_SCALING}.attn_factor", f"{_SCALING}.yarn_attn_factor"), 1),
    **dict.fromkeys((f"{_SCALING}.yarn_ext_factor", f"{_SCALING}.yarn_beta_slow"), 1),
    f"{_SCALING}.yarn_beta_fast": 32,
    **{"ssm.v_head_reordered": True, "rope.mrope_interleaved": True},
}
"""Keys that may have only this value."""
_OF_IMAGES = ("vision", "image_token_id", "mrope_sections", "rope.mrope_section")
"""Beginnings of keys in Ollama's files of Qwen3.5 that do not affect the language model."""
_OF_THE_FILE = (
    *("general.", "tokenizer.", "quantize.", "imatrix.", "split.", "sparse_bitnet."),
    "mradermacher.",
)
"""Prefixes of keys that describe a file, not what its weights mean."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_CONTEXTS = (8192, 4096, 16384, 32768)
_LAYERS_OF_27B = 62
"""Layers of Gemma 27B, which alone scales scores by hidden size / heads instead of the head size."""


def architecture_of(file: GgufFile) -> GgufArchitecture:
    """Return the architecture that the file names. Raises `UserError` for one that is not supported."""
    name = str(file.metadata.get("general.architecture"))
    check_experts(file.metadata, str(file.path))
    rows = [row for row in ARCHITECTURES if row.name == name]
    if not rows:
        known = dict.fromkeys(row.name for row in ARCHITECTURES)
        raise UserError(
            f"{file.path}: its architecture {shown(name)} is not supported; {', '.join(known)} are; "
            "`distill` and --engine transformers may support the model that this file was made from"
        )
    has_norms = f"blk.0.attn_q{LINEAR_NORM}.weight" in file.tensors
    rows = [row for row in rows if row.linear_norms == has_norms]
    if not rows:
        raise UserError(f"{file.path}: norms before linears of {name} are not supported")
    return rows[-1 if file.metadata.get(f"{name}.{_WINDOW}") else 0]


def config_of(file: GgufFile, architecture: GgufArchitecture) -> dict[str, Any]:
    """Return the config.json of a GGUF file. Raises `UserError` for missing or unsupported metadata."""
    embedding, prefix = file.tensors.get("token_embd.weight"), f"{architecture.name}."
    if embedding is None or len(embedding.shape) != 2:
        raise UserError(f"{file.path} has no matrix token_embd.weight: it is incomplete")
    rows = embedding.shape[0]
    is_gemma = architecture.model_type == GEMMA3
    unread = (*_OF_THE_FILE, PREFIX, *(prefix + key for key in _OF_IMAGES))
    read = [*_READ, *([_WINDOW] if architecture.windows else [])]
    read += [_PATTERN, _LOCAL_ROPE_BASE, "final_logit_softcapping"] if is_gemma else []
    if architecture.linear_block:
        read += [*_LINEAR_SIZES, _INNER, _INTERVAL, _RECURRENT, _PREDICTING, _SECTIONS]
    check_fields(
        {key: v for key, v in file.metadata.items() if not key.startswith(unread)},
        [prefix + key for key in read],
        str(file.path),
        {prefix + key: value for key, value in _AS_HERE.items()},
    )
    values = {
        key.removeprefix(prefix): of_all_layers(value, file.metadata.get(prefix + _LAYERS))
        for key, value in file.metadata.items()
        if key.startswith(prefix)
    }
    with np.errstate(over="ignore"):
        # The shortest number with the same float32 value, as 1e-6 was before it was stored.
        values |= {k: float(str(np.float32(v))) for k, v in values.items() if type(v) is float}
    counts = values.get(_KV_HEADS) if architecture.linear_block else None
    if isinstance(counts, list):
        values[_KV_HEADS] = max(counts, default=0)
    fields = Fields(values, f"{file.path}: {prefix}")
    config: dict[str, Any] = {
        "model_type": architecture.model_type,
        **architecture.fields,
        "num_hidden_layers": fields.size(_LAYERS, most=MOST_LAYERS),
        **{field: fields.size(key) for key, field in _SIZES.items() if key != _LAYERS},
    }
    heads = config["num_attention_heads"]
    head = fields.size(_HEAD_SIZES[0], max(1, config["hidden_size"] // heads))
    config |= {
        "num_key_value_heads": fields.size(_KV_HEADS, heads),
        "rms_norm_eps": fields[_EPSILON],
        "vocab_size": rows,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "rope_parameters": _rope(file, fields, head, prefix, bool(architecture.linear_block)),
    }
    if architecture.linear_block:
        config |= _linear_config(fields, str(file.path))
        shared = config["num_key_value_heads"]
        expected = [shared * (kind != LINEAR) for kind in config["layer_types"]]
        if isinstance(counts, list) and counts[: len(expected)] != expected:
            raise UserError(f"{file.path}: {prefix}{_KV_HEADS} is {shown(counts)}, not {expected}")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > rows:
        raise UserError(
            f"{file.path}: {len(tokens)} tokens, but rows of token_embd.weight for {rows}"
        )
    for name in ("bos_token_id", "eos_token_id"):
        index = file.metadata.get(f"tokenizer.ggml.{name}")
        config[name] = index if type(index) is int and 0 <= index < rows else None
    if architecture.own_head_size:
        config["head_dim"] = head
    if architecture.linear_norms:
        config[LINEAR_NORMS] = config["rms_norm_eps"]
    if architecture.windows and (values.get(_WINDOW) or not is_gemma):
        config["sliding_window"] = fields.size(_WINDOW) if values.get(_WINDOW) else None
    if not is_gemma:
        return config
    layers, pattern = config["num_hidden_layers"], values.get(_PATTERN)
    if not isinstance(pattern, list):
        pattern = all_but_every(layers, *(() if pattern is None else (fields.size(_PATTERN),)))
    if len(pattern) != layers:
        raise UserError(f"{file.path}: {prefix}{_PATTERN} has {len(pattern)} layers, not {layers}")
    has_windows, base = "sliding_window" in config, fields.optional(_LOCAL_ROPE_BASE, 10_000.0)
    local = {"rope_type": "default", "rope_theta": base}
    return config | {
        "layer_types": [WINDOWED if has_windows and some else FULL for some in pattern],
        "query_pre_attn_scalar": _gemma_scores(config),
        "rope_parameters": {FULL: config["rope_parameters"], WINDOWED: local},
        "final_logit_softcapping": file.metadata.get(f"{prefix}final_logit_softcapping"),
    }


def _linear_config(fields: Fields, where: str) -> dict[str, Any]:
    """Return the fields of config.json for linear attention, and its number of layers, without
    multi-token prediction blocks. Raises `UserError` for sizes that do not fit together."""
    config: dict[str, Any] = {field: fields.size(key) for key, field in _LINEAR_SIZES.items()}
    blocks = fields.size(_LAYERS, most=MOST_LAYERS)
    predicting = fields.size(_PREDICTING, most=blocks - 1) if fields.values.get(_PREDICTING) else 0
    heads, keys = config["linear_num_value_heads"], config["linear_num_key_heads"]
    config["linear_value_head_dim"] = head = config["linear_key_head_dim"]
    if fields.size(_INNER) != heads * head or heads % keys:
        raise UserError(
            f"{where}: {heads} value heads of {head} values fit neither {_INNER} nor {keys} key heads"
        )
    is_linear, every = fields.values.get(_RECURRENT), fields.size(_INTERVAL, 4)
    if is_linear is None:
        is_linear = all_but_every(blocks, every)
    elif not isinstance(is_linear, list) or len(is_linear) != blocks:
        raise UserError(f"{where}: {_RECURRENT} is {shown(is_linear)}, not {blocks} flags")
    kinds = [LINEAR if is_one else FULL for is_one in is_linear[: blocks - predicting]]
    return config | {"layer_types": kinds, "num_hidden_layers": len(kinds)}


def _rope(file: GgufFile, fields: Fields, head: int, prefix: str, partial: bool) -> dict[str, Any]:
    """Return the rope parameters for heads of that size; `partial`: rotated in part."""
    rope: dict[str, Any] = {"rope_type": "default"}
    rope["rope_theta"] = fields.optional(_ROPE_BASE, 10_000.0)
    rotated = fields.size(_HEAD_SIZES[2], head)
    if partial and rotated % 2 == 0 and int(head * (rotated / head)) == rotated <= head:
        rope["partial_rotary_factor"] = rotated / head
    elif rotated != head or head % 2:
        raise UserError(
            f"{file.path}: {prefix}{_HEAD_SIZES[2]} is {rotated}, but sparse-bitnet rotates all values "
            f"of a head, an even number; this model's have {head}"
        )
    kind = fields.values.get(f"{_SCALING}.type") or "linear"
    factor = fields.optional(f"{_SCALING}.factor", fields.optional("rope.scale_linear", 1))
    if kind == "linear" and factor == 1:
        kind = "none"
    if kind in _KINDS:
        rope |= {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            context = fields.size(f"{_SCALING}.original_context_length")
            rope["original_max_position_embeddings"] = context
    elif kind != "none":
        raise UserError(
            f"{file.path}: rope scaling {shown(kind)} is not supported; {' and '.join(_KINDS)} are"
        )
    if ROPE_FACTORS not in file.tensors:
        return rope
    # llama3's parameters must reproduce the frequency factors in the file.
    is_plain = kind == "none" and not partial
    factors, count = file.floats(ROPE_FACTORS), head // 2 if is_plain else 0
    for context in _LLAMA3_CONTEXTS if factors.shape == (count,) else ():
        llama3 = {"factor": float(factors.max()), "original_max_position_embeddings": context}
        if np.allclose(factors, _llama3_factors(rope["rope_theta"], count, llama3), rtol=1e-4):
            return {**rope, "rope_type": "llama3", **llama3, **_LLAMA3}
    raise UserError(f"{file.path}: the factors in {ROPE_FACTORS} fit no supported rope scaling")


def metadata_of(config: dict[str, Any], where: str) -> tuple[GgufArchitecture, dict[str, Any]]:
    """Return the architecture of a config.json, and its metadata: key -> number, string or list.

    Raises `UserError`, beginning with `where`, for settings that a file cannot hold or llama.cpp ignores.
    """
    fields, expect = Fields(config, f"{where}: "), functools.partial(_expect, where)
    architecture = _architecture_for(config, where)
    values: dict[str, Any] = {key: fields.size(field) for key, field in _SIZES.items()}
    heads = config["num_attention_heads"]
    head = fields.size("head_dim", head_size(config))
    values[_KV_HEADS] = fields.size("num_key_value_heads", heads)
    values[_EPSILON] = fields["rms_norm_eps"]
    expect("a setting that is not read", unread_setting(config), None)
    if not architecture.own_head_size:
        expect("head_dim", head, config["hidden_size"] // heads)
    else:
        values |= {**dict.fromkeys(_HEAD_SIZES, head), "vocab_size": fields.size("vocab_size")}
    if not architecture.biases:
        expect("attention_bias", bool(config.get("attention_bias")), False)
    if architecture.model_type == "bitnet":
        expect("tie_word_embeddings", bool(config.get("tie_word_embeddings")), True)
    if architecture.model_type == GEMMA3:
        local = rope_of(config, where, local=True)
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            expect(key, config.get(key), None)
        scores = _gemma_scores({**config, "head_dim": head})
        expect("query_pre_attn_scalar", config.get("query_pre_attn_scalar", 256), scores)
        expect("rope_type of layers with a window", local["rope_type"], "default")
        values[_LOCAL_ROPE_BASE] = Fields(local, f"{where}: rope parameter ")["rope_theta"]
    if any(windows := windows_of(config, where)):
        values[_WINDOW] = max(windows)
        has_window = [window > 0 for window in windows]
        if not architecture.windows:
            expect("sliding_window", max(windows), None)
        elif architecture.model_type != GEMMA3:
            expect("layers without a window", has_window.count(False), 0)
        elif has_window != all_but_every(len(windows)):
            values[_PATTERN] = has_window
    rope = rope_of(config, where)
    if architecture.linear_block:
        numbers = Fields(rope, f"{where}: rope parameter ")
        values[_HEAD_SIZES[2]] = rotated = int(head * numbers["partial_rotary_factor"])
        values |= _linear_metadata(fields, rotated, where)
        expect("linear_value_head_dim", config["linear_value_head_dim"], values["ssm.state_size"])
        rope = {key: rope[key] for key in rope if key not in _OF_QWEN35}
        if rope["rope_type"] == "llama3":
            expect("rope_type", "llama3", "default, linear or yarn")
    values |= _rope_metadata(rope, where)
    return architecture, {f"{architecture.name}.{key}": value for key, value in values.items()}


def _linear_metadata(fields: Fields, rotated: int, where: str) -> dict[str, Any]:
    """Return the metadata of a config.json's linear attention, with `rotated` values of a head."""
    values: dict[str, Any] = {key: fields.size(field) for key, field in _LINEAR_SIZES.items()}
    inner = fields.size("linear_value_head_dim") * values["ssm.time_step_rank"]
    # llama.cpp aborts on too many pairs, and takes pairs of no section for those of position 0.
    sections = [(rotated // 2 + more) // 3 for more in (2, 1, 0)]
    values |= {_INNER: inner, _SECTIONS: [*sections, 0]}
    return values | {_RECURRENT: linear_attention_layers(fields.values, where)}


def rope_factors(config: dict[str, Any], where: str) -> np.ndarray | None:
    """Return the divisors of the frequencies, float32 [head_dim / 2], for rope type llama3; else None."""
    rope = rope_of(config, where)
    if rope["rope_type"] != "llama3":
        return None
    return _llama3_factors(rope["rope_theta"], head_size(config) // 2, rope)


def _architecture_for(config: dict[str, Any], where: str) -> GgufArchitecture:
    model_type = config.get("model_type")
    rows = [row for row in ARCHITECTURES if row.model_type == model_type]
    if not rows:
        known = dict.fromkeys(row.model_type for row in ARCHITECTURES)
        raise UserError(
            f"{where}: the GGUF export supports the architectures {', '.join(known)}, not {model_type}; "
            "use --to dense"
        )
    own = config.get(LINEAR_NORMS)
    rows = [row for row in rows if row.linear_norms == bool(own)]
    if not rows or own not in (None, config.get("rms_norm_eps")):
        raise UserError(
            f"{where}: the GGUF export does not support norms before linears of {model_type}"
        )
    for row in rows:
        ((field, value),) = row.fields.items()
        if config.get(field, value) == value:
            return row
    _expect(where, field, config.get(field), rows[0].fields[field])
    raise AssertionError


def _expect(where: str, setting: str, value: object, expected: object) -> None:
    if value != expected:
        raise UserError(
            f"{where}: {setting}={value} is not supported by the GGUF export, which writes {expected}; "
            "use --to dense"
        )


def _rope_metadata(rope: dict[str, Any], where: str) -> dict[str, Any]:
    kind, context = rope["rope_type"], "original_max_position_embeddings"
    numbers, expect = Fields(rope, f"{where}: rope parameter "), functools.partial(_expect, where)
    values: dict[str, Any] = {_ROPE_BASE: numbers["rope_theta"]}
    known = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
    if kind in _KINDS:
        known |= {"factor"}
        values |= {f"{_SCALING}.type": kind, f"{_SCALING}.factor": numbers["factor"]}
    if kind == "yarn":
        known |= {context}
        values[f"{_SCALING}.original_context_length"] = numbers.size(context)
    elif kind == "llama3":
        known |= {"factor", context, *_LLAMA3}
        numbers["factor"]
        expect("rope frequency factors", {key: rope.get(key) for key in _LLAMA3}, _LLAMA3)
        if (length := rope.get(context)) not in _LLAMA3_CONTEXTS:
            expect(context, length, f"one of {_LLAMA3_CONTEXTS}")
    elif kind not in ("default", "linear"):
        expect("rope_type", kind, "default, linear, yarn or llama3")
    expect("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), 1.0)
    others = sorted(key for key, value in rope.items() if key not in known and value is not None)
    expect("rope parameters", others, [])
    return values


def _llama3_factors(theta: float, count: int, rope: dict[str, Any]) -> np.ndarray:
    """Return the divisors of the frequencies, float32 [count], for the parameters of rope type llama3."""
    wavelengths = 2 * np.pi * theta ** (np.arange(count) / count)
    smooth = np.clip((rope["original_max_position_embeddings"] / wavelengths - 1) / 3, 0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)


def _gemma_scores(config: dict[str, Any]) -> int:
    """Return the number whose root llama.cpp uses to scale the scores of Gemma's attention."""
    if config["num_hidden_layers"] == _LAYERS_OF_27B:
        return config["hidden_size"] // config["num_attention_heads"]
    return config["head_dim"]
