# SPDX-License-Identifier: Apache-2.0
"""A byte-level BPE tokenizer as GGUF metadata: tokens, types, merges, and the pre-tokenizer's name.

llama.cpp knows pre-tokenizers by name only, so a tokenizer that splits text in another way is refused
instead of being written under a wrong name. llama.cpp normalises nothing: text that is not in Unicode
form NFC already gives other ids there than a tokenizer with NFC gives.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_bitnet.checkpoint.model_folder import read_json
from sparse_bitnet.errors import UserError

if TYPE_CHECKING:
    from gguf import GGUFWriter

_BYTE_LEVEL: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False}
_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "qwen2": [
        {
            "type": "Split",
            "pattern": {"Regex": _QWEN2_PATTERN},
            "behavior": "Isolated",
            "invert": False,
        },
        _BYTE_LEVEL | {"use_regex": False},
    ],
    "gpt-2": [_BYTE_LEVEL | {"use_regex": True}],
}
"""llama.cpp's name -> the steps it stands for, as tokenizer.json spells them."""


class TokenType(IntEnum):
    """llama.cpp's token types."""

    NORMAL = 1
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5


@dataclass(frozen=True)
class GgufVocabulary:
    """What GGUF says about a tokenizer."""

    pre_tokenizer: str
    tokens: list[str]
    """As tokenizer.json spells them, one per row of the embedding."""
    types: list[TokenType]


def read_vocabulary(folder: Path, vocab_size: int) -> GgufVocabulary:
    """The tokenizer of a model folder, filled up to the model's `vocab_size` with unused tokens.

    Raises `UserError` for a tokenizer that llama.cpp would read differently: none there, not a
    byte-level BPE, an unknown pre-tokenizer, another normaliser than NFC, more tokens than the model.
    """
    path = folder / "tokenizer.json"
    content = read_json(path)
    _check_model(content, path)
    tokens = [f"[PAD{index}]" for index in range(vocab_size)]
    types = [TokenType.UNUSED] * vocab_size
    added = {token["content"]: token for token in content.get("added_tokens", [])}
    vocabulary = content["model"]["vocab"] | {name: token["id"] for name, token in added.items()}
    for name, index in vocabulary.items():
        if index >= vocab_size:
            raise UserError(
                f"{path}: token {name!r} has id {index}, but the model's vocabulary ends at "
                f"{vocab_size}"
            )
        tokens[index] = name
        types[index] = _token_type(added.get(name))
    return GgufVocabulary(pre_tokenizer_name(content, path), tokens, types)


def _token_type(added: Mapping[str, Any] | None) -> TokenType:
    if added is None:
        return TokenType.NORMAL
    return TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED


def _check_model(content: dict[str, Any], path: Path) -> None:
    model = content.get("model", {})
    if model.get("type") != "BPE" or model.get("byte_fallback") or model.get("dropout"):
        raise UserError(f"{path}: not a plain byte-level BPE; the GGUF export covers no other kind")
    if model.get("ignore_merges"):
        raise UserError(f"{path}: ignore_merges is set, which the GGUF export does not cover")
    normalizer = content.get("normalizer")
    if normalizer is not None and normalizer.get("type") != "NFC":
        raise UserError(
            f"{path}: normaliser {normalizer.get('type')} is not available in llama.cpp; "
            "train the tokenizer with NFC or without"
        )


def pre_tokenizer_name(content: dict[str, Any], path: Path) -> str:
    """llama.cpp's name of the pre-tokenizer in a tokenizer.json.

    Raises `UserError` when llama.cpp has none that splits the same way.
    """
    pre_tokenizer = content.get("pre_tokenizer") or {}
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    relevant = [
        {key: value for key, value in step.items() if key != "trim_offsets"} for step in steps
    ]
    for name, expected in PRE_TOKENIZERS.items():
        if relevant == expected:
            return name
    raise UserError(
        f"{path}: its pre-tokenizer is not one of those that the GGUF export knows by llama.cpp's name "
        f"({', '.join(PRE_TOKENIZERS)}): {json.dumps(relevant)[:120]}"
    )


def add_vocabulary(writer: "GGUFWriter", vocabulary: GgufVocabulary, folder: Path) -> None:
    """Write the tokenizer's metadata: vocabulary, merges, special tokens, chat template."""
    from gguf import SpecialVocab

    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary.pre_tokenizer)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types([int(type) for type in vocabulary.types])
    special = SpecialVocab(folder, load_merges=True, n_vocab=len(vocabulary.tokens))
    end = special.special_token_ids.get("eos")
    if "bos" not in special.special_token_ids and end is not None:
        # Otherwise llama.cpp takes GPT-2's, token 11, which means something else here.
        special.special_token_ids["bos"] = end
    special.add_special_token.setdefault("bos", False)
    special.add_to_gguf(writer, quiet=True)
