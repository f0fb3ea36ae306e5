# SPDX-License-Identifier: Apache-2.0
"""Request bodies that the server accepts, OpenAI's, and their limits.

A parameter that would change the output and is not supported is refused by name, unless it has the value
that changes nothing. A parameter that cannot change the output is accepted and named in a header.
"""

from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AliasChoices,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    model_validator,
)

from sparse_bitnet.errors import did_you_mean
from sparse_bitnet.generation.grammar import Grammar
from sparse_bitnet.generation.sampling_options import RANGES, SamplingOptions
from sparse_bitnet.serve.api_error import ApiError, invalid_body
from sparse_bitnet.serve.messages import FunctionTool, Message, StrictModel, Tool, ignored_below

MOST_CHOICES = 128
_SEEDS = 2**64

# JSON has one kind of numbers: some clients write 100 as 100.0.
_LIST = BeforeValidator(lambda x: [x] if isinstance(x, str) else x)
WHOLE = BeforeValidator(lambda x: int(x) if isinstance(x, float) and x.is_integer() else x)
Limit = Annotated[int, Field(ge=-1), WHOLE]
"""Maximum number of tokens; -1: as many as fit."""
ChatLimit = Annotated[Annotated[int, Field(ge=1)] | Literal[-1], WHOLE]
TopScores = Annotated[int, Field(ge=0, le=20), WHOLE]
StopString = Annotated[str, Field(min_length=1, max_length=1000)]
# `fail_fast`: one error is enough for thousands of wrong elements.
Tokens = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]
TokenIds = Annotated[Tokens, Field(min_length=1)]


def _listed(given: Any) -> Any:
    tokens = isinstance(given, list) and given and isinstance(given[0], int)
    return [given] if tokens or isinstance(given, str) else given


Prompts = Annotated[
    list[str | TokenIds], Field(min_length=1, fail_fast=True), BeforeValidator(_listed)
]
"""Texts or lists of token ids; a client may also send a single one."""
TokenKey = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
Schema = dict[str, Any]
Words = Annotated[list[Annotated[str, Field(max_length=10_000)]], Field(min_length=1)]


def _within(name: str) -> Any:
    """Return the check of a sampling option's limits, so that the message names the parameter."""
    least, most = RANGES[name]
    return Field(ge=least, le=most)


# fmt: off
_IGNORED = frozenset({
    "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "prediction", "store", "include", "max_tool_calls", "client_metadata",
    # Parameters of vLLM and llama.cpp.
    "priority", "request_id", "cache_prompt", "id_slot", "return_progress", "timings_per_token",
})
# fmt: on
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("audio", "conversation", "max_tokens", "previous_response_id"), ()),
    **dict.fromkeys(("background", "continue_final_message", "ignore_eos"), (False,)),
    **dict.fromkeys(("include_stop_str_in_output", "use_beam_search"), (False,)),
    **dict.fromkeys(("add_generation_prompt", "skip_special_tokens"), (True,)),
    **dict.fromkeys(("min_tokens", "mirostat", "top_logprobs"), (0,)),
    **dict.fromkeys(("best_of", "length_penalty", "typical_p"), (1,)),
    **dict.fromkeys(("functions", "stop_token_ids"), ([],)),
    **{"function_call": ("none", "auto"), "modalities": (["text"],), "suffix": ("",)},
    **{"truncation": ("disabled",), "verbosity": ("medium",), "web_search_options": ()},
}
"""Values that change nothing (besides None) of parameters that are not supported."""


def unknown_parameter(name: str, known: Iterable[str] = ()) -> ApiError:
    """Return the error for an unknown parameter; it names the nearest of those `known`."""
    message = f"unknown parameter: {name[:200]}{did_you_mean(name[:50], known)}"
    return ApiError(400, message, param=name[:200], code="unknown_parameter")


