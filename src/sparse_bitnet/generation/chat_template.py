"""Chats to prompts: a model's own Jinja template, rendered as transformers renders it.

Templates come with models of strangers, so they run in Jinja's immutable sandbox, and all that they
see are plain JSON values.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparse_bitnet.errors import UserError
from sparse_bitnet.generation.text import TextTokenizer
from sparse_bitnet.model_folder import read_json_if_there

_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class ChatTemplate:
    """A compiled template with the special tokens that it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """Raises `UserError` for a template with a syntax error."""
        import jinja2

        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(
                f"the chat template is damaged: line {error.lineno}: {error}"
            ) from error
        self._special_tokens = dict(special_tokens or {})

    @classmethod
    def load(cls, folder: str | Path) -> "ChatTemplate":
        """The template of chat_template.jinja, else the one in tokenizer_config.json.

        Raises `UserError` when the folder has none.
        """
        folder = Path(folder)
        config = read_json_if_there(folder / "tokenizer_config.json")
        path = folder / "chat_template.jinja"
        if path.is_file():
            source: Any = path.read_text(encoding="utf-8")
        else:
            source = config.get("chat_template")
        if isinstance(source, list):
            # Several templates by name, the older form.
            source = {entry.get("name"): entry.get("template") for entry in source}.get("default")
        if not isinstance(source, str):
            raise UserError(
                f"{folder} has no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json): it is no chat model, use `sparse-bitnet generate`"
            )
        return cls(source, _special_tokens(config, folder))

    def end_tokens(self, tokenizer: TextTokenizer) -> frozenset[int]:
        """The tokenizer's end token, which in a chat ends the turn."""
        token = tokenizer.token_id(self._special_tokens.get("eos_token", ""))
        return frozenset() if token is None else frozenset({token})

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The chat as one text, to be tokenised without adding special tokens.

        Args:
            messages: each with "role" and "content", oldest first.
            add_generation_prompt: end with the beginning of the assistant's answer.
            variables: further names that the template knows, such as `tools`.

        Raises `UserError` where the template refuses the chat, or goes wrong.
        """
        import jinja2

        given = {"tools": None, "documents": None} | self._special_tokens | variables
        try:
            return self._template.render(
                messages=_plain(list(messages)),
                add_generation_prompt=add_generation_prompt,
                **{name: _plain(value) for name, value in given.items()},
            )
        except (
            jinja2.TemplateError,
            ArithmeticError,
            LookupError,
            TypeError,
            ValueError,
            RuntimeError,
        ) as error:
            raise UserError(f"the chat template refuses this chat: {error}") from error


def _special_tokens(config: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Their texts, in whichever of the two files and forms they are written."""
    found = {**read_json_if_there(folder / "special_tokens_map.json"), **config}
    texts: dict[str, str] = {}
    for name in _SPECIAL_TOKENS:
        token = found.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            texts[name] = text
    return texts


def _plain(value: Any) -> Any:
    """A copy made of JSON values alone; anything else is replaced by the name of its type."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            # Strings from subclasses lose what methods these add.
            return kind(value)
    return value if value is None else f"<{type(value).__name__}>"


def _environment() -> Any:
    """Whitespace, filters and functions as chat templates expect them."""
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class GenerationBlock(jinja2.ext.Extension):
        """`{% generation %}` marks the assistant's words for training; here it only passes them on."""

        tags = {"generation"}  # noqa: RUF012  (as Jinja declares it)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_pass_on", [])
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _pass_on(self, caller: Any) -> str:
            return caller()

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        # Jinja's own filter escapes HTML.
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    def strftime_now(format: str) -> str:
        return datetime.datetime.now().strftime(format)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[GenerationBlock, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment
