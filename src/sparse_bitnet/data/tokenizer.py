# SPDX-License-Identifier: Apache-2.0
"""Train a byte-level BPE of a given size; what identifies a tokenizer."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sparse_bitnet.errors import UserError, library_errors_as

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"

SMALLEST_VOCABULARY = 257
"""Every byte and the end-of-text token."""

LARGEST_VOCABULARY = 1 << 24

# Qwen2's pattern: transformers builds a Qwen2Tokenizer with this one and with NFC whatever
# tokenizer.json says, so only a tokenizer that has both is the same through every door.
_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def check_vocabulary_size(vocab_size: int) -> None:
    """Raise `UserError` for a size of which `train_tokenizer` makes none."""
    if not SMALLEST_VOCABULARY <= vocab_size <= LARGEST_VOCABULARY:
        raise UserError(
            f"vocabulary size {vocab_size}: must be {SMALLEST_VOCABULARY} (256 bytes and {END_OF_TEXT}) "
            f"to {LARGEST_VOCABULARY}"
        )


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> "PreTrainedTokenizerFast":
    """Train a byte-level BPE: Qwen2's pre-tokenizer and NFC, `<|endoftext|>` (id 0) as end and padding.

    The same documents in the same order give the same tokenizer. Text too small for `vocab_size`
    gives a smaller vocabulary. Raises `UserError` as `check_vocabulary_size`.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    check_vocabulary_size(vocab_size)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN2_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )


def tokenizer_hash(tokenizer: "PreTrainedTokenizerFast") -> str:
    """32 hexadecimal digits, equal for tokenizers that make the same tokens of every document.

    Covers vocabulary, merges, normaliser, pre-tokenizer, added tokens and the end token; not the chat
    template, truncation and padding. Saving and loading does not change it.
    """
    content: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    del content["truncation"], content["padding"]
    content["eos_token_id"] = tokenizer.eos_token_id
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()


def text_backend(tokenizer: "PreTrainedTokenizerFast") -> "Tokenizer":
    """Return the backend that tokenises whole documents; text that spells a special token stays text."""
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    return backend


def tokenised(
    backend: "Tokenizer", texts: Sequence[str], end: int, dtype: np.dtype
) -> Iterator[np.ndarray]:
    """The ids of each document, and the token `end` after them. Raises `UserError` for a text that the
    tokenizer cannot encode."""
    with library_errors_as("the tokenizer.json cannot encode this text"):
        encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
    for encoding in encodings:
        yield np.array([*encoding.ids, end], dtype)


def vocabulary_size(tokenizer: "PreTrainedTokenizerFast") -> int:
    """One more than the largest token id, which `len(tokenizer)` is not where ids have gaps."""
    return max(tokenizer.get_vocab().values()) + 1
