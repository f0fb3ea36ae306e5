# SPDX-License-Identifier: Apache-2.0
"""The form that a client asks for: OpenAI's response_format, vLLM's and llama.cpp's names."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field

from sparse_bitnet.generation.grammar import Grammar
from sparse_bitnet.serve.api_error import ApiError
from sparse_bitnet.serve.messages import StrictModel

Schema = dict[str, Any]
Choices = Annotated[list[Annotated[str, Field(max_length=10_000)]], Field(min_length=1)]


class PlainText(StrictModel):
    """Any text."""

    type: Literal["text"]


class JsonObject(StrictModel):
    """Any JSON object, or one of a schema, as llama.cpp takes it."""

    type: Literal["json_object"]
    json_schema: Annotated[Schema | None, Field(alias="schema")] = None


class NamedSchema(StrictModel):
    """A schema with what clients tell about it."""

    name: str | None = None
    description: str | None = None
    json_schema: Annotated[Schema | None, Field(alias="schema")] = None
    strict: bool | None = None


class JsonSchema(StrictModel):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[PlainText | JsonObject | JsonSchema, Field(discriminator="type")]


class StructuredOutputs(StrictModel):
    """vLLM's; exactly one of them."""

    json_schema: Annotated[str | Schema | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None


class Formed(StrictModel):
    """The parameters of a body that give its texts a form."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    json_schema: Schema | None = None
    """llama.cpp's, as `grammar`."""
    grammar: str | None = None

    def form(self) -> Grammar | None:
        """Which texts are meant; None: any. Raises `UserError` for rules that are none, and `ApiError`
        for two forms at once."""
        outputs = self.structured_outputs or StructuredOutputs()
        given: list[tuple[str, Any, Callable[[Any], Grammar | None]]] = [
            ("response_format", self.response_format, _of_format),
            ("guided_json", self.guided_json, _of_json),
            ("guided_regex", self.guided_regex, Grammar.regex),
            ("guided_choice", self.guided_choice, Grammar.choice),
            ("guided_grammar", self.guided_grammar, Grammar.rules),
            ("json_schema", self.json_schema, _of_json),
            ("grammar", self.grammar or None, Grammar.rules),
            ("structured_outputs.json", outputs.json_schema, _of_json),
            (
                "structured_outputs.json_object",
                outputs.json_object or None,
                lambda value: Grammar.json_object(),
            ),
            ("structured_outputs.regex", outputs.regex, Grammar.regex),
            ("structured_outputs.choice", outputs.choice, Grammar.choice),
            ("structured_outputs.grammar", outputs.grammar, Grammar.rules),
        ]
        made = {name: make(value) for name, value, make in given if value is not None}
        found = {name: grammar for name, grammar in made.items() if grammar is not None}
        if len(found) > 1:
            raise ApiError(400, f"give one of {', '.join(found)}", param=next(iter(found)))
        return next(iter(found.values()), None)


def _of_format(given: PlainText | JsonObject | JsonSchema) -> Grammar | None:
    if isinstance(given, PlainText):
        return None
    if isinstance(given, JsonObject):
        return _of_json(given.json_schema)
    return _of_json(given.json_schema.json_schema, is_strict=bool(given.json_schema.strict))


def _of_json(schema: str | Schema | None, is_strict: bool = True) -> Grammar:
    if isinstance(schema, str):
        return Grammar.json_text(schema)
    if schema is None:
        return Grammar.json_object()
    return Grammar.json_schema(schema, is_strict=is_strict)