class TolerantBody(StrictModel):
    """A request to a model. Parameters without effect are ignored, other unknown ones refused by name."""

    model_config = ConfigDict(extra="allow")

    model: str

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        """Drop nulls: many clients write null for parameters that they do not set."""
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}

    @property
    def ignored(self) -> set[str]:
        """Names of given parameters that have no effect, here and in the parts."""
        return ((self.model_extra or {}).keys() & _IGNORED) | ignored_below(self)

    def check(self) -> None:
        for name, value in (self.model_extra or {}).items():
            if name in _IGNORED:
                continue
            if name not in _NEUTRAL:
                raise unknown_parameter(name, type(self).model_fields)
            # False is not 0.
            if (type(value) is bool, value) not in [(type(v) is bool, v) for v in _NEUTRAL[name]]:
                message, code = f"{name} is not supported: leave it out", "unsupported_parameter"
                raise ApiError(400, message, param=name, code=code)


class SamplingBody(TolerantBody):
    """Fields that all requests for generations share."""

    stream: bool = False
    stop: Annotated[list[StopString], Field(max_length=16), _LIST] = Field([])
    temperature: Annotated[float, _within("temperature")] = 1
    top_p: Annotated[float, _within("top_p")] = 1
    top_k: Annotated[int, Field(ge=-1), WHOLE] = 0
    """-1: all tokens, like 0."""
    min_p: Annotated[float, _within("min_p")] = 0
    repetition_penalty: Annotated[float, _within("repetition_penalty")] = 1
    frequency_penalty: Annotated[float, _within("frequency_penalty")] = 0
    presence_penalty: Annotated[float, _within("presence_penalty")] = 0
    logit_bias: Annotated[dict[TokenKey, Bias], Field(max_length=1024)] = Field({})
    seed: Annotated[int, Field(ge=-(2**63), lt=_SEEDS), WHOLE] | None = None


class StreamOptions(StrictModel):
    """Options of a stream: additional fields of its events."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """Report the usage in every event, as vLLM does; needs `include_usage`."""
    include_obfuscation: bool | None = None
    """Ignored: nothing is padded."""


class StructuredOutputs(StrictModel):
    """Structured output in vLLM's format: exactly one of these."""

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


def _format_grammar(given: dict[str, Any]) -> Grammar | None:
    """Return the grammar of a `response_format` in OpenAI's or, with a schema, in llama.cpp's format."""
    match {name: value for name, value in given.items() if value is not None}:
        case {"type": "text", **rest} if not rest:
            return None
        case {"type": "json_object", **rest} if rest.keys() <= {"schema"}:
            return _json_grammar(rest.get("schema"))
        case {"type": "json_schema", "json_schema": dict(named), **rest} if not rest:
            if named.keys() <= {"name", "description", "schema", "strict"}:
                return _json_grammar(named.get("schema"), is_strict=bool(named.get("strict")))
    message = "response_format: give a text, json_object or json_schema as OpenAI describes them"
    raise ApiError(400, message, param="response_format")


class _Body(SamplingBody):
    """Fields that completions and chats share."""

    stream_options: StreamOptions | None = None
    max_tokens: Limit = -1
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES), WHOLE] = 1
    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    json_schema: Schema | None = None
    """Schema of the output; llama.cpp's parameter, as is `grammar`."""
    grammar: str | None = None

    def sampling(self, seed: int) -> SamplingOptions:
        """Return the sampling options; `seed` may be any integer."""
        biases = {int(token): added for token, added in self.logit_bias.items()}
        return SamplingOptions(
            seed=seed % _SEEDS,
            top_k=max(self.top_k, 0),
            logit_bias=tuple(biases.items()),
            **{name: getattr(self, name) for name in RANGES},
        )

    def constraint(self) -> Grammar | None:
        """Return the grammar of the output; None: any text. Raises `UserError` for an invalid grammar,
        and `ApiError` for two constraints at once."""
        outputs = self.structured_outputs or StructuredOutputs()
        given: dict[str, tuple[Any, Callable[[Any], Grammar | None]]] = {
            "response_format": (self.response_format, _format_grammar),
            "json_schema": (self.json_schema, _json_grammar),
            "grammar": (self.grammar or None, Grammar.rules),
            "structured_outputs.json": (outputs.json_schema, _json_grammar),
            "structured_outputs.regex": (outputs.regex, Grammar.regex),
            "structured_outputs.choice": (outputs.choice, Grammar.choice),
            "structured_outputs.grammar": (outputs.grammar, Grammar.rules),
        }
        made = {name: make(value) for name, (value, make) in given.items() if value is not None}
        if outputs.json_object:
            made["structured_outputs.json_object"] = Grammar.json_object()
        made = {name: grammar for name, grammar in made.items() if grammar is not None}
        if len(made) > 1:
            raise ApiError(400, f"give one of {', '.join(made)}", param=next(iter(made)))
        return next(iter(made.values()), None)


