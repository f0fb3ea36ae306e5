# SPDX-License-Identifier: Apache-2.0
"""Chats: a model's own template makes prompts of them, and a conversation computes no turn twice."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparse_bitnet.checkpoint.model_folder import read_json_if_there, read_small
from sparse_bitnet.engine.engine_options import EngineOptions
from sparse_bitnet.engine.protocol import ContextFull
from sparse_bitnet.errors import UserError
from sparse_bitnet.generation.grammar import Form, Grammar
from sparse_bitnet.generation.open_model import open_model
from sparse_bitnet.generation.prefix_cache import PrefixCache
from sparse_bitnet.generation.request import Generation
from sparse_bitnet.generation.sandbox import Sandbox
from sparse_bitnet.generation.speculation import Speculation
from sparse_bitnet.generation.text import named_tokens
from sparse_bitnet.generation.text_batches import GenerateOptions, generate


class ChatTemplate:
    """A Jinja template with the special tokens that it may name, rendered as transformers renders it, in
    a process that bounds what a template of strangers can take. Any thread may render."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """Raises `UserError` for a template with a syntax error."""
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._sandbox = Sandbox("template")
        reply = self._sandbox.ask(json.dumps([source, None]))
        if "error" in reply:
            raise UserError(f"the chat template is damaged: {reply['error']}")

    @classmethod
    def load(cls, folder: str | Path) -> "ChatTemplate":
        """Return the template of chat_template.jinja, else the one in tokenizer_config.json.

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
        """Return the chat as one text, to be tokenised without adding special tokens.

        Args:
            messages: each with "role" and "content", oldest first.
            variables: further names that the template knows, such as `tools`; without
                `add_generation_prompt=False` the text ends with the beginning of the assistant's answer.

        Raises `UserError` where the template refuses the chat, fails, or takes more time, memory or text
        than the sandbox allows.
        """
        given = {"tools": None, "documents": None, "add_generation_prompt": True}
        given |= self._special_tokens | variables | {"messages": list(messages)}
        try:
            request = json.dumps([self.source, given])
        except (RecursionError, TypeError, ValueError) as error:
            raise UserError(f"the chat is not JSON: {error}") from error
        reply = self._sandbox.ask(request)
        if "error" in reply:
            raise UserError(f"the chat template refuses this chat: {reply['error']}")
        return reply["answer"]


class Conversation:
    """Messages so far, and the engine that answers them.

    Attributes:
        model: the open model, closed with the conversation.
        messages: dictionaries with "role" and "content".
        speculation: proposes draft tokens; None at first.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        engine: EngineOptions,
        options: GenerateOptions,
        *,
        system: str | None = None,
        grammar: Grammar | None = None,
    ) -> None:
        """Load a model and its template.

        Args:
            checkpoint, engine: as for `open_model`.
            options, grammar: of each answer.
            system: instructions that come first.

        Raises `UserError` for a model that cannot be loaded or has no chat template, and a grammar that
        is none.
        """
        self.model = open_model(checkpoint, engine)
        self.speculation: Speculation | None = None
        self._options = options
        self._instructions = [{"role": "system", "content": system}] if system else []
        self._prefixes = PrefixCache(4)
        self._form: Form | None = None
        self.messages: list[dict[str, str]] = list(self._instructions)
        try:
            self._template = ChatTemplate.load(self.model.folder)
            if grammar is not None:
                self._form = self.model.grammars().start(grammar)
        except BaseException:
            self.model.engine.close()
            raise

    def reset(self) -> None:
        """Forget all but the instructions."""
        self.messages = list(self._instructions)

    def answer(
        self,
        message: str,
        *,
        on_text: Callable[[str], None],
        is_cancelled: Callable[[], bool] | None = None,
    ) -> Generation:
        """Return the model's answer to a message, at most as long as the context has room for. Both
        become part of the conversation, and so does the beginning of an answer that was cancelled.

        Raises `UserError`, the conversation as before, when the template refuses the message, and
        `ContextFull` when the context has no room for an answer.
        """
        messages = [*self.messages, {"role": "user", "content": message}]
        engine, tokenizer = self.model.engine, self.model.tokenizer
        prompt = tokenizer.encode(self._template.render(messages), add_special_tokens=False)
        room = engine.context_length - len(prompt)
        if room < 1:
            raise ContextFull(
                f"the conversation with this message has {len(prompt):,} tokens and the context holds "
                f"{engine.context_length:,}: start over, or write less"
            )
        sampling = self._options.sampling
        options = replace(
            self._options,
            max_new_tokens=min(self._options.max_new_tokens, room),
            # The same question twice may have two answers; the same conversation has one.
            sampling=replace(sampling, seed=(sampling.seed + len(self.messages)) % 2**64),
        )
        (answer,) = generate(
            engine,
            [prompt],
            options,
            tokenizer=tokenizer,
            end_tokens=self.model.end_tokens,
            form=self._form,
            prefixes=self._prefixes,
            speculation=self.speculation,
            is_start=True,
            on_token=lambda number, token, piece: on_text(piece),
            is_cancelled=is_cancelled,
        )
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        return answer

    def close(self) -> None:
        """Close the engine."""
        self._prefixes.clear()
        self.model.engine.close()
