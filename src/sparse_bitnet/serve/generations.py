# SPDX-License-Identifier: Apache-2.0
"""Turns the body of a request into generations or tokens. It runs outside the event loop, since large
bodies take a while; those that are too large are refused before anything is built from them."""

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import ConfigDict

from sparse_bitnet.data.chat import call_arguments, render_calls
from sparse_bitnet.errors import UserError
from sparse_bitnet.generation.conversation import ChatTemplate
from sparse_bitnet.generation.grammar import Grammar, TokenGrammars
from sparse_bitnet.generation.pooling import Pooling
from sparse_bitnet.generation.request import Generation, GenerationRequest, Output
from sparse_bitnet.generation.text import TextTokenizer
from sparse_bitnet.serve.api_error import ApiError
from sparse_bitnet.serve.messages import StrictModel
from sparse_bitnet.serve.schema import (
    Body,
    ChatBody,
    CompletionBody,
    EmbeddingsBody,
    Tokens,
    parse_body,
    unknown_parameter,
)
from sparse_bitnet.serve.threaded_scheduler import ThreadedScheduler
from sparse_bitnet.serve.tool_calls import THOUGHT, ToolSyntax, ends_in_thought, tool_grammar

_MOST_LOGPROBS = 1 << 21
"""Limit on log-probabilities in one answer; each takes 100 bytes while the answer grows."""

Deliver = Callable[[int, Generation, Output], None]
"""Takes output of the generation of that number, in the scheduler's thread."""


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The served model and the limits of requests."""

    name: str
    tokenizer: TextTokenizer
    template: ChatTemplate | None
    """None: the model has none, and chat requests are refused."""
    end_tokens: frozenset[int]
    vocab_size: int
    hidden_size: int
    pooling: Pooling | None
    """Pooling of its embeddings; None: embeddings are refused."""
    grammars: TokenGrammars
    tool_syntax: ToolSyntax | None = None
    """Syntax of tool calls in its template; None: tools are refused."""
    api_key: str | None = None
    max_tokens: int | None = None
    """Maximum of `max_tokens` in a request; None: the room left in the context."""
    max_body_bytes: int = 1 << 20

    def check_tokens(self, tokens: Iterable[int], param: str) -> None:
        """Raise `ApiError`, naming the parameter, for a token outside the vocabulary."""
        if (most := max(tokens, default=0)) >= self.vocab_size:
            message = f"token {most} is outside the vocabulary of {self.vocab_size} tokens"
            raise ApiError(400, message, param=param)

    def check_name(self, name: str) -> None:
        """Raise `ApiError` for another model's name."""
        if name != self.name:
            message = f"the model {name[:200]!r} does not exist: this server has {self.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The generations of one request, ready to be submitted; those of one prompt are adjacent."""

    body: Body
    requests: list[GenerationRequest]
    untried: Grammar | None
    """Grammar to compile and add to the requests; None if there is none."""
    ignored: set[str]
    """Names of the parameters that had no effect."""
    echo: Sequence[str]
    """Text before the generated text, one for each prompt; "" for none."""


