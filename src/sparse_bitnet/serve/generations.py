# SPDX-License-Identifier: Apache-2.0
"""From a request's body to its generations. It runs beside the event loop: large bodies take a while, and
what is too much is refused before anything is built of it."""

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sparse_bitnet.data.chat import call_arguments, render_calls
from sparse_bitnet.errors import UserError
from sparse_bitnet.generation.conversation import ChatTemplate
from sparse_bitnet.generation.grammar import Form, Grammar, TokenGrammars
from sparse_bitnet.generation.pooling import Pooling
from sparse_bitnet.generation.request import Generation, GenerationRequest, Output
from sparse_bitnet.generation.scheduler import ThreadedScheduler
from sparse_bitnet.generation.text import TextTokenizer
from sparse_bitnet.serve.api_error import ApiError
from sparse_bitnet.serve.schema import Body, ChatBody, CompletionBody, EmbeddingsBody, listed
from sparse_bitnet.serve.tool_calls import THOUGHT, ToolSyntax, ends_in_thought, tool_grammar

_MOST_LOGPROBS = 1 << 21
"""Limit on log-probabilities in one answer; each takes 100 bytes while the answer grows."""

_MOST_NUMBERS = 1 << 22
"""Limit on the numbers in all embedding vectors of one answer."""

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
    """How its embeddings are made; None: it gives none."""
    grammars: TokenGrammars
    tool_syntax: ToolSyntax | None = None
    """How its template writes calls; None: tools are refused."""
    api_key: str | None = None
    max_tokens: int | None = None
    """Most tokens that a request may ask for; None: what the context holds."""
    max_body_bytes: int = 1 << 20

    def check_tokens(self, tokens: Iterable[int], param: str) -> None:
        """Raise `ApiError`, naming the parameter, for a token that the vocabulary lacks."""
        if (most := max(tokens, default=0)) >= self.vocab_size:
            message = f"token {most} is above the vocabulary of {self.vocab_size} tokens"
            raise ApiError(400, message, param=param)

    def check_name(self, name: str) -> None:
        """Raise `ApiError` for another model's name."""
        if name != self.name:
            message = f"the model {name[:200]!r} does not exist: this server has {self.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The generations of one request, to be submitted; those of a prompt stand together."""

    body: Body
    requests: list[GenerationRequest]
    untried: Grammar | None
    """Grammar that the requests still lack, for `try_form` to add; None if they lack none."""
    ignored: set[str]
    """Names of what had no effect."""
    echo: Sequence[str]
    """Texts that precede what is generated, one for each prompt, or none at all."""


