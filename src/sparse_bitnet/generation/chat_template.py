# SPDX-License-Identifier: Apache-2.0
"""Chats to prompts: a model's own Jinja template, rendered as transformers renders it, in a process of
its own that bounds what a template of strangers can take."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparse_bitnet.checkpoint.model_folder import read_json_if_there, read_small
from sparse_bitnet.errors import UserError
from sparse_bitnet.generation.bounded_process import BoundedProcess
from sparse_bitnet.generation.text import named_tokens


class ChatTemplate:
    """A template with the special tokens that it may name. Any thread may render."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """Raises `UserError` for a template with a syntax error."""
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._process = BoundedProcess("sparse_bitnet.generation.template_process")
        reply = self._process.ask(json.dumps([source, None]))
        if "error" in reply:
            raise UserError(f"the chat template is damaged: {reply['error']}")

    @classmethod
    def load(cls, folder: str | Path) -> "ChatTemplate":
        """The template of chat_template.jinja, else the one in tokenizer_config.json.

        Raises `UserError` when the folder has none.
        """
        folder = Path(folder)
        path = folder / "chat_template.jinja"
        if path.is_file():
            try:
                source: Any = read_small(path).decode()
            except UnicodeDecodeError as error:
                raise UserError(f"{path} is damaged: {error}") from error
        else:
            source = read_json_if_there(folder / "tokenizer_config.json").get("chat_template")
        if isinstance(source, list):
            # Several templates by name, the older form.
            entries = [entry for entry in source if isinstance(entry, dict)]
            named = [entry for entry in entries if entry.get("name") == "default"]
            source = named[-1].get("template") if named else None
        if not isinstance(source, str):
            raise UserError(
                f"{folder} has no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json): it is not a chat model, use `sparse-bitnet generate`"
            )
        return cls(source, named_tokens(folder))

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The chat as one text, to be tokenised without adding special tokens.

        Args:
            messages: each with "role" and "content", oldest first.
            variables: further names that the template knows, such as `tools`; without
                `add_generation_prompt=False` the text ends with the beginning of the assistant's answer.

        Raises `UserError` where the template refuses the chat, goes wrong, or takes more time, memory or
        text than `template_process` allows.
        """
        given = {"tools": None, "documents": None, "add_generation_prompt": True}
        given |= self._special_tokens | variables | {"messages": list(messages)}
        try:
            request = json.dumps([self.source, given], default=_plain)
        except (RecursionError, TypeError, ValueError) as error:
            raise UserError(f"the chat is not JSON: {error}") from error
        reply = self._process.ask(request)
        if "error" in reply:
            raise UserError(f"the chat template refuses this chat: {reply['error']}")
        return reply["answer"]


def _plain(value: Any) -> Any:
    """For what JSON has no form for: the name of its type."""
    return dict(value) if isinstance(value, Mapping) else f"<{type(value).__name__}>"
