# SPDX-License-Identifier: Apache-2.0
"""Conversations as tokens, of which only the assistant's are learnt.

A conversation is a list of messages, `{"role": ..., "content": ...}`, that the tokenizer's chat template
turns into one text. Where the template marks what the assistant says with `{% generation %}`, that is
learnt; of others, what comes after the prompt for an answer, up to the next message. A stored token is
uint32: its id, and above it whether it is learnt and whether it begins a conversation.
"""

import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from sparse_bitnet.data.text_files import check_text
from sparse_bitnet.errors import UserError, reason_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

LEARNT = np.uint32(1 << 31)
BEGINS = np.uint32(1 << 30)
IDS = BEGINS - np.uint32(1)

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


def check_messages(value: object, column: str, where: str) -> str:
    """A conversation as JSON, "" for null; `UserError` for anything else, or without an assistant."""
    if value is None:
        return ""
    fine = isinstance(value, list) and all(
        isinstance(message, dict)
        and all(isinstance(message.get(name), str) for name in ("role", "content"))
        for message in value
    )
    if not fine:
        raise UserError(
            f'{where}: column {column!r} is no list of {{"role": text, "content": text}}'
        )
    assert isinstance(value, list)
    if not any(message["role"] == "assistant" for message in value):
        raise UserError(f"{where}: no message of the assistant, so nothing to learn")
    try:
        conversation = json.dumps(value, ensure_ascii=False)
    except TypeError as error:  # a column of .parquet may hold dates and bytes
        raise UserError(f"{where}: column {column!r} holds what JSON cannot: {error}") from error
    return check_text(conversation, column, where)


def check_template(tokenizer: "PreTrainedTokenizerFast") -> str:
    """The tokenizer's chat template. Raises `UserError` where it has none."""
    if not isinstance(tokenizer.chat_template, str):
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path} has no chat template: take a chat model's, or put "
            "a chat_template.jinja into its folder"
        )
    return tokenizer.chat_template


def end_of_turn_tokens(
    tokenizer: "PreTrainedTokenizerFast", template: str | None = None
) -> list[int]:
    """Return the ids of the tokens that a chat template puts right after an answer.

    `template` is the tokenizer's own by default. The token after the last answer comes first; the one
    between an answer and the next message follows where it differs. Empty for a template that ends
    answers with plain text, and for one that fails on a plain conversation.
    """
    answer = "the answer"
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": answer}] * 2
    try:
        text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    except Exception:  # whatever a template of strangers raises
        return []
    tokens = {token.content: id for id, token in tokenizer.added_tokens_decoder.items()}
    ends: list[int] = []
    for rest in reversed(text.split(answer)[1:]):
        fitting = [content for content in tokens if rest.lstrip().startswith(content)]
        if fitting:
            ends.append(tokens[max(fitting, key=len)])
    return list(dict.fromkeys(ends))


def encode(tokenizer: "PreTrainedTokenizerFast", conversation: str) -> np.ndarray:
    """A conversation, as `check_messages` gives it, in the form of stored tokens: uint32 [tokens].

    Raises `UserError` for one that the template refuses, or whose answers it writes in another way once
    others follow.
    """
    messages = json.loads(conversation)
    try:
        ids, learnt = (_by_marks if _MARKED.search(check_template(tokenizer)) else _by_prompts)(
            tokenizer, messages
        )
    except UserError:
        raise
    except Exception as error:  # whatever a template of strangers raises
        raise UserError(
            f"the chat template refuses {_shown(conversation)}: {reason_of(error)}"
        ) from error
    tokens = np.array(ids, np.uint32)
    if not np.any(learnt):
        raise UserError(f"the chat template leaves nothing to learn of {_shown(conversation)}")
    tokens[np.array(learnt, bool)] |= LEARNT
    tokens[0] |= BEGINS
    return tokens


def _by_marks(tokenizer: Any, messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    found = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    return found["input_ids"], found["assistant_masks"]


def _by_prompts(tokenizer: Any, messages: list[dict[str, Any]]) -> tuple[list[int], np.ndarray]:
    def text(count: int, prompts: bool) -> str:
        return tokenizer.apply_chat_template(
            messages[:count], tokenize=False, add_generation_prompt=prompts
        )

    whole = text(len(messages), False)
    encoding = tokenizer.backend_tokenizer.encode(whole, add_special_tokens=False)
    first = np.array([start for start, _ in encoding.offsets])
    learnt = np.zeros(len(first), bool)
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt, answered = text(number, True), text(number + 1, False)
            if not (whole.startswith(answered) and answered.startswith(prompt)):
                raise UserError(
                    f"the chat template writes message {number + 1} of {_shown(json.dumps(messages))} "
                    "in another way when it is a prompt or others follow: mark what the assistant says "
                    "in it with {% generation %}"
                )
            learnt |= (first >= len(prompt)) & (first < len(answered))
    return encoding.ids, learnt


def _shown(conversation: str) -> str:
    return conversation if len(conversation) <= 80 else conversation[:77] + "..."