def requests_of(
    body: Body, model: ServedModel, scheduler: ThreadedScheduler, deliver: Deliver
) -> Prepared:
    """Make a body's requests. Raises `ApiError` for one that asks for more than there is."""
    model.check_name(body.model)
    given = [body] if isinstance(body, ChatBody) else body.prompts
    capacity, most = scheduler.capacity, scheduler.max_queue + scheduler.max_running
    if (choices := body.choices * len(given)) > most:
        raise ApiError(400, f"{choices} choices at once: this server takes {most}", param="n")
    model.check_tokens(map(int, body.logit_bias or ()), "logit_bias")
    prompts = [
        _chat_tokens(one, model, capacity)
        if isinstance(one, ChatBody)
        else prompt_tokens(one, model, capacity)
        for one in given
    ]
    echo: list[str] = []
    if isinstance(body, CompletionBody) and body.echo:
        echo = [p if isinstance(p, str) else model.tokenizer.decode(p) for p in body.prompts]
    most, asked = model.max_tokens or capacity, body.wanted_tokens
    rooms = [max(min(most, capacity - len(prompt)), 1) for prompt in prompts]
    usual = body.default_tokens if asked is None else asked
    wanted = [room if usual in (None, -1) else min(usual, room) for room in rooms]
    cut = {body.limit} if asked is not None and asked > min(rooms) else set()
    grammar, form = _grammar(body, model)
    scores_prompt = bool(echo) and body.top_scores is not None
    if body.top_scores is not None:
        scored = sum(wanted) + (sum(map(len, prompts)) if scores_prompt else 0)
        if (entries := scored * body.choices * (body.top_scores + 1)) > _MOST_LOGPROBS:
            raise ApiError(
                400,
                f"up to {entries:,} log-probabilities: this server gives {_MOST_LOGPROBS:,} at once; "
                "ask for fewer of them, or lower max_tokens",
                param="logprobs",
            )
    seed = secrets.randbits(64) if body.seed is None else body.seed
    requests = [
        GenerationRequest(
            prompt=prompt,
            max_tokens=tokens,
            sampling=body.sampling(seed + choice),
            tokenizer=model.tokenizer,
            stop=body.stop_strings,
            is_start=isinstance(body, ChatBody) and not body.continues,
            stop_tokens=model.end_tokens,
            form=form,
            top_scores=body.top_scores,
            score_from=0 if scores_prompt else None,
            deliver=partial(deliver, place * body.choices + choice),
        )
        for place, (prompt, tokens) in enumerate(zip(prompts, wanted, strict=True))
        for choice in range(body.choices)
    ]
    return Prepared(
        body=body,
        requests=requests,
        untried=grammar if form is None else None,
        ignored=body.ignored | cut,
        echo=echo,
    )


def embedding_requests(
    body: EmbeddingsBody, model: ServedModel, scheduler: ThreadedScheduler, deliver: Deliver
) -> list[GenerationRequest]:
    """Make a request for each input. Raises `ApiError` for a body that asks for more than there is."""
    model.check_name(body.model)
    if model.pooling is None:
        raise ApiError(400, f"the model {model.name!r} gives no embeddings", code="no_embeddings")
    inputs, size = listed(body.input), body.dimensions or model.hidden_size
    if size > model.hidden_size:
        message = f"dimensions {size}: the model's vectors have {model.hidden_size}"
        raise ApiError(400, message, param="dimensions")
    if len(inputs) * size > _MOST_NUMBERS:
        raise ApiError(
            400,
            f"{len(inputs)} vectors of {size} numbers: this server gives {_MOST_NUMBERS:,} numbers at "
            "once; send fewer inputs",
            param="input",
        )
    return [
        GenerationRequest(
            prompt=prompt_tokens(given, model, scheduler.capacity, "input"),
            max_tokens=0,
            pooling=model.pooling,
            deliver=partial(deliver, index),
        )
        for index, given in enumerate(inputs)
    ]


def encode(text: str, model: ServedModel, most: int, *, add_special_tokens: bool) -> list[int]:
    """Return the tokens of a text. Raises `ApiError` for more than `most`."""
    tokens = model.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    if len(tokens) > most:
        raise _too_long(most)
    return tokens


def _too_long(most: int) -> ApiError:
    message = f"the prompt has more tokens than the context length of {most}: shorten it"
    return ApiError(400, message, code="context_length_exceeded")


def prompt_tokens(
    prompt: str | list[int], model: ServedModel, most: int, param: str = "prompt"
) -> list[int]:
    """Return the tokens of a text, or those given. Raises `ApiError` for none, unknown, or too many."""
    if isinstance(prompt, str):
        # An empty text starts as one does in training: after the token that ends another.
        tokens = encode(prompt, model, most, add_special_tokens=True)
        tokens = tokens or sorted(model.end_tokens)[:1]
    elif len(tokens := prompt) > most:
        raise _too_long(most)
    model.check_tokens(tokens, param)
    if not tokens:
        raise ApiError(400, "the prompt is empty: it has no tokens", param=param)
    return tokens


