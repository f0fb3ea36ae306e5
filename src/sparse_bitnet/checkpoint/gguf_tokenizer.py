# SPDX-License-Identifier: Apache-2.0
"""The tokenizer that a GGUF file describes: byte-level BPE ("gpt2"), or SentencePiece's BPE ("llama").

The file names how text is split before merges. Without a name that is known here, text is split as suits
the vocabulary best, and a warning says so.
"""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sparse_bitnet.checkpoint.config_fields import shown
from sparse_bitnet.checkpoint.model_folder import write_json
from sparse_bitnet.errors import UserError, library_errors_as

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_WHOLE = _CONTROL, _USER_DEFINED = 3, 4
"""Token types that are never split, and are spelled as in the text."""

_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""transformers' names of special tokens -> GGUF's."""
ENDS = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|end_of_text|>", "[EOT]"),
    *("<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "<end_of_utterance>"),
}
"""Tokens at which llama.cpp ends a text by their names, whatever the metadata says."""

_LONGEST = 256
"""Most characters of a token for which merges are derived; SentencePiece makes tokens of up to 16."""
_LOOKED_AT = 4096
"""Most tokens from which the pre-tokenizer is inferred."""

_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SYMBOLS, _BEFORE = r" ?[^\s\p{L}\p{N}]+", r"[^\r\n\p{L}\p{N}]?"
QWEN2 = rf"{_ENGLISH}|{_BEFORE}\p{{L}}+|\p{{N}}|{_SYMBOLS}[\r\n]*|{_REST}"
_LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_TEKKEN = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}|{_SYMBOLS}[\r\n/]*|{_REST}"
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN35 = (
    rf"{_ENGLISH}|{_BEFORE}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_REST}"
)
_SEED = QWEN2.replace(r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}\r\n]+")
_BLOOM = " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+"
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", GPT2)
DIGIT = r"\p{N}"
_DEEPSEEK_CODER = (
    *(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+"),
    *("[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", DIGIT),
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_REST}",
)


class PreTokenizer(NamedTuple):
    """How a text is split before merges."""

    names: tuple[str, ...]
    """llama.cpp's names; the first is written."""
    regexes: tuple[str, ...]
    """Regexes in order; each splits what those before have left."""
    ignores_merges: bool = False
    """Whether a piece that is a token as a whole stays one, whatever the merges give."""
    begins: bool = False
    """Whether texts begin with the bos token if a file does not say."""


def _pre(
    names: str, *regexes: str, ignores_merges: bool = False, begins: bool = False
) -> PreTokenizer:
    return PreTokenizer(tuple(names.split()), regexes, ignores_merges, begins)


PRE_TOKENIZERS = (
    _pre(
        "gpt-2 phi-2 mpt olmo gigachat mellum jais trillion granite-docling exaone4 a.x-4.0", GPT2
    ),
    _pre("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", DIGIT, GPT2),
    _pre("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", QWEN2),
    _pre("qwen35", _QWEN35),
    _pre(
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        _LLAMA3,
        ignores_merges=True,
        begins=True,
    ),
    _pre("glm4 glm5", _LLAMA3, ignores_merges=True),
    _pre("dbrx smaug-bpe chatglm-bpe", _LLAMA3),
    _pre("minicpm5", r"\p{N}{1,3}", _LLAMA3.replace("{1,3}", "+"), ignores_merges=True),
    _pre("tekken", _TEKKEN, ignores_merges=True, begins=True),
    _pre("seed-coder", _SEED),
    _pre("falcon_e", *_FALCON, "[0-9]"),
    _pre("falcon", *_FALCON, "[0-9][0-9][0-9]"),
    _pre("poro-chat bloom gpt3-finnish", _BLOOM),
    _pre("viking", _BLOOM, DIGIT),
    _pre("deepseek-coder", *_DEEPSEEK_CODER),
    _pre("deepseek-v3 hunyuan-dense joyai-llm hy_v4", *_DEEPSEEK3),
)
"""All pre-tokenizers that can be read and written."""

NFC = "sparse_bitnet.nfc"
"""Field of our own GGUF files: whether the tokenizer normalises text to Unicode form NFC."""

