# SPDX-License-Identifier: Apache-2.0
"""What the server accepts: OpenAI's request bodies and their limits.

Parameters that would change the output and are not supported are refused by name, unless they have
the value that changes nothing; those that cannot change it are accepted and named in a header.
"""

import difflib
import re
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError

from sparse_bitnet.generation.sampling_options import RANGES, SamplingOptions
from sparse_bitnet.serve.api_error import ApiError, invalid_body
from sparse_bitnet.serve.messages import Message, StrictModel, ignored_below
from sparse_bitnet.serve.response_format import Formed
from sparse_bitnet.serve.tools import WithTools

MOST_CHOICES = 128
MOST_STOP_STRINGS = 16
_MOST_BIASES = 1024
_SEEDS = 2**64
_MOST_VALUES = 20_000
"""Strings, lists and objects of a body. Nothing else runs while it is read."""
_MOST_NUMBERS = 200_000
_VALUE = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[{,]', re.DOTALL)


def _within(name: str) -> Any:
    """A sampling option's limits, checked here so that the complaint names the parameter."""
    least, most = RANGES[name]
    return Field(ge=least, le=most)


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(_whole)
"""JSON has one kind of numbers: some clients write 100 as 100.0."""
Limit = Annotated[int, Field(ge=-1), WHOLE]
"""Most tokens; -1: as many as there is room for."""
StopString = Annotated[str, Field(min_length=1, max_length=1000)]
# `fail_fast`: thousands of wrong elements need no thousands of complaints.
TokenIds = Annotated[
    list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1, fail_fast=True)
]
Prompts = Annotated[
    list[str | TokenIds], Field(min_length=1, max_length=MOST_CHOICES, fail_fast=True)
]
TokenKey = Annotated[str, Field(pattern=r"^[0-9]{1,10}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
# fmt: off
_IGNORED = frozenset({
    "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "prediction", "store", "include", "max_tool_calls", "client_metadata",
    # vLLM's and llama.cpp's.
    "priority", "request_id", "cache_prompt", "id_slot", "return_progress", "timings_per_token",
})
# fmt: on
_NEUTRAL: dict[str, tuple[Any, ...]] = {
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
"""Values that change nothing, as None does, of parameters that are not supported."""


def listed(given: Any) -> list[str | list[int]]:
    """Texts or token ids, of which a client may also have given one alone."""
    return [given] if isinstance(given, str) or isinstance(given[0], int) else given


class StreamOptions(StrictModel):
    """What a stream says besides its text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """With it, in every event, as vLLM does."""
    include_obfuscation: bool | None = None
    """Ignored: nothing is padded."""


class TolerantBody(StrictModel):
    """Of a request to a model. Parameters that change nothing are passed over, others refused by name."""

    model_config = ConfigDict(extra="allow")

    model: str

    @property
    def others(self) -> dict[str, Any]:
        """Parameters that are given and not supported."""
        return {
            name: value for name, value in (self.model_extra or {}).items() if value is not None
        }

    @property
    def neutral(self) -> dict[str, tuple[Any, ...]]:
        return _NEUTRAL

    @property
    def ignored(self) -> set[str]:
        """Names of those that cannot change the output, and of what is ignored in others."""
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


class _Body(Formed, TolerantBody):
    """What both kinds of request for text have."""

    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: Limit | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES), WHOLE] | None = 1
    stop: StopString | Annotated[list[StopString], Field(max_length=MOST_STOP_STRINGS)] | None = (
        None
    )
    temperature: Annotated[float, _within("temperature")] | None = None
    top_p: Annotated[float, _within("top_p")] | None = None
    top_k: Annotated[int, Field(ge=-1), WHOLE] | None = None
    min_p: Annotated[float, _within("min_p")] | None = None
    repetition_penalty: Annotated[float, _within("repetition_penalty")] | None = None
    frequency_penalty: Annotated[float, _within("frequency_penalty")] | None = None
    presence_penalty: Annotated[float, _within("presence_penalty")] | None = None
    logit_bias: Annotated[dict[TokenKey, Bias], Field(max_length=_MOST_BIASES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=_SEEDS), WHOLE] | None = None

    default_tokens: ClassVar[int | None] = None
    """Most tokens to generate where nothing is said; None: what there is room for."""

    @property
    def wanted_tokens(self) -> int | None:
        """Most tokens to generate, if that is said; -1: as many as there is room for."""
        return self.max_tokens

    @property
    def limit(self) -> str:
        """The parameter that says so."""
        return "max_tokens"

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        options = self.stream_options
        return options is not None and options.include_usage and options.continuous_usage_stats

    def sampling(self, seed: int) -> SamplingOptions:
        """`seed` may be any integer."""
        given = {name: getattr(self, name) for name in (*RANGES, "top_k")}
        if self.top_k == -1:
            given["top_k"] = 0
        if self.logit_bias:
            found = {int(token): added for token, added in self.logit_bias.items()}
            given["logit_bias"] = tuple(found.items())
        named: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return SamplingOptions(seed=seed % _SEEDS, **named)

    def check(self) -> None:
        super().check()
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options")


class CompletionBody(_Body):
    """POST /v1/completions"""

    prompt: str | TokenIds | Prompts
    echo: bool | None = False
    logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each a text or token ids."""
        return listed(self.prompt)

    @property
    def neutral(self) -> dict[str, tuple[Any, ...]]:
        return _NEUTRAL | {"best_of": (self.choices,), "suffix": ("",)}

    default_tokens: ClassVar[int | None] = 16
    """As OpenAI has it, where there is room."""

    @property
    def top_scores(self) -> int | None:
        """So many of the likeliest tokens beside each, all with log-probabilities; None: no scores."""
        return self.logprobs

    def check(self) -> None:
        super().check()
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens 0 needs echo: true", param="max_tokens")


class ChatBody(WithTools, _Body):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Limit | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the template."""
    reasoning_effort: str | None = None
    """Also one; few templates use it."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """vLLM's; without either, an assistant's message at the end is continued."""

    @property
    def continues(self) -> bool:
        """Whether the last message is the beginning of the answer."""
        last = self.messages[-1]
        is_open = last.role == "assistant" and not last.tool_calls
        usual = is_open and not self.add_generation_prompt
        return usual if self.continue_final_message is None else self.continue_final_message

    _in_thought: bool = PrivateAttr(False)
    """Whether the prompt ends inside a thought, known once the template has written it."""

    @property
    def neutral(self) -> dict[str, tuple[Any, ...]]:
        return _NEUTRAL | {
            "functions": ([],),
            "function_call": ("none", "auto"),
            "modalities": (["text"],),
            "audio": (),
            "verbosity": ("medium",),
            "web_search_options": (),
        }

    @property
    def wanted_tokens(self) -> int | None:
        """As of completions, under either name."""
        asked = self.max_completion_tokens
        return self.max_tokens if asked is None else asked

    @property
    def limit(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def top_scores(self) -> int | None:
        """As of `CompletionBody`."""
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
        last = self.messages[-1]
        if self.continue_final_message and (last.role != "assistant" or last.tool_calls):
            message = "continue_final_message needs an assistant's message without calls at the end"
            raise ApiError(400, message, param="continue_final_message")
        self.check_tools()


Body = CompletionBody | ChatBody


Kind = TypeVar("Kind", bound=StrictModel)


def parse_body(kind: type[Kind], given: bytes | dict[str, Any]) -> Kind:
    """A request body of that kind. Raises `ApiError` 400 that names the parameter."""
    try:
        if isinstance(given, bytes):
            _check_size(given)
            parsed = kind.model_validate_json(given)
        else:
            parsed = kind.model_validate(given)
    except ValidationError as error:
        raise invalid_body(error) from error
    parsed.check()
    return parsed


def _check_size(raw: bytes) -> None:
    if sum(map(raw.count, b'",[{')) <= _MOST_VALUES:
        return
    values = numbers = 0
    # Commas in texts do not count.
    for match in _VALUE.finditer(raw):
        if match[0] == b",":
            numbers += 1
        else:
            values += 1
        if values > _MOST_VALUES or numbers > _MOST_NUMBERS:
            raise ApiError(
                400,
                f"the body has more than {_MOST_VALUES:,} texts, lists and objects or "
                f"{_MOST_NUMBERS:,} numbers: send less at once",
            )