def chat_text(body: ChatBody, model: ServedModel) -> str:
    """Return a chat as its template writes it. Raises `ApiError` where there is none, or it refuses."""
    template = model.template
    if template is None:
        message = f"the model {model.name!r} has no chat template: use /v1/completions"
        raise ApiError(400, message, param="messages", code="no_chat_template")
    if body.functions and model.tool_syntax is None:
        message = (
            f"the chat template of {model.name!r} knows no tools, or calls them in its own way"
        )
        raise ApiError(400, message, param="tools", code="no_tools")
    # Without what is None: templates ask whether a name is defined.
    variables: dict[str, Any] = (
        {"reasoning_effort": body.reasoning_effort} if body.reasoning_effort else {}
    )
    variables |= body.chat_template_kwargs or {}
    if taken := sorted(variables.keys() & {"self", "messages"}):
        message = f"chat_template_kwargs holds {taken[0]}, which is no variable to give"
        raise ApiError(400, message, param="chat_template_kwargs")
    if body.functions:
        variables["tools"] = [function.plain() for function in body.functions]
    if body.continues or body.add_generation_prompt is not None:
        variables["add_generation_prompt"] = not body.continues and body.add_generation_prompt
    # What stands behind the mark is the template's end of a message that is complete.
    mark = secrets.token_hex(16) if body.continues else ""

    def render(as_text: bool) -> str:
        messages = [message.plain(as_text) for message in body.messages]
        messages[-1]["content"] += mark
        return template.render(messages, **variables)

    calls = [call.function for message in body.messages for call in message.tool_calls or ()]
    arguments = [call_arguments(call.arguments) for call in calls]
    try:
        text = render_calls(render, arguments, lambda text: text)
        if mark not in text:
            raise UserError("the chat template leaves the last message out: it cannot be continued")
    except UserError as error:
        raise ApiError(400, str(error), param="messages") from error
    return text.rpartition(mark)[0] if mark else text


def _chat_tokens(body: ChatBody, model: ServedModel, most: int) -> list[int]:
    text = chat_text(body, model)
    body._in_thought = text.rstrip().endswith(THOUGHT) or (
        body.continues and ends_in_thought(body.messages[-1].text)
    )
    tokens = encode(text, model, most, add_special_tokens=False)
    model.check_tokens(tokens, "messages")
    if not tokens:
        raise ApiError(400, "the chat is empty: it has no tokens", param="messages")
    return tokens


def _grammar(body: Body, model: ServedModel) -> tuple[Grammar | None, Form | None]:
    """Return the grammar of the texts and, if cached, its initial state; None for any text."""
    try:
        grammar = body.form()
        if isinstance(body, ChatBody) and body.functions:
            grammar = _with_calls(grammar, body, model.tool_syntax)
        return grammar, None if grammar is None else model.grammars.known(grammar)
    except UserError as error:
        raise ApiError(400, str(error), code="invalid_grammar") from error


def _with_calls(
    grammar: Grammar | None, body: ChatBody, syntax: ToolSyntax | None
) -> Grammar | None:
    """Return a grammar of calls or an answer, as OpenAI does; of the answer only if both begin with {."""
    assert syntax is not None
    is_answer = grammar is not None and body.response_format is not None
    if body.calls_are_forced and grammar is not None and not is_answer:
        raise ApiError(400, "give tools that must be called, or a response_format")
    answer = grammar.rule if grammar is not None and is_answer else ""
    if grammar is not None and not (body.calls_are_forced or (answer and syntax.opening)):
        return grammar
    # A text that is constrained to calls, or a grammar, begins with them.
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


def try_form(prepared: Prepared, model: ServedModel) -> Prepared:
    """Return the requests with their grammar started. Raises `ApiError` for an invalid grammar."""
    assert prepared.untried is not None
    try:
        form = model.grammars.start(prepared.untried)
    except UserError as error:
        raise ApiError(400, str(error), code="invalid_grammar") from error
    requests = [replace(request, form=form) for request in prepared.requests]
    return replace(prepared, requests=requests, untried=None)
