# SPDX-License-Identifier: Apache-2.0
"""Conversations as tokens. Only the assistant's count in the loss; they are called learnt.

A conversation is a list of messages, `{"role": ..., "content": ...}`, that the tokenizer's chat template
turns into one text. If the template marks the assistant's words with `{% generation %}`, they are
learnt; otherwise, the text from an answer's prompt to the next message. A token that is only
partly the assistant's is not learnt. Plain text may lie beside conversations, and is learnt as a whole.
A stored token is uint32: its id, and above it two flags: whether it is learnt, and whether it begins a
conversation or a text.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from sparse_bitnet.data.file_source import SkippedRow, missing_column
from sparse_bitnet.errors import UserError, library_errors_as

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

LEARNT = np.uint32(1 << 31)
BEGINS = np.uint32(1 << 30)
IDS = BEGINS - np.uint32(1)

_GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")

_START, _END = "\ufdd0", "\ufdd1"
"""Noncharacters, which no text contains; they enclose the spans that a template marks."""

_MARK = f"{{% macro the_answer() %}}{_START}{{{{ caller() }}}}{_END}{{% endmacro %}}\n"

_SHAREGPT = {"human": "user", "gpt": "assistant", "observation": "tool"}

_Spans = list[tuple[int, int]]
_Rendered = TypeVar("_Rendered")


def check_conversation(row: Mapping[str, Any], column: str, where: str) -> str:
    """Return a row's conversation as JSON: its messages, or these and its tools.

    Messages are a list of `{"role", "content"}` or of ShareGPT's `{"from", "value"}`, or the JSON of one;
    for the column "messages" also in "conversations", or Alpaca's "instruction", "input" and "output".

    Raises `SkippedRow` for anything else, and for a conversation without an assistant.
    """
    try:
        messages = _messages(row, column)
        tools = _from_json(row.get("tools")) or []
        tools = [_from_json(tool) for tool in tools] if isinstance(tools, list) else [tools]
        if not all(isinstance(tool, dict) for tool in tools):
            raise ValueError("column 'tools' is not a list of objects")
        whole = {"messages": messages, "tools": tools} if tools else messages
        return json.dumps(whole, ensure_ascii=False)
    except TypeError as error:  # a .parquet column can hold dates and bytes
        raise SkippedRow(f"{where}: column {column!r} is not JSON: {error}") from error
    except (ValueError, RecursionError) as error:
        raise SkippedRow(f"{where}: {error}") from error


def _from_json(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) and value else value


def _messages(row: Mapping[str, Any], column: str) -> list[dict[str, Any]]:
    names = ("messages", "conversations") if column == "messages" else (column,)
    given = next((row[name] for name in names if row.get(name) is not None), None)
    is_alpaca = given is None and column == "messages" and "instruction" in row
    if not is_alpaca and not {*names} & {*row}:
        raise ValueError(missing_column(column, row))
    try:
        given = _alpaca(row) if is_alpaca else _from_json(given)
        messages = [_message(each) for each in given]
        begins = messages[0]["role"] if messages else "system"
        if begins != "system" and row.get("system"):
            messages.insert(0, _message({"role": "system", "content": row["system"]}))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f'column {column!r} is not a list of {{"role": text, "content": text}}'
        ) from error
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("no assistant message, so nothing to learn")
    return messages


def _alpaca(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    asked = "\n".join(filter(None, (row["instruction"], row.get("input"))))
    turns = [*(row.get("history") or ()), (asked, row["output"])]
    texts = [text for question, answer in turns for text in (question, answer)]
    return [
        {"role": ("user", "assistant")[number % 2], "content": text}
        for number, text in enumerate(texts)
    ]


def _message(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as templates read it. Raises any kind of exception for anything else."""
    message = {name: value for name, value in given.items() if value is not None}
    if "role" not in message:  # ShareGPT's
        role, value = message.pop("from"), message.pop("value", None)
        message = {"role": _SHAREGPT.get(role, role), "content": value, **message}
        if role == "function_call":
            call = {"type": "function", "function": _from_json(value)}
            message |= {"role": "assistant", "content": "", "tool_calls": [call]}
    if message["role"] == "developer":  # as a server reads it
        message["role"] = "system"
    content = message.get("content")
    if isinstance(content, list):
        if any(part["type"] != "text" for part in content):
            raise ValueError("content that is not text")
        content = "".join(part["text"] for part in content)
    calls = message.get("tool_calls") or []
    if content is None and (calls or message["role"] == "tool"):
        content = ""
    functions = [call.get("function", call) for call in calls]
    texts = [message["role"], content, *(function["name"] for function in functions)]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("no text")
    return {**message, "content": content}


