# SPDX-License-Identifier: Apache-2.0
"""A tokenizer as GGUF metadata: byte-level BPE ("gpt2"), or SentencePiece's BPE ("llama").

llama.cpp knows pre-tokenizers by name only, so a tokenizer that splits text in another way is refused
instead of being written under a wrong name. llama.cpp does not normalise: text that is not in Unicode
form NFC gets other ids there than from a tokenizer with NFC. GGUF stores SentencePiece's merges as
scores of tokens; here the ranks of their first merges.
"""

import json
import warnings
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, SpecialVocab, TokenType

from sparse_bitnet.checkpoint.gguf_tokenizer import DIGIT, ENDS, GPT2, NFC, PRE_TOKENIZERS
from sparse_bitnet.checkpoint.load import load_tokenizer
from sparse_bitnet.checkpoint.model_folder import read_json, stored_ends
from sparse_bitnet.errors import UserError, library_errors_as

_MORE_ENDS = ("eot", "eom")
"""llama.cpp's names for end-of-text tokens beside eos."""
_SPACE = "▁"
_BYTES = {f"<0x{byte:02X}>" for byte in range(256)}
_TO_SPACE = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
_PREPEND = {"type": "Prepend", "prepend": _SPACE}


def add_vocabulary(writer: GGUFWriter, folder: Path, vocab_size: int) -> None:
    """Add the metadata of a model folder's tokenizer: vocabulary, merges, special tokens, chat template.

    Tokens are spelled as in tokenizer.json, except spaces in added ones. Unused tokens are added up to
    `vocab_size`, the rows of the embedding.

    Raises `UserError` for a tokenizer that llama.cpp would read differently: none at all, neither a
    byte-level BPE nor SentencePiece's, an unknown pre-tokenizer, another normaliser than NFC, more
    tokens than the model has, more end-of-text tokens than GGUF has names for.
    """
    path = folder / "tokenizer.json"
    content = read_json(path)
    model = content.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE" or model.get("dropout"):
        raise UserError(f"{path}: not a plain BPE; the GGUF export supports no other kind")
    own = load_tokenizer(folder)
    tokens = [f"[PAD{index}]" for index in range(vocab_size)]
    types = [TokenType.UNUSED] * vocab_size
    added = {token["content"]: token for token in content.get("added_tokens", [])}
    if strips := [name for name in added if added[name].get("lstrip") or added[name].get("rstrip")]:
        warnings.warn(
            f"{path}: read from GGUF, {strips[0]!r} drops no space beside it", stacklevel=2
        )
    vocabulary = model["vocab"] | {name: token["id"] for name, token in added.items()}
    # The model may have no rows for special tokens that tokenizer_config.json adds.
    vocabulary |= {name: index for name, index in own.get_vocab().items() if index < vocab_size}
    special_ids = {*own.all_special_ids}  # made again at each access, from all their names
    is_sentence_piece = bool(model.get("byte_fallback"))
    for name, index in vocabulary.items():
        if index >= vocab_size:
            raise UserError(
                f"{path}: token {name!r} has id {index}, but the model's vocabulary ends at "
                f"{vocab_size}"
            )
        tokens[index] = name
        types[index] = TokenType.USER_DEFINED if name in added else TokenType.NORMAL
        if index in special_ids or (name in added and added[name].get("special")):
            types[index] = TokenType.CONTROL
        if is_sentence_piece and types[index] == TokenType.USER_DEFINED:
            tokens[index] = name.replace(_SPACE, " ")  # matched in the text, and shown, literally
        if is_sentence_piece and name in _BYTES:
            types[index] = TokenType.BYTE
        elif is_sentence_piece and name == model.get("unk_token"):
            types[index] = TokenType.UNKNOWN
    special = {
        name: index
        for name in ("bos", "eos", "unk", "pad")
        if (index := getattr(own, f"{name}_token_id")) is not None and index < vocab_size
    }
    if "eos" not in special:
        raise UserError(f"{path}: the model has no row for its end-of-text token {own.eos_token!r}")
    ends = stored_ends(folder)
    more = {end for end in (ends if isinstance(ends, list) else [ends]) if type(end) is int}
    more = {end for end in more if 0 <= end < vocab_size} - {special["eos"]}
    if len(more) > len(_MORE_ENDS):  # without those that readers find by their names
        more = {end for end in more if tokens[end] not in ENDS}
    if len(more) > len(_MORE_ENDS):
        raise UserError(
            f"{folder}: {len(more) + 1} end tokens, but GGUF stores at most 3; leave 3 in the "
            "eos_token_id of generation_config.json"
        )
    special |= zip(_MORE_ENDS, sorted(more), strict=False)
    template = own.chat_template
    if isinstance(template, dict):
        template = [{"name": name, "template": text} for name, text in template.items()]
    writer.add_tokenizer_model("llama" if is_sentence_piece else "gpt2")
    writer.add_tokenizer_pre("default" if is_sentence_piece else _pre_tokenizer_name(content, path))
    writer.add_token_list(tokens)
    writer.add_token_types([int(type) for type in types])
    if is_sentence_piece:
        ranks: dict[str, int] = {}  # the earlier a token is merged, the higher its score
        for rank, merge in enumerate(model["merges"]):
            ranks.setdefault("".join(merge.split(" ") if isinstance(merge, str) else merge), rank)
        writer.add_token_scores([-float(ranks.get(t, len(model["merges"]))) for t in tokens])
        writer.add_add_space_prefix(_adds_space(content, path))
    else:
        writer.add_bool(f"tokenizer.ggml.{NFC}", content.get("normalizer") is not None)
    described = SpecialVocab(folder, load_merges=True, special_token_types=(), n_vocab=vocab_size)
    # Without a bos of its own, llama.cpp would use its default.
    described.special_token_ids = {"bos": special["eos"], **special}
    described.add_special_token = _surrounds(own, path)
    described.chat_template = template
    described.add_to_gguf(writer, quiet=True)