_DEFAULTS = {"llama": {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}}
"""Kind of tokenizer -> token ids that a reader assumes if a file does not name them."""


def write_tokenizer(metadata: dict[str, Any], path: Path, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json into a folder, from the
    metadata of the GGUF file at `path`. Raises `UserError` as `read_tokenizer` does."""
    begin = "tokenizer.ggml."
    fields = {k.removeprefix(begin): v for k, v in metadata.items() if k.startswith(begin)}
    tokenizer = read_tokenizer(fields, str(path))
    tokens = fields["tokens"]
    fields = _DEFAULTS.get(fields["model"], {}) | fields
    special = {
        f"{name}_token": tokens[index]
        for name, key in _SPECIAL.items()
        if type(index := fields.get(f"{key}_token_id")) is int and 0 <= index < len(tokens)
    }
    pre = _named_split(fields)
    begins = fields["model"] == "llama" or (pre is not None and pre.begins)
    around = [
        special.get(f"{name}_token") if fields.get(f"add_{name}_token", default) else None
        for name, default in (("bos", begins), ("eos", False))
    ]
    content = json.loads(tokenizer.to_str())
    if any(around):
        content["post_processor"] = _around({t: i for i, t in enumerate(tokens)}, *around)
    text = json.dumps(content, indent=2, ensure_ascii=False)
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    templates = {"": "chat_template.jinja", ".tool_use": "additional_chat_templates/tool_use.jinja"}
    for suffix, name in templates.items():
        if isinstance(template := metadata.get(f"tokenizer.chat_template{suffix}"), str):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(template, "utf-8")
    kind = metadata.get(f"{metadata.get('general.architecture')}.pooling_type")
    if kind is not None:
        named = {"1": "mean", "3": "lasttoken"}.get(str(kind), f"type {kind}")
        (folder / "1_Pooling").mkdir()
        write_json(folder / "1_Pooling" / "config.json", {"pooling_mode": named})
    ids = (fields.get(f"{name}_token_id") for name in ("eos", "eot", "eom"))
    ends = {index for index in ids if type(index) is int and 0 <= index < len(tokens)}
    ends |= {index for index, token in enumerate(tokens) if token in ENDS}
    write_json(folder / "tokenizer_config.json", config)
    if ends:
        write_json(folder / "generation_config.json", {"eos_token_id": sorted(ends)})


def read_tokenizer(fields: dict[str, Any], where: str) -> "Tokenizer":
    """Build the tokenizer from the metadata `tokenizer.ggml.*`, named without that prefix.

    Raises `UserError`, beginning with `where`, for another kind and for invalid metadata.
    """
    builders = {"gpt2": _byte_level, "llama": _sentence_piece}
    kind = fields.get("model")
    if not isinstance(kind, str) or kind not in builders:
        kinds = " and ".join(builders)
        raise UserError(f"{where}: a tokenizer {shown(kind)} is not supported; {kinds} are")
    from tokenizers import AddedToken

    with library_errors_as(f"{where}: its tokenizer cannot be read"):
        tokens, types = fields["tokens"], fields.get("token_type", ())
        tokenizer = builders[kind](fields, where)
        for kind in _WHOLE:
            is_normalized = kind == _USER_DEFINED and tokenizer.normalizer is None
            added = [
                AddedToken(token, normalized=is_normalized, special=kind == _CONTROL)
                for token, stated in zip(tokens, types, strict=False)
                if stated == kind
            ]
            tokenizer.add_tokens(added)
        return tokenizer


def _byte_level(fields: dict[str, Any], where: str) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models, normalizers
    from tokenizers.pre_tokenizers import ByteLevel, Sequence

    alphabet = set(ByteLevel.alphabet())
    plain = ByteLevel(add_prefix_space=False, use_regex=False)
    whole = {fields.get(f"{name}_token_id") for name in _SPECIAL.values()}
    kinds = dict(enumerate(fields.get("token_type", ())))
    whole |= {index for index, kind in kinds.items() if kind in _WHOLE}

    def spelled(index: int, token: str) -> str:
        if index in whole or set(token) <= alphabet:
            return token
        return "".join(part for part, _ in plain.pre_tokenize_str(token))

    vocabulary = {spelled(*each): each[0] for each in enumerate(fields["tokens"])}
    merges = [tuple(merge.split(" ")) for merge in fields.get("merges", ())]
    if (pre := _named_split(fields)) is None:
        plain_tokens = [token for token, index in vocabulary.items() if kinds.get(index, 1) == 1]
        pre = _likeliest_split(plain_tokens)
        name = "not named" if "pre" not in fields else shown(fields["pre"])
        warnings.warn(
            f"{where}: its pre-tokenizer is {name}, so text is split as for {pre.names[0]}, which fits "
            "its vocabulary best; tokens may differ from training: to be sure, import the file, then "
            "replace the imported tokenizer.json by the model's own",
            stacklevel=2,
        )
    bpe = models.BPE(vocabulary, merges, fuse_unk=False, ignore_merges=pre.ignores_merges)
    tokenizer = Tokenizer(bpe)
    if fields.get(NFC, fields.get("pre") in ("qwen2", "qwen35")):  # whose models all do
        tokenizer.normalizer = normalizers.NFC()
    is_gpt2 = pre.regexes == (GPT2,)
    plain.use_regex = is_gpt2
    tokenizer.pre_tokenizer = plain if is_gpt2 else Sequence([*_splits(pre), plain])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _named_split(fields: dict[str, Any]) -> PreTokenizer | None:
    return next((row for row in PRE_TOKENIZERS if fields.get("pre") in row.names), None)


def _likeliest_split(tokens: list[str]) -> PreTokenizer:
    """Return the pre-tokenizer that keeps most tokens whole, as training's did; on a tie, the finest."""
    from tokenizers import decoders
    from tokenizers.pre_tokenizers import Sequence

    decode = decoders.ByteLevel().decode
    texts = [decode([token]) for token in tokens[:: 1 + len(tokens) // _LOOKED_AT]]
    texts = [text for text in texts if "\ufffd" not in text]

    def fit(pre: PreTokenizer) -> tuple[int, int]:
        split = Sequence(_splits(pre)).pre_tokenize_str
        return sum(len(split(text)) == 1 for text in texts), len(split("".join(texts)))

    return max(PRE_TOKENIZERS, key=fit)


def _splits(pre: PreTokenizer) -> list[Any]:
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Split

    return [Split(Regex(regex), behavior="isolated") for regex in pre.regexes]


def _sentence_piece(fields: dict[str, Any], where: str) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models
    from tokenizers.normalizers import Prepend, Replace, Sequence

    vocabulary = {token: index for index, token in enumerate(fields["tokens"])}
    if "merges" in fields:
        merges = [tuple(merge.split(" ")) for merge in fields["merges"]]
    else:
        merges = _implied_merges(vocabulary, fields["scores"])
    bpe = models.BPE(vocab=vocabulary, merges=merges, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    before, steps = [], [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if fields.get("add_space_prefix", True):
        # Prepend also puts a space before a text that begins with one, which Metaspace would not do.
        before.append(Prepend("▁"))
        steps.append(decoders.Strip(content=" ", left=1))
    tokenizer.normalizer = Sequence([*before, Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _implied_merges(vocabulary: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return the pairs that join into a token, the best score first, as SentencePiece joins them."""
    merges: list[tuple[float, tuple[str, str]]] = []
    for token, score in zip(vocabulary, scores, strict=False):
        if len(token) > _LONGEST:
            continue
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        pairs = [pair for pair in cuts if vocabulary.keys() >= set(pair)]
        pairs.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        merges += [(score, pair) for pair in pairs]
    merges.sort(key=lambda one: (one[0], len(one[1][0]), len(one[1][1])), reverse=True)
    return [pair for _, pair in merges]


def _around(ids: dict[str, int], first: str | None, last: str | None) -> dict[str, Any]:
    """Return the post-processor, as in tokenizer.json, that puts these tokens around every text."""
    tokens = [token for token in (first, last) if token]
    before, after = (
        [{"SpecialToken": {"id": token, "type_id": 0}}] if token else [] for token in (first, last)
    )
    text, other = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [*before, text, *after],
        "pair": [*before, text, other, *after],
        "special_tokens": {t: {"id": t, "ids": [ids[t]], "tokens": [t]} for t in tokens},
    }
