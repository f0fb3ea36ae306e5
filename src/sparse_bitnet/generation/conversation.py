# SPDX-License-Identifier: Apache-2.0
"""A chat with one model: the template makes prompts of it, and what was computed for earlier turns is
not computed again."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from sparse_bitnet.engine.engine_options import EngineOptions
from sparse_bitnet.engine.protocol import ContextFull
from sparse_bitnet.generation.chat_template import ChatTemplate
from sparse_bitnet.generation.grammar import Form, Grammar
from sparse_bitnet.generation.open_model import OpenModel, open_model
from sparse_bitnet.generation.prefix_cache import PrefixCache
from sparse_bitnet.generation.speculation import Speculation
from sparse_bitnet.generation.text_batches import GenerateOptions, GenerateResult, generate


class Conversation:
    """Messages so far, and the engine that answers them."""

    def __init__(
        self,
        model: OpenModel,
        template: ChatTemplate,
        options: GenerateOptions,
        *,
        system: str | None = None,
        grammar: Grammar | None = None,
    ) -> None:
        """`options`: of each answer; `system`: instructions that come first; `grammar`: the form of each
        answer. Takes the model over."""
        self.model = model
        self._template = template
        self._options = options
        self._system = system
        self._prefixes = PrefixCache(4)
        self.speculation: Speculation | None = None
        """What guesses tokens ahead."""

        self._form: Form | None = None
        if grammar is not None:
            self._form = model.grammars(model.end_tokens).start(grammar)
        self.messages: list[dict[str, str]] = []
        """With "role" and "content"."""
        self.reset()

    @classmethod
    def open(
        cls,
        checkpoint: str | Path,
        engine: EngineOptions,
        options: GenerateOptions,
        *,
        system: str | None = None,
        grammar: Grammar | None = None,
    ) -> "Conversation":
        """Raises `UserError` for a model that cannot be loaded or has no chat template, and a grammar
        that is none."""
        is_folder = os.path.isfile(os.path.join(checkpoint, "config.json"))
        template = ChatTemplate.load(checkpoint) if is_folder else None
        model = open_model(checkpoint, engine)
        try:
            if template is None:
                template = ChatTemplate.load(model.folder)
            return cls(model, template, options, system=system, grammar=grammar)
        except BaseException:
            model.engine.close()
            raise

    def reset(self) -> None:
        """Forget all but the instructions."""
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def answer(
        self,
        message: str,
        *,
        on_text: Callable[[str], None],
        is_cancelled: Callable[[], bool] | None = None,
    ) -> GenerateResult:
        """The model's answer to a message; both become part of the conversation, what there is of an
        answer that was cancelled, too.

        The answer is at most as long as the context has room for.

        Raises `UserError`, the conversation as before, when the template refuses the message, and
        `ContextFull` when the context has no room for an answer.
        """
        messages = [*self.messages, {"role": "user", "content": message}]
        prompt = self.model.tokenizer.encode(
            self._template.render(messages), add_special_tokens=False
        )
        room = self.model.engine.context_length - len(prompt)
        if room < 1:
            raise ContextFull(
                f"the conversation with this message has {len(prompt):,} tokens and the context holds "
                f"{self.model.engine.context_length:,}: start over, or write less"
            )
        turn = len(self.messages)
        sampling = self._options.sampling
        options = replace(
            self._options,
            max_new_tokens=min(self._options.max_new_tokens, room),
            # The same question twice may have two answers; the same conversation has one.
            sampling=replace(sampling, seed=(sampling.seed + turn) % 2**64),
        )
        result = generate(
            self.model.engine,
            [prompt],
            options,
            tokenizer=self.model.tokenizer,
            end_tokens=self.model.end_tokens,
            form=self._form,
            prefixes=self._prefixes,
            speculation=self.speculation,
            is_start=True,
            on_token=lambda number, token, piece: on_text(piece),
            is_cancelled=is_cancelled,
        )
        (text,) = result.texts
        self.messages = [*messages, {"role": "assistant", "content": text.text}]
        return result

    def close(self) -> None:
        """Close the engine."""
        self._prefixes.clear()
        self.model.engine.close()