def check_template(
    tokenizer: "PreTrainedTokenizerFast", tools: list[dict[str, Any]] | None = None
) -> str:
    """Return the tokenizer's chat template, of several that for `tools`. Raises `UserError` for none."""
    try:
        return tokenizer.get_chat_template(tools=tools)
    except ValueError as error:
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path} has no chat template: use a chat model's, or put "
            "a chat_template.jinja into its folder"
        ) from error


def end_of_turn_tokens(tokenizer: "PreTrainedTokenizerFast") -> list[int]:
    """Return the ids of the tokens that a tokenizer's chat template puts right after an answer.

    The token after the last answer comes first; the one between an answer and the next message follows if
    it differs. Empty for a template that ends answers with plain text, or fails on a plain conversation.
    """
    answer = "the answer"
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": answer}] * 2
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception:  # an untrusted template may raise anything
        return []
    tokens = {token.content: id for id, token in tokenizer.added_tokens_decoder.items()}
    ends: list[int] = []
    for rest in reversed(text.split(answer)[1:]):
        fitting = [content for content in tokens if rest.lstrip().startswith(content)]
        if fitting:
            ends.append(tokens[max(fitting, key=len)])
    return list(dict.fromkeys(ends))


def encode(tokenizer: "PreTrainedTokenizerFast", conversation: str) -> np.ndarray:
    """Return a conversation of `check_conversation` as stored tokens: uint32 [tokens].

    A token is learnt if all of its text is the assistant's. If a template writes an answer differently
    once others follow (without its thoughts), the conversation appears once for each answer.

    Raises `UserError` for a conversation that the template refuses, or that leaves nothing to learn.
    """
    given = json.loads(conversation)
    given = given if isinstance(given, dict) else {"messages": given}
    shown = conversation if len(conversation) <= 80 else conversation[:77] + "..."
    with library_errors_as(f"the chat template refuses {shown}"):
        texts = _texts(tokenizer, **given)
    samples = [_stored(tokenizer, *each) for each in texts]
    learnt = [sample for sample in samples if (sample & LEARNT).any()]
    if not learnt:
        raise UserError(f"the chat template marks nothing to learn in {shown}")
    return np.concatenate(learnt)


def learnt_whole(ids: Sequence[int]) -> np.ndarray:
    """Return plain text as stored tokens, uint32 [tokens]: all but the first are learnt."""
    tokens = np.array(ids, np.uint32) | LEARNT
    tokens[:1] ^= LEARNT | BEGINS
    return tokens


def _stored(tokenizer: Any, text: str, spans: _Spans) -> np.ndarray:
    with library_errors_as("the tokenizer.json cannot encode this text"):
        encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    tokens = np.array(encoding.ids, np.uint32)
    starts, ends = np.array(encoding.offsets).reshape(-1, 2).T
    # Offsets may leave out a space that belongs to the token.
    spaced = [token.startswith("Ġ") for token in encoding.tokens]
    before = np.maximum.accumulate(np.concatenate([[0], ends]))[:-1]
    starts = np.where(spaced, np.minimum(starts, before), starts)
    for start, end in spans:
        tokens[(starts >= start) & (starts < end) & (ends <= end)] |= LEARNT
    tokens[:1] &= ~LEARNT  # the first token is not predicted from anything
    tokens[:1] |= BEGINS
    return tokens


def _texts(
    tokenizer: Any, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
) -> list[tuple[str, _Spans]]:
    """Return texts, each with the spans that are learnt."""
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    functions = [call.get("function", call) for call in calls]
    written = [call_arguments(function.get("arguments")) for function in functions]

    def render(as_text: bool) -> list[tuple[str, _Spans]]:
        for function, (values, text) in zip(functions, written, strict=True):
            function["arguments"] = text if as_text or values is None else values
        return list(_samples(tokenizer, messages, tools))

    return render_calls(render, written, lambda texts: "".join(text for text, _ in texts))


