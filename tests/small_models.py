# SPDX-License-Identifier: Apache-2.0
"""A small trained-looking model with a tokenizer, as a folder of ours and packed; conversations."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from factories import tiny_model
from sparse_bitnet.checkpoint.trained import save_pretrained
from sparse_bitnet.data.tokenizer import train_tokenizer
from sparse_bitnet.export.pack_checkpoint import pack_checkpoint
from sparse_bitnet.nn.convert import convert_
from sparse_bitnet.nn.layer import SparseBitConfig

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

ENDED_TEMPLATE = CHAT_TEMPLATE.replace("\n", "{{ eos_token }}")
"""Each message ends with the end token, which answers thus teach."""

TEXT = "some words, and some more words to talk about when words are few\n" * 5


def conversation(*contents: str) -> list[dict[str, str]]:
    """Messages of a user and an assistant in turn."""
    return [
        {"role": ("user", "assistant")[number % 2], "content": content}
        for number, content in enumerate(contents)
    ]


def write_conversations(path: Path, conversations: Iterable[Any]) -> Path:
    """Write rows with a column "messages"."""
    path.write_text("".join(json.dumps({"messages": each}) + "\n" for each in conversations))
    return path


def write_models(folder: Path, family: str = "qwen2", *, chat_template: str | None = None) -> Path:
    """Writes `folder`/trained and `folder`/packed, of a ternary 6:8 model with 512 positions whose
    texts do not repeat themselves; returns `folder`."""
    tokenizer = train_tokenizer(iter([TEXT]), 300)
    tokenizer.chat_template = chat_template
    model = tiny_model(
        family,
        seed=4,
        vocab_size=len(tokenizer),
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
    )
    convert_(model, SparseBitConfig.parse("ternary-6:8"))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5 if parameter.dim() == 1 else 0.1)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(8)
    save_pretrained(model, folder / "trained", tokenizer)
    pack_checkpoint(folder / "trained", folder / "packed", embeddings="float32")
    return folder