class CompletionBody(_Body):
    """POST /v1/completions"""

    prompt: Annotated[Prompts, Field(max_length=MOST_CHOICES)]
    echo: bool = False
    logprobs: TopScores | None = None
    max_tokens: Limit = 16
    """Default as OpenAI's; fewer if the context has less room."""

    @property
    def top_scores(self) -> int | None:
        """Number of likeliest tokens to report per token, with log-probabilities; None: none."""
        return self.logprobs

    def check(self) -> None:
        super().check()
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens 0 needs echo: true", param="max_tokens")


class ChatBody(_Body):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000, fail_fast=True)]
    max_tokens: ChatLimit = Field(
        -1, validation_alias=AliasChoices("max_completion_tokens", "max_tokens")
    )
    logprobs: bool = False
    top_logprobs: TopScores | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the template."""
    reasoning_effort: str | None = None
    """A variable of the template as well; few templates use it."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """vLLM's parameter; without either, an assistant's message at the end is continued."""
    tools: Annotated[list[Tool] | None, Field(max_length=128, fail_fast=True)] = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    """An object names the function to call, in the format of chats or of /v1/responses."""
    parallel_tool_calls: bool | None = None

    _in_thought: bool = PrivateAttr(False)
    """Whether the prompt ends inside a thought, known once the template has written it."""

    @property
    def _is_answered(self) -> bool:
        """Whether the last message is an assistant's text."""
        return self.messages[-1].role == "assistant" and not self.messages[-1].tool_calls

    @property
    def continues(self) -> bool:
        """Whether the last message is the beginning of the answer."""
        if self.continue_final_message is None:
            return self._is_answered and not self.add_generation_prompt
        return self.continue_final_message

    @property
    def functions(self) -> list[FunctionTool]:
        """The functions that may be called."""
        return [] if self.tool_choice == "none" else [tool.function for tool in self.tools or ()]

    @property
    def named_function(self) -> str | None:
        """Name of the function that must be called, or None."""
        if not isinstance(self.tool_choice, dict):
            return None
        named = self.tool_choice.get("function", self.tool_choice)
        return str(named.get("name", "")) if isinstance(named, dict) else ""

    @property
    def calls_are_forced(self) -> bool:
        """Whether the answer must be tool calls and nothing else."""
        return self.tool_choice == "required" or self.named_function is not None

    @property
    def top_scores(self) -> int | None:
        """Number of likeliest tokens to report per token, see `CompletionBody.top_scores`; None: none."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        super().check()
        names = [tool.function.name for tool in self.tools or ()]
        twice = [name for name in names if names.count(name) > 1]
        named = self.named_function
        message, param = "", ""
        if self.top_logprobs is not None and not self.logprobs:
            message, param = "top_logprobs needs logprobs: true", "top_logprobs"
        elif self.continue_final_message and not self._is_answered:
            param = "continue_final_message"
            message = f"{param} needs an assistant's message without calls at the end"
        elif twice:
            message, param = f"two tools have the same name, {twice[0]!r}", "tools"
        elif named == "":
            message, param = "tool_choice: give none, auto, required or a function", "tool_choice"
        elif named is not None and named not in names:
            message, param = f"tool_choice: {named[:64]!r} is not one of the tools", "tool_choice"
        elif self.tool_choice == "required" and not names:
            message, param = "tool_choice required needs tools", "tool_choice"
        if message:
            raise ApiError(400, message, param=param)


class EmbeddingsBody(TolerantBody):
    """POST /v1/embeddings"""

    input: Annotated[Prompts, Field(max_length=2048)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1), WHOLE] | None = None
    """Keep this many numbers from the front, normalised to unit length again."""


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
