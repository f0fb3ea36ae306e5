"""What the HTTP server accepts: OpenAI's request bodies, their limits, and its error objects.

Parameters that would change the output and are not supported are refused by name, unless they have
the value that changes nothing; those that cannot change it are accepted and ignored.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sparse_bitnet.errors import UserError
from sparse_bitnet.generation.sampling import RANGES, SamplingOptions

MOST_CHOICES = 128
MOST_STOP_STRINGS = 16
_SEEDS = 2**64


def _within(name: str) -> Any:
    """A sampling option's limits, checked here so that the complaint names the parameter."""
    least, most = RANGES[name]
    return Field(ge=least, le=most)


StopString = Annotated[str, Field(min_length=1, max_length=1000)]
# Sizes of prompts are bounded by the size of the body.
# `fail_fast`: thousands of wrong elements need no thousands of complaints.
TokenIds = Annotated[
    list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1, fail_fast=True)
]
Prompts = Annotated[
    list[str | TokenIds], Field(min_length=1, max_length=MOST_CHOICES, fail_fast=True)
]
Body = TypeVar("Body", bound="GenerationBody")


class ApiError(Exception):
    """An answer other than success, as OpenAI words it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers
        self.body = error_body(status, message, param, code)


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """OpenAI's error object."""
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Model):
    include_usage: bool = False
    include_obfuscation: bool | None = None
    """Ignored: nothing is padded."""


class GenerationBody(_Model):
    """What both kinds of request have."""

    model: str
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = 1
    stop: StopString | Annotated[list[StopString], Field(max_length=MOST_STOP_STRINGS)] | None = (
        None
    )
    temperature: Annotated[float, _within("temperature")] | None = None
    top_p: Annotated[float, _within("top_p")] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, _within("min_p")] | None = None
    repetition_penalty: Annotated[float, _within("repetition_penalty")] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=_SEEDS)] | None = None

    # Only with the value that changes nothing.
    frequency_penalty: Any = None
    presence_penalty: Any = None
    logit_bias: Any = None
    store: Any = None

    # Accepted: these cannot change the output.
    user: Any = None
    metadata: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def neutral_values(self) -> dict[str, tuple[Any, ...]]:
        """For each parameter that is not supported, the values that change nothing."""
        return {
            "frequency_penalty": (None, 0),
            "presence_penalty": (None, 0),
            "logit_bias": (None, {}),
            "store": (None, False),
        }

    def sampling(self, seed: int) -> SamplingOptions:
        """`seed` may be any integer."""
        given = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "top_k": None if self.top_k is None else max(self.top_k, 0),
        }
        named: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return SamplingOptions(seed=seed % _SEEDS, **named)


class CompletionBody(GenerationBody):
    """POST /v1/completions"""

    prompt: str | TokenIds | Prompts
    echo: bool | None = False
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Any = None
    suffix: Any = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each a text or token ids."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return self.prompt  # type: ignore[return-value]

    def neutral_values(self) -> dict[str, tuple[Any, ...]]:
        own = {"best_of": (None, self.choices), "suffix": (None, "")}
        return super().neutral_values() | own


class TextPart(_Model):
    type: Literal["text"]
    text: str


class Message(_Model):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """For a chat template: content as one text."""
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        # Templates know the older name of a developer's message.
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": text} | ({"name": self.name} if self.name else {})


class ChatBody(GenerationBody):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    modalities: Any = None
    audio: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None

    parallel_tool_calls: Any = None
    prediction: Any = None

    def neutral_values(self) -> dict[str, tuple[Any, ...]]:
        return super().neutral_values() | {
            "tools": (None, []),
            "tool_choice": (None, "none", "auto"),
            "functions": (None, []),
            "function_call": (None, "none", "auto"),
            "response_format": (None, {"type": "text"}),
            "modalities": (None, ["text"]),
            "audio": (None,),
            "reasoning_effort": (None,),
            "verbosity": (None,),
            "web_search_options": (None,),
        }


def parse_body(kind: type[Body], body: bytes) -> Body:
    """A request body of that kind. Raises `ApiError` 400 that names the parameter."""
    try:
        parsed = kind.model_validate_json(body)
    except ValidationError as error:
        raise _api_error(error) from error
    for name, values in parsed.neutral_values().items():
        value = getattr(parsed, name)
        if not any(_is_same(value, neutral) for neutral in values):
            raise ApiError(
                400,
                f"{name} is not supported: leave it out",
                param=name,
                code="unsupported_parameter",
            )
    if parsed.stream_options is not None and not parsed.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")
    if isinstance(parsed, ChatBody):
        if parsed.top_logprobs is not None and not parsed.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        if parsed.max_tokens is not None and parsed.max_completion_tokens is not None:
            raise ApiError(
                400, "give max_completion_tokens or max_tokens, not both", param="max_tokens"
            )
    try:
        parsed.sampling(0)
    except UserError as error:
        raise ApiError(400, str(error)) from error
    return parsed


def _is_same(value: Any, neutral: Any) -> bool:
    """Equal, but False is not 0."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _api_error(error: ValidationError) -> ApiError:
    found = error.errors(include_url=False, include_context=False)
    # Of a union's complaints, the one that got furthest is about the form that was meant.
    first = max(found, key=lambda entry: len(entry["loc"]))
    kind = first["type"]
    *way, last = first["loc"] or ("",)
    # Pydantic also names the members of unions, such as "str" and "list[...]".
    parts = [str(part) for part in way if str(part).isidentifier() or isinstance(part, int)]
    is_member = kind != "extra_forbidden" and last in ("str", "constrained-str")
    names = [*parts, *([] if is_member or last == "" else [str(last)])]
    where, param = ".".join(names)[:200], names[0][:200] if names else None
    if kind == "json_invalid":
        return ApiError(400, f"the body is no JSON: {first['msg']}")
    if kind == "extra_forbidden":
        message = f"unknown parameter: {where}"
        return ApiError(400, message, param=where, code="unknown_parameter")
    if kind == "missing":
        message = f"{where} is missing"
        return ApiError(400, message, param=param, code="missing_required_parameter")
    given = first["input"]
    # Not of integers with thousands of digits, which Python refuses to print.
    is_short = isinstance(given, str | float) or (type(given) is int and abs(given) < 2**64)
    shown = f", not {given!r:.60}" if is_short else ""
    return ApiError(400, f"{where or 'body'}: {first['msg']}{shown}", param=param)