def requests_of(
    body: Body, model: ServedModel, scheduler: ThreadedScheduler, deliver: Deliver
) -> Prepared:
    """Return the generations of a body. Raises `ApiError` for one that exceeds a limit, and `UserError`
    for an invalid grammar."""
    model.check_name(body.model)
    capacity, most = scheduler.capacity, scheduler.max_queue + scheduler.max_running
    choices = body.n * (1 if isinstance(body, ChatBody) else len(body.prompt))
    if choices > most:
        raise ApiError(400, f"{choices} choices: this server's limit is {most}", param="n")
    model.check_tokens(map(int, body.logit_bias), "logit_bias")
    if isinstance(body, ChatBody):
        text = _chat_text(body, model)
        body._in_thought = text.rstrip().endswith(THOUGHT) or (
            body.continues and ends_in_thought(body.messages[-1].text)
        )
        prompts = [_prompt_tokens(text, model, capacity, "messages", adds_special=False)]
    else:
        prompts = [_prompt_tokens(prompt, model, capacity, "prompt") for prompt in body.prompt]
    echo = [""] * len(prompts)
    if isinstance(body, CompletionBody) and body.echo:
        echo = [p if isinstance(p, str) else model.tokenizer.decode(p) for p in body.prompt]
    most, asked = model.max_tokens or capacity, body.max_tokens
    rooms = [max(min(most, capacity - len(prompt)), 1) for prompt in prompts]
    wanted = [room if asked == -1 else min(asked, room) for room in rooms]
    cut = body.model_fields_set & {"max_tokens"} if asked > min(rooms) else set()
    grammar = body.constraint()
    if isinstance(body, ChatBody) and body.functions:
        grammar = _with_calls(grammar, body, model)
    matcher = None if grammar is None else model.grammars.known(grammar)
    scores_prompt = bool(getattr(body, "echo", False)) and body.top_scores is not None
    if body.top_scores is not None:
        scored = sum(wanted) + (sum(map(len, prompts)) if scores_prompt else 0)
        if (entries := scored * body.n * (body.top_scores + 1)) > _MOST_LOGPROBS:
            message = (
                f"up to {entries:,} log-probabilities: this server gives {_MOST_LOGPROBS:,} at once; "
                "lower max_tokens, n or top_logprobs"
            )
            raise ApiError(400, message, param="logprobs")
    seed = secrets.randbits(64) if body.seed is None else body.seed
    requests = [
        GenerationRequest(
            prompt=prompt,
            max_tokens=tokens,
            sampling=body.sampling(seed + choice),
            tokenizer=model.tokenizer,
            stop=tuple(body.stop),
            is_start=isinstance(body, ChatBody) and not body.continues,
            stop_tokens=model.end_tokens,
            grammar=matcher,
            top_scores=body.top_scores,
            score_from=0 if scores_prompt else None,
            deliver=partial(deliver, place * body.n + choice),
        )
        for place, (prompt, tokens) in enumerate(zip(prompts, wanted, strict=True))
        for choice in range(body.n)
    ]
    untried = grammar if matcher is None else None
    ignored = body.ignored | cut
    return Prepared(body=body, requests=requests, untried=untried, ignored=ignored, echo=echo)


def embedding_requests(
    body: EmbeddingsBody, model: ServedModel, scheduler: ThreadedScheduler, deliver: Deliver
) -> list[GenerationRequest]:
    """Return a request for each input. Raises `ApiError` for a body that exceeds a limit."""
    model.check_name(body.model)
    if model.pooling is None:
        raise ApiError(400, f"the model {model.name!r} gives no embeddings", code="no_embeddings")
    if (body.dimensions or 0) > model.hidden_size:
        message = f"dimensions {body.dimensions}: the model's vectors have {model.hidden_size}"
        raise ApiError(400, message, param="dimensions")
    return [
        GenerationRequest(
            prompt=_prompt_tokens(given, model, scheduler.capacity, "input"),
            max_tokens=0,
            pooling=model.pooling,
            deliver=partial(deliver, index),
        )
        for index, given in enumerate(body.input)
    ]


def _encode(text: str, model: ServedModel, most: int, *, adds_special: bool) -> list[int]:
    """Return the tokens of a text. Raises `ApiError` for more than `most`."""
    tokens = model.tokenizer.encode(text, add_special_tokens=adds_special)
    if len(tokens) > most:
        message = f"the prompt has more tokens than the context length of {most}: shorten it"
        raise ApiError(400, message, code="context_length_exceeded")
    return tokens


def _prompt_tokens(
    prompt: str | list[int], model: ServedModel, most: int, param: str, adds_special: bool = True
) -> list[int]:
    """Return a text's tokens, or the given tokens. Raises `ApiError` for none, unknown, or too many."""
    if isinstance(prompt, str):
        # An empty prompt starts as in training: after the token that ends another text.
        tokens = _encode(prompt, model, most, adds_special=adds_special)
        prompt = tokens or sorted(model.end_tokens)[:1]
    model.check_tokens(prompt, param)
    if not prompt:
        raise ApiError(400, f"{param} has no tokens", param=param)
    return prompt