def _surrounds(tokenizer: Any, path: Path) -> dict[str, bool]:
    """Return whether bos and eos are added around a text. Raises `UserError` for other tokens."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    encode = tokenizer.backend_tokenizer.encode
    with library_errors_as(f"{path} cannot encode a text"):
        inner, whole = (encode("a", add_special_tokens=add).ids for add in (False, True))
    more = len(whole) - len(inner)
    around = {"bos": more > 0 and whole[0] == bos, "eos": more > 0 and whole[-1] == eos}
    if whole != [bos] * around["bos"] + inner + [eos] * around["eos"]:
        raise UserError(
            f"{path}: it adds tokens other than bos and eos to a text, which GGUF cannot store"
        )
    return around


def _adds_space(content: dict[str, Any], path: Path) -> bool:
    """Whether a space is added before a text. Raises `UserError` for other steps than SentencePiece's."""
    normalizer = content.get("normalizer") or {}
    steps = normalizer.get("normalizers", [normalizer] if normalizer else [])
    pre_tokenizer = content.get("pre_tokenizer") or {}
    if pre_tokenizer.get("type") == "Metaspace" and pre_tokenizer.get("split") is False:
        scheme = pre_tokenizer.get("prepend_scheme", "always")
        if scheme != "never":
            warnings.warn(
                f"{path}: read from GGUF, the tokenizer also puts a space before texts that begin with "
                "one, and after special tokens",
                stacklevel=2,
            )
        steps = [*([] if scheme == "never" else [_PREPEND]), _TO_SPACE, *steps]
    elif pre_tokenizer.get("pattern") != _TO_SPACE["pattern"] and pre_tokenizer:
        # Gemma's pre-tokenizer splits at spaces, which its normaliser has replaced.
        steps = []
    if steps not in ([_TO_SPACE], [_PREPEND, _TO_SPACE]):
        raise UserError(
            f"{path}: it changes or splits text, unlike llama.cpp's SentencePiece: "
            f"{json.dumps([normalizer, pre_tokenizer])[:120]}"
        )
    return _PREPEND in steps


def _pre_tokenizer_name(content: dict[str, Any], path: Path) -> str:
    """Return llama.cpp's name. Raises `UserError` if none splits and normalises the same way."""
    normalizer = content.get("normalizer")
    if normalizer is not None and normalizer.get("type") != "NFC":
        raise UserError(
            f"{path}: normaliser {normalizer.get('type')} is not available in llama.cpp; "
            "train the tokenizer with NFC or without"
        )
    pre_tokenizer = content.get("pre_tokenizer") or {}
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    splits, ignores = _regexes(steps), bool(content["model"].get("ignore_merges"))
    for row in PRE_TOKENIZERS:
        if (row.regexes, row.ignores_merges) == (splits, ignores):
            return row.names[0]
    raise UserError(
        f"{path}: its pre-tokenizer, with ignore_merges {ignores}, is not one that llama.cpp has "
        f"a name for ({', '.join(row.names[0] for row in PRE_TOKENIZERS)}): "
        f"{json.dumps(steps)[:120]}"
    )


def _regexes(steps: list[dict[str, Any]]) -> tuple[str, ...] | None:
    """Return the regexes of a tokenizer.json's steps, as in `PRE_TOKENIZERS`; None for other steps."""
    regexes = []
    for place, step in enumerate(steps, start=1):
        match step:
            case {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated"}:
                regexes.append("" if step.get("invert") else regex)
            case {"type": "Digits", "individual_digits": True}:
                regexes.append(DIGIT)
            case {"type": "ByteLevel", "add_prefix_space": False} if place == len(steps):
                return tuple(regexes + [GPT2] * step.get("use_regex", True))
            case _:
                break
    return None
