# SPDX-License-Identifier: Apache-2.0
"""Train a byte-level BPE of a given size, and identify tokenizers by a hash."""

import hashlib
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from sparse_bitnet.checkpoint.gguf_tokenizer import QWEN2

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"

LARGEST_VOCABULARY = 1 << 24


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> "PreTrainedTokenizerFast":
    """Train a byte-level BPE: Qwen2's pre-tokenizer and NFC, `<|endoftext|>` (id 0) as end and padding.

    The same documents in the same order give the same tokenizer. Text too small for `vocab_size`
    gives a smaller vocabulary.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    # transformers builds a Qwen2Tokenizer with this pattern and with NFC whatever tokenizer.json says, so
    # only a tokenizer that has both is the same however it is loaded.
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2), behavior="isolated"),
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
    """Return 32 hexadecimal digits, equal for tokenizers that make the same tokens of every document.

    Covers vocabulary, merges, normaliser, pre-tokenizer, added tokens and the end token; not the chat
    template, truncation and padding. Saving and loading does not change it.
    """
    content: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    del content["truncation"], content["padding"]
    content["eos_token_id"] = tokenizer.eos_token_id
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()


def vocabulary_size(tokenizer: "PreTrainedTokenizerFast") -> int:
    """Return one more than the largest token id, which `len(tokenizer)` is not where ids have gaps."""
    return max(tokenizer.get_vocab().values()) + 1