def _chat_text(body: ChatBody, model: ServedModel) -> str:
    """Return a chat as its template writes it. Raises `ApiError` or `UserError` if there is no template,
    or it refuses the chat."""
    template = model.template
    if template is None:
        message = f"the model {model.name!r} has no chat template: use /v1/completions"
        raise ApiError(400, message, param="messages", code="no_chat_template")
    if body.functions and model.tool_syntax is None:
        message = f"the chat template of {model.name!r} supports no tools, or has an unknown syntax"
        raise ApiError(400, message, param="tools", code="no_tools")
    # Leave out None: templates test whether a name is defined.
    effort = body.reasoning_effort
    variables: dict[str, Any] = {"reasoning_effort": effort} if effort else {}
    variables |= body.chat_template_kwargs or {}
    if taken := sorted(variables.keys() & {"self", "messages"}):
        message = f"chat_template_kwargs must not set {taken[0]}"
        raise ApiError(400, message, param="chat_template_kwargs")
    if body.functions:
        variables["tools"] = [function.plain() for function in body.functions]
    if body.continues or body.add_generation_prompt is not None:
        variables["add_generation_prompt"] = not body.continues and body.add_generation_prompt
    # The template ends a complete message with the text after the mark.
    mark = secrets.token_hex(16) if body.continues else ""

    def render(as_text: bool) -> str:
        messages = [message.plain(as_text) for message in body.messages]
        messages[-1]["content"] += mark
        return template.render(messages, **variables)

    calls = [call.function for message in body.messages for call in message.tool_calls or ()]
    arguments = [call_arguments(call.arguments) for call in calls]
    text = render_calls(render, arguments, lambda text: text)
    if mark not in text:
        raise UserError("the chat template leaves the last message out: it cannot be continued")
    return text.rpartition(mark)[0] if mark else text


def _with_calls(grammar: Grammar | None, body: ChatBody, model: ServedModel) -> Grammar | None:
    """Return a grammar of tool calls or an answer, like OpenAI; of the answer if both begin with {."""
    syntax = model.tool_syntax
    assert syntax is not None
    is_answer = (body.response_format or {}).get("type", "text") != "text"
    if body.calls_are_forced and grammar is not None and not is_answer:
        raise ApiError(400, "give either a tool_choice that forces a call or a grammar, not both")
    answer = grammar.rule if grammar is not None and is_answer else ""
    if grammar is not None and not (body.calls_are_forced or (answer and syntax.opening)):
        return grammar
    # Output that is constrained begins with the constrained part, not with a thought.
    body._in_thought &= not (body.calls_are_forced or answer)
    named = body.named_function
    return tool_grammar(
        syntax,
        [function for function in body.functions if named in (None, function.name)],
        is_forced=body.calls_are_forced,
        is_single=named is not None or body.parallel_tool_calls is False,
        answer=answer,
        in_thought=body._in_thought,
    )


class TokenizeBody(StrictModel):
    """POST /tokenize: a text, or a chat that becomes one, with its other parameters."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: Any = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None


def tokenize(raw: bytes, model: ServedModel, most: int) -> dict[str, Any]:
    """Return the tokens of a text, at most those of a whole context. Raises `ApiError`."""
    body = parse_body(TokenizeBody, raw)
    model.check_name(model.name if body.model is None else body.model)
    more = {name: value for name, value in (body.model_extra or {}).items() if value is not None}
    if sum(text is not None for text in (body.prompt, body.content, body.messages)) != 1:
        raise ApiError(400, "give one of prompt, content and messages", param="prompt")
    if body.messages is not None:
        more |= {"model": model.name, "messages": body.messages}
        text = _chat_text(parse_body(ChatBody, more), model)
    elif more:
        raise unknown_parameter(next(iter(more)))
    else:
        text = body.prompt or body.content or ""
    given = body.add_special_tokens if body.add_special is None else body.add_special
    adds = body.prompt is not None if given is None else given
    tokens = _encode(text, model, most, adds_special=adds)
    return {"tokens": tokens, "count": len(tokens), "max_model_len": most}


class DetokenizeBody(StrictModel):
    """POST /detokenize"""

    model: str | None = None
    tokens: Tokens


def detokenize(raw: bytes, model: ServedModel, most: int) -> dict[str, Any]:
    """Return the text of tokens, special ones written out. Raises `ApiError`."""
    body = parse_body(DetokenizeBody, raw)
    model.check_name(model.name if body.model is None else body.model)
    model.check_tokens(body.tokens, "tokens")
    text = model.tokenizer.decode(body.tokens, skip_special_tokens=False)
    return {"prompt": text, "content": text}
