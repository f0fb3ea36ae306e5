# SPDX-License-Identifier: Apache-2.0
"""The metadata of a GGUF file from config.json; the other direction: gguf_config.py."""

from typing import Any

import numpy as np

from sparse_bitnet.checkpoint.config_fields import (
    GEMMA3,
    Fields,
    gemma_windows,
    head_size,
    rope_of,
    unread_setting,
    windows_of,
)
from sparse_bitnet.checkpoint.gguf_architectures import ARCHITECTURES, GgufArchitecture
from sparse_bitnet.checkpoint.gguf_config import (
    EPSILON,
    HEAD_SIZES,
    KINDS,
    KV_HEADS,
    LLAMA3,
    LLAMA3_CONTEXTS,
    LOCAL_ROPE_BASE,
    PATTERN,
    ROPE_BASE,
    SCALING,
    SIZES,
    WINDOW,
    gemma_scores,
    llama3_factors,
)
from sparse_bitnet.checkpoint.model_folder import LINEAR_NORMS
from sparse_bitnet.errors import UserError


def metadata_of(config: dict[str, Any], where: str) -> tuple[GgufArchitecture, dict[str, Any]]:
    """The architecture of a config.json, and its metadata by key: whole numbers, floats, strings, lists.

    Raises `UserError`, beginning with `where`, for what a file cannot say or llama.cpp would ignore.
    """
    fields = Fields(config, f"{where}: ")
    architecture = _architecture_for(config, where)
    values: dict[str, Any] = {key: fields.size(field) for key, field in SIZES.items()}
    name, heads = architecture.name, config["num_attention_heads"]
    head = fields.size("head_dim", head_size(config))
    if not architecture.own_head_size:
        _expect(where, "head_dim", head, config["hidden_size"] // heads)
    if not architecture.biases:
        _expect(where, "attention_bias", bool(config.get("attention_bias")), False)
    if architecture.model_type == "bitnet":
        _expect(where, "tie_word_embeddings", bool(config.get("tie_word_embeddings")), True)
    values |= {
        KV_HEADS: fields.size("num_key_value_heads", heads),
        EPSILON: fields["rms_norm_eps"],
    }
    if architecture.own_head_size:
        values |= {**dict.fromkeys(HEAD_SIZES, head), "vocab_size": fields.size("vocab_size")}
    _expect(where, "a setting that is not read", unread_setting(config), None)
    values |= _windows(config, architecture, where)
    rope = rope_of(config, where)
    if architecture.model_type == GEMMA3:
        for off in ("attn_logit_softcapping", "final_logit_softcapping"):
            _expect(where, off, config.get(off), None)
        scores = config.get("query_pre_attn_scalar", 256)
        _expect(where, "query_pre_attn_scalar", scores, gemma_scores({**config, "head_dim": head}))
        local = rope_of(config, where, local=True)
        _expect(where, "rope_type of layers with a window", local["rope_type"], "default")
        values[LOCAL_ROPE_BASE] = Fields(local, f"{where}: rope parameter ")["rope_theta"]
    values |= _rope_metadata(rope, where)
    return architecture, {f"{name}.{key}": value for key, value in values.items()}


def rope_factors(config: dict[str, Any], where: str) -> np.ndarray | None:
    """float32 [head_dim / 2]: what divides the frequencies of rope type llama3; None for others."""
    rope = rope_of(config, where)
    if rope["rope_type"] != "llama3":
        return None
    return llama3_factors(rope["rope_theta"], head_size(config) // 2, rope)


def _architecture_for(config: dict[str, Any], where: str) -> GgufArchitecture:
    model_type = config.get("model_type")
    rows = [row for row in ARCHITECTURES if row.model_type == model_type]
    if not rows:
        known = dict.fromkeys(row.model_type for row in ARCHITECTURES)
        raise UserError(
            f"the GGUF export covers the architectures {', '.join(known)}, not {model_type}; use "
            "--format bitnet"
        )
    own = config.get(LINEAR_NORMS)
    rows = [row for row in rows if row.linear_norms == bool(own)]
    if not rows or own not in (None, config.get("rms_norm_eps")):
        raise UserError(
            f"{where}: the GGUF export does not cover a norm in each linear of {model_type}"
        )
    for row in rows:
        if all(config.get(field, value) == value for field, value in row.fields.items()):
            return row
    ((field, value),) = rows[0].fields.items()
    _expect(where, field, config.get(field), value)
    raise AssertionError


def _expect(where: str, setting: str, found: object, expected: object) -> None:
    if found != expected:
        raise UserError(
            f"{where}: {setting}={found} is not covered by the GGUF export, which writes {expected}; "
            "use --format bitnet"
        )


def _windows(config: dict[str, Any], architecture: GgufArchitecture, where: str) -> dict[str, Any]:
    windows = windows_of(config, where)
    if not any(windows):
        return {}
    if not architecture.windows:
        _expect(where, "sliding_window", max(windows), None)
    has_window = [window > 0 for window in windows]
    values: dict[str, Any] = {WINDOW: max(windows)}
    if architecture.model_type != GEMMA3:
        _expect(where, "layers without a window", has_window.count(False), 0)
    elif has_window != gemma_windows(len(windows)):
        values[PATTERN] = has_window
    return values


def _rope_metadata(rope: dict[str, Any], where: str) -> dict[str, Any]:
    kind: str = rope["rope_type"]
    numbers = Fields(rope, f"{where}: rope parameter ")
    values: dict[str, Any] = {ROPE_BASE: numbers["rope_theta"]}
    known = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
    if kind in KINDS:
        known |= {"factor"}
        values |= {f"{SCALING}.type": kind, f"{SCALING}.factor": numbers["factor"]}
    if kind == "yarn":
        known |= {"original_max_position_embeddings"}
        context_key = f"{SCALING}.original_context_length"
        values[context_key] = numbers.size("original_max_position_embeddings")
    elif kind == "llama3":
        known |= {"factor", "original_max_position_embeddings", *LLAMA3}
        numbers["factor"]
        _expect(where, "rope frequency factors", {key: rope.get(key) for key in LLAMA3}, LLAMA3)
        context = rope.get("original_max_position_embeddings")
        _expect(where, "original_max_position_embeddings", context in LLAMA3_CONTEXTS, True)
    elif kind not in ("default", "linear"):
        _expect(where, "rope_type", kind, "default, linear, yarn or llama3")
    _expect(where, "partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), 1.0)
    others = sorted(key for key, value in rope.items() if key not in known and value is not None)
    _expect(where, "rope parameters", others, [])
    return values
