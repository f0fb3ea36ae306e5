# SPDX-License-Identifier: Apache-2.0
"""Chats: a model's chat template turns messages into prompts, and each turn is computed once."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparse_bitnet.checkpoint.model_folder import read_json_if_there, read_small
from sparse_bitnet.engine.protocol import ContextFull
from sparse_bitnet.errors import UserError, library_errors_as
from sparse_bitnet.generation.open_model import OpenModel
from sparse_bitnet.generation.prefix_cache import PrefixCache
from sparse_bitnet.generation.request import Generation
from sparse_bitnet.generation.sampling_options import SamplingOptions
from sparse_bitnet.generation.sandbox import Sandbox
from sparse_bitnet.generation.speculation import Speculation
from sparse_bitnet.generation.text import named_tokens


class ChatTemplate:
    """A Jinja template with the special tokens that it may use, rendered as transformers does, but in a
    process with limits on time and memory, since templates are untrusted. Any thread may render."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """Raises `UserError` for a template with a syntax error."""
        self.source = self.with_tools = source
        self._special_tokens = dict(special_tokens or {})
        self._sandbox = Sandbox("template")
        reply = self._sandbox.ask(json.dumps([source, None]))
        if "error" in reply:
            raise UserError(f"the chat template is damaged: {reply['error']}")

    @classmethod
    def load(cls, folder: str | Path) -> "ChatTemplate":
        """Return the template of chat_template.jinja, else of tokenizer_config.json, and its `tool_use`.

        Raises `UserError` when the folder has none.
        """
        folder = Path(folder)
        templates: dict[str, Any] = {}
        names = {"default": "chat_template", "tool_use": "additional_chat_templates/tool_use"}
        for name, file in names.items():
            if (path := folder / f"{file}.jinja").is_file():
                with library_errors_as(f"{path} is damaged"):
                    templates[name] = read_small(path).decode()
        if "default" not in templates:
            given: Any = read_json_if_there(folder / "tokenizer_config.json").get("chat_template")
            # The older format: several templates by name.
            entries = given if isinstance(given, list) else [{"name": "default", "template": given}]
            named = {str(e.get("name")): e.get("template") for e in entries if isinstance(e, dict)}
            templates = named | templates
        source, tools = templates.get("default"), templates.get("tool_use")
        if not isinstance(source, str):
            raise UserError(
                f"{folder} has no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json): it is not a chat model; `sparse-bitnet generate` runs it"
            )
        template = cls(source, named_tokens(folder))
        template.with_tools = tools if isinstance(tools, str) else source
        return template

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Return the chat as one prompt, to be tokenised without adding special tokens.

        Args:
            messages: each with "role" and "content", oldest first.
            variables: further names for the template, such as `tools`; unless
                `add_generation_prompt=False`, the prompt ends with the beginning of the assistant's
                answer.

        Raises `UserError` if the template refuses the chat, fails, or exceeds the sandbox's limits of
        time, memory or output.
        """
        given = {"tools": None, "documents": None, "add_generation_prompt": True}
        given |= self._special_tokens | variables | {"messages": list(messages)}
        with library_errors_as("the chat is not JSON"):
            source = self.source if given["tools"] is None else self.with_tools
            request = json.dumps([source, given])
        reply = self._sandbox.ask(request)
        if "error" in reply:
            raise UserError(f"the chat template refuses this chat: {reply['error']}")
        return reply["answer"]


class Conversation:
    """The messages so far, dictionaries with "role" and "content", and the model that answers them."""

    def __init__(
        self,
        model: OpenModel,
        *,
        max_tokens: int,
        system: str | None = None,
        sampling: SamplingOptions | None = None,
        speculation: Speculation | None = None,
        **fields: Any,
    ) -> None:
        """Load the model's chat template.

        Args:
            model: stays open; the caller closes its engine.
            max_tokens, speculation: for each answer, as in `OpenModel.continue_tokens`.
            system: system prompt.
            sampling, fields: fields of each answer's `GenerationRequest`, such as `stop` and `grammar`.

        Raises `UserError` for a model that has no chat template.
        """
        self._model, self._max_tokens = model, max_tokens
        self._most = min(model.engine.context_length, model.engine.free_tokens)
        self._template = ChatTemplate.load(model.folder)
        self._sampling = sampling or SamplingOptions()
        self._instructions = [{"role": "system", "content": system}] if system else []
        self._options = {"speculation": speculation, "prefixes": PrefixCache(4), **fields}
        self.reset()

    def reset(self) -> None:
        """Forget all messages but the system prompt."""
        self.messages: list[dict[str, str]] = list(self._instructions)

    def answer(self, message: str, *, on_text: Callable[[str], None]) -> Generation:
        """Return the model's answer to a message, at most as long as the context has room for. Both
        become part of the conversation; if Ctrl-C ends the answer, the part that `on_text` received does.

        Raises `UserError` when the template refuses the message, and `ContextFull` when the context has
        no room for an answer; the conversation is then as before.
        """
        messages = [*self.messages, {"role": "user", "content": message}]
        text, most = self._template.render(messages), self._most
        prompt = self._model.tokenizer.encode(text, add_special_tokens=False)
        if len(prompt) >= most:
            raise ContextFull(
                f"the conversation with this message has {len(prompt):,} tokens, but the context has "
                f"room for {most:,}: start over, or write less"
            )
        # A repeated question may get another answer; a repeated conversation gets the same ones.
        seed = (self._sampling.seed + len(self.messages)) % 2**64
        pieces: list[str] = []

        def take(piece: str) -> None:
            pieces.append(piece)
            on_text(piece)

        try:
            answer = self._model.continue_tokens(
                prompt,
                min(self._max_tokens, most - len(prompt)),
                sampling=replace(self._sampling, seed=seed),
                is_start=True,
                on_text=take,
                **self._options,
            )
        except UserError:
            pieces.clear()
            raise
        finally:
            if pieces:
                self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]
        return answer
