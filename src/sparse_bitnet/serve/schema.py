# SPDX-License-Identifier: Apache-2.0
"""Request bodies that the server accepts: OpenAI's, and their limits.

Parameters that would change the output and are not supported are refused by name, unless they have
the value that changes nothing; those that cannot change it are accepted and named in a header.
"""

import difflib
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError

from sparse_bitnet.generation.grammar import Grammar
from sparse_bitnet.generation.sampling_options import RANGES, SamplingOptions
from sparse_bitnet.serve.api_error import ApiError, invalid_body
from sparse_bitnet.serve.messages import (
    FunctionTool,
    Message,
    StrictModel,
    Tool,
    ignored_below,
)

MOST_CHOICES = 128
_SEEDS = 2**64

# JSON has one kind of numbers: some clients write 100 as 100.0.
WHOLE = BeforeValidator(lambda x: int(x) if isinstance(x, float) and x.is_integer() else x)
Limit = Annotated[int, Field(ge=-1), WHOLE]
"""Most tokens; -1: as many as there is room for."""
TopScores = Annotated[int, Field(ge=0, le=20), WHOLE]
StopString = Annotated[str, Field(min_length=1, max_length=1000)]
# `fail_fast`: thousands of wrong elements need no thousands of objections.
TokenIds = Annotated[
    list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1, fail_fast=True)
]
Prompts = Annotated[
    list[str | TokenIds], Field(min_length=1, max_length=MOST_CHOICES, fail_fast=True)
]
TokenKey = Annotated[str, Field(pattern=r"^[0-9]{1,10}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
Schema = dict[str, Any]
Words = Annotated[list[Annotated[str, Field(max_length=10_000)]], Field(min_length=1)]


def _within(name: str) -> Any:
    """A sampling option's limits, checked here so that the message names the parameter."""
    least, most = RANGES[name]
    return Field(ge=least, le=most)


# fmt: off
_IGNORED = frozenset({
    "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "prediction", "store", "include", "max_tool_calls", "client_metadata",
    # vLLM's and llama.cpp's.
    "priority", "request_id", "cache_prompt", "id_slot", "return_progress", "timings_per_token",
})
# fmt: on


def listed(given: Any) -> list[str | list[int]]:
    """Return texts or token ids as a list, of which a client may also have given one alone."""
    return [given] if isinstance(given, str) or isinstance(given[0], int) else given


Neutral = dict[str, tuple[Any, ...]]
"""Values that change nothing, as None does, of parameters that are not supported."""


class TolerantBody(StrictModel):
    """A request to a model. Parameters that change nothing are ignored, others refused by name."""

    model_config = ConfigDict(extra="allow")

    model: str

    @property
    def others(self) -> dict[str, Any]:
        """Parameters that are given and not supported."""
        return {
            name: value for name, value in (self.model_extra or {}).items() if value is not None
        }

    neutral: ClassVar[Neutral] = {
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "ignore_eos": (False,),
        "include_stop_str_in_output": (False,),
        "length_penalty": (1,),
        "min_tokens": (0,),
        "mirostat": (0,),
        "skip_special_tokens": (True,),
        "stop_token_ids": ([],),
        "typical_p": (1,),
        "use_beam_search": (False,),
    }

    @property
    def ignored(self) -> set[str]:
        """Names of what is given and has no effect, here and in the parts."""
        return (self.others.keys() & _IGNORED) | ignored_below(self)

    def check(self) -> None:
        for name, value in self.others.items():
            if name in _IGNORED:
                continue
            if name not in self.neutral:
                near = difflib.get_close_matches(name[:50], type(self).model_fields, 1)
                hint = f" (did you mean {near[0]}?)" if near else ""
                message = f"unknown parameter: {name[:200]}{hint}"
                raise ApiError(400, message, param=name[:200], code="unknown_parameter")
            # False is not 0.
            same = [other for other in self.neutral[name] if value == other]
            if not any(isinstance(value, bool) == isinstance(other, bool) for other in same):
                message = f"{name} is not supported: leave it out"
                raise ApiError(400, message, param=name, code="unsupported_parameter")


class StreamOptions(StrictModel):
    """Options of a stream: what it reports besides its text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """Report the usage in every event, as vLLM does; needs `include_usage`."""
    include_obfuscation: bool | None = None
    """Ignored: nothing is padded."""


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


class StructuredOutputs(StrictModel):
    """vLLM's; exactly one of them."""

    json_schema: Annotated[str | Schema | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Words | None = None
    grammar: str | None = None


def _json_grammar(schema: str | Schema | None, is_strict: bool = True) -> Grammar:
    if isinstance(schema, str):
        return Grammar.json_text(schema)
    if schema is None:
        return Grammar.json_object()
    return Grammar.json_schema(schema, is_strict=is_strict)


def _format_grammar(given: PlainText | JsonObject | JsonSchema) -> Grammar | None:
    if isinstance(given, PlainText):
        return None
    if isinstance(given, JsonObject):
        return _json_grammar(given.json_schema)
    return _json_grammar(given.json_schema.json_schema, is_strict=bool(given.json_schema.strict))


class _Body(TolerantBody):
    """Fields that the bodies of completions and chats share."""

    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: Limit | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES), WHOLE] | None = 1
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = None
    temperature: Annotated[float, _within("temperature")] | None = None
    top_p: Annotated[float, _within("top_p")] | None = None
    top_k: Annotated[int, Field(ge=-1), WHOLE] | None = None
    min_p: Annotated[float, _within("min_p")] | None = None
    repetition_penalty: Annotated[float, _within("repetition_penalty")] | None = None
    frequency_penalty: Annotated[float, _within("frequency_penalty")] | None = None
    presence_penalty: Annotated[float, _within("presence_penalty")] | None = None
    logit_bias: Annotated[dict[TokenKey, Bias], Field(max_length=1024)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=_SEEDS), WHOLE] | None = None
    response_format: (
        Annotated[PlainText | JsonObject | JsonSchema, Field(discriminator="type")] | None
    ) = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | Schema | None = None
    guided_regex: str | None = None
    guided_choice: Words | None = None
    guided_grammar: str | None = None
    json_schema: Schema | None = None
    """llama.cpp's, as `grammar`."""
    grammar: str | None = None

    default_tokens: ClassVar[int | None] = None
    """Most tokens to generate where nothing is said; None: what there is room for."""

    @property
    def limit(self) -> str:
        """The parameter that says how many tokens to generate."""
        return "max_tokens"

    @property
    def wanted_tokens(self) -> int | None:
        """Most tokens to generate, if that is said; -1: as many as there is room for."""
        return getattr(self, self.limit)

    @property
    def choices(self) -> int:
        """Texts for each prompt."""
        return self.n or 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """One or several, as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling(self, seed: int) -> SamplingOptions:
        """How tokens are chosen; `seed` may be any integer."""
        given: dict[str, Any] = {name: getattr(self, name) for name in (*RANGES, "top_k")}
        if self.top_k == -1:
            given["top_k"] = 0
        if self.logit_bias:
            biases = {int(token): added for token, added in self.logit_bias.items()}
            given["logit_bias"] = tuple(biases.items())
        named = {name: value for name, value in given.items() if value is not None}
        return SamplingOptions(seed=seed % _SEEDS, **named)

    def form(self) -> Grammar | None:
        """Return the grammar that the text has to match; None: any text. Raises `UserError` for an
        invalid grammar, and `ApiError` for two constraints at once."""
        outputs = self.structured_outputs or StructuredOutputs()
        given: list[tuple[str, Any, Callable[[Any], Grammar | None]]] = [
            ("response_format", self.response_format, _format_grammar),
            ("json_schema", self.json_schema, _json_grammar),
            ("grammar", self.grammar or None, Grammar.rules),
        ]
        makers: dict[str, Callable[[Any], Grammar]] = {
            "json": _json_grammar,
            "regex": Grammar.regex,
            "choice": Grammar.choice,
            "grammar": Grammar.rules,
        }
        for kind, make in makers.items():
            field = "json_schema" if kind == "json" else kind
            given += [(f"guided_{kind}", getattr(self, f"guided_{kind}"), make)]
            given += [(f"structured_outputs.{kind}", getattr(outputs, field), make)]
        made = {name: make(value) for name, value, make in given if value is not None}
        if outputs.json_object:
            made["structured_outputs.json_object"] = Grammar.json_object()
        made = {name: grammar for name, grammar in made.items() if grammar is not None}
        if len(made) > 1:
            raise ApiError(400, f"give one of {', '.join(made)}", param=next(iter(made)))
        return next(iter(made.values()), None)

    def check(self) -> None:
        super().check()
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options")


class CompletionBody(_Body):
    """POST /v1/completions"""

    prompt: str | TokenIds | Prompts
    echo: bool | None = False
    logprobs: TopScores | None = None
    best_of: Annotated[int, WHOLE] | None = None

    neutral: ClassVar[Neutral] = TolerantBody.neutral | {"suffix": ("",)}
    default_tokens: ClassVar[int | None] = 16
    """Default of max_tokens, the same as OpenAI's; fewer if the context has less room."""

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each a text or token ids."""
        return listed(self.prompt)

    @property
    def top_scores(self) -> int | None:
        """Number of likeliest tokens beside each, all with log-probabilities; None: no scores."""
        return self.logprobs

    def check(self) -> None:
        super().check()
        if self.best_of not in (None, self.choices):
            message, code = "best_of is not supported: leave it out", "unsupported_parameter"
            raise ApiError(400, message, param="best_of", code=code)
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens 0 needs echo: true", param="max_tokens")


class ChatBody(_Body):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000, fail_fast=True)]
    max_completion_tokens: Limit | None = None
    logprobs: bool | None = False
    top_logprobs: TopScores | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the template."""
    reasoning_effort: str | None = None
    """Also one; few templates use it."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """vLLM's; without either, an assistant's message at the end is continued."""
    tools: Annotated[list[Tool] | None, Field(max_length=128, fail_fast=True)] = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    """An object names the function that has to be called, as chats or as /v1/responses write it."""
    parallel_tool_calls: bool | None = None

    _in_thought: bool = PrivateAttr(False)
    """Whether the prompt ends inside a thought, known once the template has written it."""

    @property
    def _is_answered(self) -> bool:
        """The last message is an assistant's text."""
        return self.messages[-1].role == "assistant" and not self.messages[-1].tool_calls

    @property
    def continues(self) -> bool:
        """Whether the last message is the beginning of the answer."""
        if self.continue_final_message is None:
            return self._is_answered and not self.add_generation_prompt
        return self.continue_final_message

    @property
    def functions(self) -> list[FunctionTool]:
        """Those that may be called."""
        return [] if self.tool_choice == "none" else [tool.function for tool in self.tools or ()]

    @property
    def named_function(self) -> str | None:
        """The one that has to be called."""
        choice = self.tool_choice
        if not isinstance(choice, dict):
            return None
        named = choice.get("function", choice)
        return str(named.get("name", "")) if isinstance(named, dict) else ""

    @property
    def calls_are_forced(self) -> bool:
        """The answer is calls and nothing else."""
        return self.tool_choice == "required" or self.named_function is not None

    neutral: ClassVar[Neutral] = TolerantBody.neutral | {
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "verbosity": ("medium",),
        "web_search_options": (),
    }

    @property
    def limit(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def top_scores(self) -> int | None:
        """Number of likeliest tokens beside each, as in `CompletionBody.top_scores`; None: no scores."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            message = "give max_completion_tokens or max_tokens, not both"
            raise ApiError(400, message, param="max_tokens")
        if self.wanted_tokens == 0:
            raise ApiError(400, f"{self.limit} must be at least 1", param=self.limit)
        if self.continue_final_message and not self._is_answered:
            message = "continue_final_message needs an assistant's message without calls at the end"
            raise ApiError(400, message, param="continue_final_message")
        names = [tool.function.name for tool in self.tools or ()]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ApiError(400, f"two tools have the same name, {twice[0]!r}", param="tools")
        named = self.named_function
        if named is not None and named not in names:
            message = f"tool_choice: {named[:64]!r} is not one of the tools"
            raise ApiError(400, message, param="tool_choice")
        if self.tool_choice == "required" and not names:
            raise ApiError(400, "tool_choice required needs tools", param="tool_choice")


class EmbeddingsBody(TolerantBody):
    """POST /v1/embeddings"""

    input: (
        str
        | TokenIds
        | Annotated[list[str | TokenIds], Field(min_length=1, max_length=2048, fail_fast=True)]
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1), WHOLE] | None = None
    """This many numbers from the front, of unit length again."""


Body = CompletionBody | ChatBody
Kind = TypeVar("Kind", bound=StrictModel)


def parse_body(kind: type[Kind], given: bytes | dict[str, Any]) -> Kind:
    """Return a request body of that kind. Raises `ApiError` 400 that names the parameter."""
    try:
        if isinstance(given, bytes):
            parsed = kind.model_validate_json(given)
        else:
            parsed = kind.model_validate(given)
    except ValidationError as error:
        raise invalid_body(error) from error
    parsed.check()
    return parsed