def call_arguments(given: Any) -> tuple[dict[str, Any] | None, str]:
    """Return the arguments of a call as an object, None where they are none, and as JSON text."""
    text = given.strip() if isinstance(given, str) else json.dumps(given or {}, ensure_ascii=False)
    text = text or "{}"
    with suppress(ValueError, RecursionError):
        if isinstance(values := json.loads(text), dict):
            return values, text
    return None, text


def render_calls(
    render: Callable[[bool], _Rendered],
    calls: Sequence[tuple[dict[str, Any] | None, str]],
    text_of: Callable[[_Rendered], str],
) -> _Rendered:
    """Render a chat with the arguments of its tool calls as objects, as most templates want them; as
    JSON text if a template fails on objects, or writes them as Python does.

    Args:
        render: renders with arguments as objects (False) or as text (True).
        calls: the arguments, as `call_arguments` returns them.
        text_of: the text of a rendering.

    Raises the exception of rendering with objects if text fails too.
    """
    objects = [(values, text) for values, text in calls if values is not None]
    refused = None
    try:
        rendered = render(False)
        if not any(values and str(values) in text_of(rendered) for values, _ in objects):
            return rendered
    except Exception as error:  # an untrusted template may raise anything
        refused = error
    with suppress(Exception):
        if objects:
            other = render(True)
            # A template that quotes text does write objects; Python's style came from elsewhere.
            if refused or all(text in text_of(other) for _, text in objects):
                return other
    if refused:
        raise refused
    return rendered


def _samples(
    tokenizer: Any, messages: list[Any], tools: list[dict[str, Any]] | None
) -> Iterator[tuple[str, _Spans]]:
    template = check_template(tokenizer, tools)
    calls = any(message.get("tool_calls") for message in messages)
    for name, used in (("tools", tools), ("tool_calls", calls)):
        if used and name not in template:
            raise UserError(f"the chat template has no place for {name}")

    def text(count: int, prompts: bool = False, source: str = template) -> str:
        return tokenizer.apply_chat_template(
            messages[:count] or [[]],  # none: a batch of one empty chat
            tools=tools,
            chat_template=source,
            tokenize=False,
            add_generation_prompt=prompts,
        )

    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not _GENERATION.search(template):
        return _by_prompts(text, turns, tokenizer.bos_token or "")
    marked = _MARK + _GENERATION.sub(_as_call, template)
    return _by_marks(lambda count: _unmarked(text(count, source=marked), text(count)), turns)


def _as_call(tag: re.Match[str]) -> str:
    return f"{{%{tag[1]} {'endcall' if tag[2] else 'call the_answer()'} {tag[3]}%}}"


def _unmarked(marked: str, plain: str) -> tuple[str, _Spans]:
    spans, starts, text = [], [], ""
    for piece in re.split(f"([{_START}{_END}])", marked):
        if piece == _START:
            starts.append(len(text))
        elif piece == _END:
            spans.append((starts.pop(), len(text)))
        else:
            text += piece
    if text != plain:
        raise UserError(
            "the chat template changes text that it has marked with {% generation %}: mark the final text"
        )
    return text, spans


def _by_marks(
    render: Callable[[int], tuple[str, _Spans]], turns: list[int]
) -> Iterator[tuple[str, _Spans]]:
    text, spans, earlier = "", _Spans(), 0
    for turn in turns:
        after, answers = render(turn + 1)
        said = [after[slice(*span)] for span in answers[: len(spans)]]
        if said != [text[slice(*span)] for span in spans]:
            yield text, spans[earlier:]
            earlier = len(render(turn)[1])
        text, spans = after, answers
    yield text, spans[earlier:]


def _by_prompts(text: Any, turns: list[int], bos: str) -> Iterator[tuple[str, _Spans]]:
    whole, spans, tail = "", _Spans(), ""
    with suppress(Exception):  # a prompt that is written unasked, even without messages
        tail = text(0)[0].removeprefix(bos)
    for turn in filter(None, turns):  # a first message has no prompt
        prompt, answered = text(turn, True), text(turn + 1)
        if prompt.endswith(tail):
            answered = answered.removesuffix(tail)
        if not answered.startswith(prompt):
            raise UserError(
                f"the chat template rewrites earlier messages when message {turn + 1} follows: mark what "
                "the assistant says with {% generation %}"
            )
        if not answered.startswith(whole):
            yield whole, spans
            spans = []
        whole, spans = answered, [*spans, (len(prompt), len(answered))]
    yield whole, spans
