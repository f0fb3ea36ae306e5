# SPDX-License-Identifier: Apache-2.0
"""/v1/responses through the `openai` client: text, tool calls, text formats, and streamed events."""

import json

import openai
import pytest
from pydantic import BaseModel
from test_structured_output import SCHEMA, ending_soon
from test_tools import ARGUMENTS, CALL, QWEN, TOKENIZER, WEATHER, saying, serving, tagged

from scripted_engine import ScriptedEngine
from serving_thread import server

TOOL = {"type": "function", "strict": False, **WEATHER["function"]}


def ask(client, **more):
    more = {"input": "?", "temperature": 0, "max_output_tokens": 300} | more
    return client.responses.create(model="scripted", **more)


def test_text_is_the_same_whole_and_streamed():
    with serving(saying("Grüße!")) as running, running.client() as client:
        answer = ask(client, instructions="be brief", metadata={"a": "b"}, store=True)
        assert answer.output_text == "Grüße!"
        assert answer.status == "completed"
        prompt = "<system>be brief[]<user>?[]<assistant>"
        assert answer.usage.input_tokens == len(TOKENIZER.encode(prompt))
        assert answer.usage.output_tokens == len(TOKENIZER.encode("Grüße!")) + 1
        padding = {"include_obfuscation": False}
        with client.responses.stream(
            model="scripted", input="?", temperature=0, stream_options=padding
        ) as stream:
            events = list(stream)
            final = stream.get_final_response()
        assert final.output_text == "Grüße!"
        kinds = [event.type for event in events]
        assert kinds[:4] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
        ]
        assert kinds[-4:] == [
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(pieces) == "Grüße!"
        cut = ask(client, max_output_tokens=3)
        assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_tool_calls_and_the_turn_after_them_are_answered():
    with serving(saying("Look:\n" + tagged(CALL))) as running, running.client() as client:
        answer = ask(client, tools=[TOOL])
        said, call = answer.output
        assert said.content[0].text == "Look:"
        assert (call.type, call.name, call.arguments) == ("function_call", "weather", ARGUMENTS)
        events = list(ask(client, tools=[TOOL], stream=True))
        assert events[-1].type == "response.completed"
        streamed = events[-1].response.output[1]
        assert (streamed.name, streamed.arguments) == ("weather", ARGUMENTS)
        kind = "response.function_call_arguments.delta"
        pieces = [event.delta for event in events if event.type == kind]
        assert "".join(pieces) == ARGUMENTS
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        question = {"role": "user", "content": [{"type": "input_text", "text": "?"}]}
        thought = {"type": "reasoning", "id": "r", "summary": []}
        again = ask(client, input=[question, thought, *answer.output, result])
        asked = {"name": "weather", "arguments": json.loads(ARGUMENTS)}
        calls = [{"id": call.call_id, "type": "function", "function": asked}]
        said = f"Look:{json.dumps(calls, ensure_ascii=False)}"
        prompt = f"<user>?[]<assistant>{said}<tool>rain[]<assistant>"
        assert again.usage.input_tokens == len(TOKENIZER.encode(prompt))


def test_text_formats_are_honoured():
    class Person(BaseModel):
        name: str
        age: int

    with serving(ending_soon, "{{ messages }}") as running, running.client() as client:
        options = {"temperature": 0, "max_output_tokens": 400}
        parsed = client.responses.parse(model="scripted", input="?", text_format=Person, **options)
        assert isinstance(parsed.output_parsed, Person)
        answer = ask(client, text={"format": {"type": "text"}}, max_output_tokens=5)
        assert answer.text.format.type == "text"
        form = {"type": "json_object", "schema": SCHEMA}
        assert json.loads(ask(client, text={"format": form}).output_text).keys() == {"name", "age"}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id is not supported"),
        ({"top_logprobs": False}, "top_logprobs is not supported"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": []}, "input"),
        (
            {"tools": [TOOL, {"type": "function", "name": "f", "parameters": []}]},
            "parameters: Input should be",
        ),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "needs tools"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
        ({"extra_body": {"messages": []}}, "unknown parameter: messages"),
        ({"extra_body": {"tempature": 1}}, "unknown parameter: tempature"),
        ({"extra_body": {"max_output_token": 1}}, "did you mean max_output_tokens?"),
        ({"tool_choice": "maybe"}, "tool_choice: "),
        ({"temperature": 101}, "temperature"),
        ({"text": {"format": {"type": "text", "schema": SCHEMA}}}, "schema"),
        ({"tool_choice": {"type": "function", "name": "x"}}, "not one of the tools"),
    ],
)
def test_unsupported_parameters_are_refused(more, message):
    with serving(saying("x")) as running, running.client() as client:
        with pytest.raises(openai.BadRequestError, match=message):
            ask(client, **more)


def test_other_kinds_of_items_and_tools_are_dropped_and_named():
    """Codex sends kinds of its own, one call at a time, and schemas that no grammar supports."""
    odd = {"type": "object", "properties": {"x": {"type": "string", "pattern": "(?=a)"}}}
    request = {
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "?"}]},
            {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "x"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": "x"},
            {"type": "message", "role": "assistant", "content": None},
            {"type": "function_call_output", "call_id": "c", "output": None},
        ],
        "tools": [TOOL, TOOL | {"name": "odd", "parameters": odd}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"summary": "auto"},
        "extra_body": {"client_metadata": {"a": "b"}},
    }
    others = [{"type": "custom", "name": "apply_patch", "format": {}}, {"type": "local_shell"}]
    with serving(saying(tagged(CALL))) as running, running.client() as client:
        plain = ask(client, **request | {"input": [*request["input"][:1], *request["input"][3:]]})
        request["tools"] = [*others, *request["tools"]]
        raw = client.responses.with_raw_response.create(
            model="scripted", temperature=0, max_output_tokens=300, **request
        )
    named = "client_metadata, input.custom_tool_call, input.custom_tool_call_output"
    also = "reasoning.summary, tools.custom, tools.local_shell"
    assert raw.headers["X-Ignored-Parameters"] == f"{named}, {also}"
    answer = raw.parse()
    assert answer.usage.input_tokens == plain.usage.input_tokens
    assert [item.name for item in answer.output] == ["weather"]
    assert [tool.name for tool in answer.tools] == ["weather", "odd"]


def test_parameters_that_a_chat_refuses_are_refused():
    for template, more, param in (
        (QWEN, {"max_output_tokens": 0}, "max_output_tokens"),
        (None, {}, "messages"),
        (QWEN, {"input": [{"type": "reasoning", "id": "r", "summary": []}]}, "messages"),
    ):
        with serving(saying("x"), template) as running, running.client() as client:
            with pytest.raises(openai.BadRequestError) as refused:
                ask(client, **more)
            assert refused.value.param == param


def test_failures_are_events():
    engine = ScriptedEngine(vocab_size=300, logits=saying("x" * 50), fails=lambda t: len(t) > 40)
    with server(engine, template=QWEN) as running, running.client() as client:
        events = list(ask(client, stream=True))
        assert events[-1].type == "response.failed"
        assert "RuntimeError" in events[-1].response.error.message
        with pytest.raises(openai.InternalServerError):
            ask(client)
