# SPDX-License-Identifier: Apache-2.0
"""Tool calls: as the families of templates write them, whole, streamed, forced and strict."""

import json

import numpy as np
import openai
import pytest

from scripted_engine import ScriptedEngine, logits_after
from serving_thread import END, byte_tokenizer, server
from sparse_bitnet.serve.tool_calls import HERMES, LLAMA, CallPiece, ToolCallReader, syntax_of

TOKENIZER = byte_tokenizer()
QWEN = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls | default([]) | tojson }}"
    "{% endfor %}<assistant>"
)
LLAMA_3 = QWEN.replace("<tool_call>", '{"name": f, "parameters": {}}')
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Bern", "Rom"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
TIME = {"type": "function", "function": {"name": "time", "description": "now"}}
CALL = '{"name": "weather", "arguments": {"city": "Bern", "x": "}<\\""}}'
OTHER = '{"arguments": {}, "name": "time"}'
QUESTION = [{"role": "user", "content": "?"}]


def function(name, parameters, **more):
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def read(syntax, text, size):
    """Return content and calls of a text that comes in pieces of this size."""
    reader = ToolCallReader(syntax, frozenset({"weather", "time"}))
    pieces = []
    for start in range(0, len(text), size):
        pieces += reader.feed(text[start : start + size])
    pieces += reader.end()
    calls = {}
    for piece in pieces:
        if isinstance(piece, CallPiece):
            call = calls.setdefault(piece.index, ["", ""])
            call[0] += piece.name or ""
            call[1] += piece.arguments
    return "".join(p for p in pieces if isinstance(p, str)), [tuple(c) for c in calls.values()]


def tagged(*calls):
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


ARGUMENTS = '{"city": "Bern", "x": "}<\\""}'
BROKEN = '{"name": "weather", arguments'
UNKNOWN = '{"name": "rm", "arguments": {"x": "}"}}'
ESCAPED = '{"name": "a\\q", "arguments": {}}'
CLOSED = '{"arguments": {"x": "</tool_call>"}, "name": "time"}'
THOUGHT = f"<think>\n{tagged(CALL)}\n</think>"
THINKING = THOUGHT.replace("think", "thinking")
DRAFT = f"[THINK]{tagged(CALL)}[/THINK]"
ODD = '{"name": "time}'
ONE_LINE = tagged(ODD).replace("\n", "")
LLAMA_CALL = '{"name": "weather", "parameters": {"city": "Rom"}}'


@pytest.mark.parametrize(
    ("syntax", "text", "content", "calls"),
    [
        (HERMES, "just < text <tool", "just < text <tool", []),
        (HERMES, " \n", " \n", []),
        (HERMES, tagged(CALL), "", [("weather", ARGUMENTS)]),
        (HERMES, "So:\n\n" + tagged(CALL) + "\n", "So:", [("weather", ARGUMENTS)]),
        (HERMES, tagged(CALL, OTHER), "", [("weather", ARGUMENTS), ("time", "{}")]),
        (HERMES, tagged(CALL) + "\nDone.", "\nDone.", [("weather", ARGUMENTS)]),
        (HERMES, tagged(CALL)[:-12] + tagged(OTHER), "", [("weather", ARGUMENTS), ("time", "{}")]),
        (HERMES, tagged(f"{CALL}\n{CALL}"), "", 2 * [("weather", ARGUMENTS)]),
        (HERMES, tagged(CALL[:-1] + f', "x": {LLAMA_CALL}}}'), "", [("weather", ARGUMENTS)]),
        (HERMES, tagged(OTHER.replace("{}", "null")), "", [("time", "{}")]),
        (HERMES, tagged(OTHER.replace("{}", "[1]")), tagged(OTHER.replace("{}", "[1]")), []),
        (HERMES, tagged(CALL)[:-12] + " and more", "and more", [("weather", ARGUMENTS)]),
        (HERMES, tagged(CALL)[:-2], "", [("weather", ARGUMENTS)]),
        (HERMES, tagged(BROKEN) + "!", tagged(BROKEN) + "!", []),
        (HERMES, tagged(UNKNOWN) + "!", tagged(UNKNOWN) + "!", []),
        (HERMES, tagged(UNKNOWN, CALL), tagged(UNKNOWN), [("weather", ARGUMENTS)]),
        (HERMES, tagged(UNKNOWN)[:40], tagged(UNKNOWN)[:40], []),
        (HERMES, tagged(ESCAPED), tagged(ESCAPED), []),
        (LLAMA, ESCAPED, ESCAPED, []),
        (HERMES, tagged(OTHER)[:-12], "", [("time", "{}")]),
        (HERMES, tagged(CALL)[:54], "", [("weather", '{"city": ')]),
        (HERMES, "<tool_call>" + LLAMA_CALL, "", [("weather", '{"city": "Rom"}')]),
        (HERMES, THOUGHT + "\n\n" + tagged(OTHER), THOUGHT, [("time", "{}")]),
        (HERMES, THOUGHT[:-8], THOUGHT[:-8], []),
        (HERMES, tagged(CLOSED), "", [("time", '{"x": "</tool_call>"}')]),
        (HERMES, tagged(OTHER) + THOUGHT, THOUGHT, [("time", "{}")]),
        (HERMES, "So " + THOUGHT.replace("think", "thinking"), f"So {THINKING}", []),
        (HERMES, DRAFT + tagged(OTHER), DRAFT, [("time", "{}")]),
        (HERMES, "<think>" + tagged(CALL)[:-3], "<think>" + tagged(CALL)[:-3], []),
        (HERMES, tagged(CLOSED.replace("time", "rm")), tagged(CLOSED.replace("time", "rm")), []),
        (HERMES, tagged(ODD) + tagged(OTHER), tagged(ODD), [("time", "{}")]),
        (HERMES, (tagged(ODD) + tagged(OTHER)).replace("\n", ""), ONE_LINE, [("time", "{}")]),
        (LLAMA, THOUGHT + "\n" + LLAMA_CALL, THOUGHT, [("weather", '{"city": "Rom"}')]),
        (LLAMA, f" <think>{LLAMA_CALL}", f" <think>{LLAMA_CALL}", []),
        (LLAMA, "<thi", "<thi", []),
        (LLAMA, "text {", "text {", []),
        (LLAMA, LLAMA_CALL, "", [("weather", '{"city": "Rom"}')]),
        (
            LLAMA,
            "<|python_tag|>" + LLAMA_CALL + "; " + LLAMA_CALL,
            "",
            2 * [("weather", '{"city": "Rom"}')],
        ),
        (LLAMA, '{"type": "function", "name": "time", "parameters": {}}', "", [("time", "{}")]),
        (LLAMA, '{"parameters": {}, "name": "time"}', "", [("time", "{}")]),
        (LLAMA, '{"name": "Anna", "parameters": {}}', '{"name": "Anna", "parameters": {}}', []),
        (LLAMA, '{"answer": 42}', '{"answer": 42}', []),
        (LLAMA, "\n\nHello", "\n\nHello", []),
        (LLAMA, "<|python_tag|>\nHello", "\nHello", []),
    ],
)
def test_texts_are_divided_however_they_come(syntax, text, content, calls):
    for size in (1, 3, 7, 1000):
        assert read(syntax, text, size) == (content, calls), size


def test_syntax_is_that_of_the_template():
    assert syntax_of(QWEN) is HERMES
    assert syntax_of(LLAMA_3) is LLAMA
    for template in ("{{ messages }}", "{{ tools }}", "{{ tools }}<tool_call><function=x>"):
        assert syntax_of(template) is None


def saying(text, certainty=9, mark="<assistant>"):
    """Return logits of a model that writes this text after a prompt, and then ends."""
    script = [*TOKENIZER.encode(text), END]
    mark = TOKENIZER.encode(mark)

    def logits(tokens, size):
        starts = range(len(tokens) - len(mark), -1, -1)
        start = next(i for i in starts if tokens[i : i + len(mark)] == mark) + len(mark)
        scores = np.zeros(size, np.float32)
        scores[script[min(len(tokens) - start, len(script) - 1)]] = certainty
        return scores

    return logits


def serving(logits, template=QWEN):
    return server(
        ScriptedEngine(vocab_size=300, context_length=4096, logits=logits), template=template
    )


def ask(client, **more):
    more = {"max_tokens": 400, "temperature": 0, "tools": [WEATHER, TIME]} | more
    messages = more.pop("messages", QUESTION)
    return client.chat.completions.create(model="scripted", messages=messages, **more)


def test_tool_calls_are_the_same_whole_and_streamed():
    with serving(saying("Look:\n" + tagged(CALL, OTHER))) as running, running.client() as client:
        [choice] = ask(client).choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Look:"
        first, second = choice.message.tool_calls
        assert (first.type, first.function.name, first.function.arguments) == (
            "function",
            "weather",
            ARGUMENTS,
        )
        assert (second.function.name, second.function.arguments) == ("time", "{}")
        assert first.id != second.id
        with client.chat.completions.stream(
            model="scripted", messages=QUESTION, tools=[WEATHER, TIME], temperature=0
        ) as stream:
            events = list(stream)
            streamed = stream.get_final_completion().choices[0]
        pieces = [e for e in events if e.type == "tool_calls.function.arguments.delta"]
        assert "".join(piece.arguments_delta for piece in pieces) == ARGUMENTS + "{}"
        assert streamed.finish_reason == "tool_calls"
        assert streamed.message.content == "Look:"
        assert [call.function.arguments for call in streamed.message.tool_calls] == [
            ARGUMENTS,
            "{}",
        ]
        # What came back goes into the next turn as it is.
        answer = {"role": "tool", "tool_call_id": first.id, "content": "rain"}
        messages = [*QUESTION, choice.message.model_dump(), answer]
        assert ask(client, messages=messages).choices


def test_tools_reach_the_template_unless_there_is_no_choice():
    with serving(saying(tagged(CALL))) as running, running.client() as client:
        with_tools, without = ask(client), ask(client, tool_choice="none")
        assert with_tools.usage.prompt_tokens > without.usage.prompt_tokens + 200
        assert without.choices[0].message.content == tagged(CALL)
        assert without.choices[0].message.tool_calls is None
        assert without.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("template", [QWEN, LLAMA_3])
def test_forced_calls_come_and_fit(template):
    def noise(tokens, size):
        logits = logits_after(tokens, size)
        logits[[*TOKENIZER.encode('"}'), END]] += 5
        return logits

    named = {"type": "function", "function": {"name": "weather"}}
    untyped = function("weather", {key: PARAMETERS[key] for key in PARAMETERS if key != "type"})
    with serving(noise, template) as running, running.client() as client:
        for more in ({"tool_choice": named}, {"tool_choice": "required", "tools": [untyped]}):
            [choice] = ask(client, seed=3, parallel_tool_calls=False, **more).choices
            assert choice.finish_reason == "tool_calls"
            assert choice.message.content is None
            [call] = choice.message.tool_calls
            assert call.function.name == "weather"
            assert json.loads(call.function.arguments)["city"] in ("Bern", "Rom")


def test_strict_arguments_fit_where_the_model_would_not():
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    text = tagged('{"name": "weather", "arguments": {"city": "Paris"}}')
    with serving(saying(text)) as running, running.client() as client:
        free, bound = ask(client).choices[0], ask(client, tools=[strict]).choices[0]
        assert free.message.tool_calls[0].function.arguments == '{"city": "Paris"}'
        [call] = bound.message.tool_calls
        assert json.loads(call.function.arguments)["city"] in ("Bern", "Rom")
        assert ask(client, tools=[strict], tool_choice="none").choices[0].message.content == text
    for before in ("", "\n", " <|python_tag|>\t"):
        said = saying(before + LLAMA_CALL.replace("Rom", "Paris"))
        with serving(said, LLAMA_3) as running, running.client() as client:
            for call in ask(client, tools=[strict]).choices[0].message.tool_calls or ():
                assert json.loads(call.function.arguments)["city"] in ("Bern", "Rom")
    for text in ("\nHello {", "", "\xa0{"):
        with serving(saying(text), LLAMA_3) as running, running.client() as client:
            assert ask(client, tools=[strict]).choices[0].message.content == text


@pytest.mark.parametrize("template", [QWEN, LLAMA_3])
def test_a_grammar_constrains_answers_beside_calls(template):
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    named = {"name": "n", "schema": schema | {"additionalProperties": False}, "strict": True}
    form = {"response_format": {"type": "json_schema", "json_schema": named}}
    call = tagged(CALL) if template == QWEN else LLAMA_CALL
    for text in (call, '{"n": 7}'):
        with serving(saying(text), template) as running, running.client() as client:
            [free] = ask(client, **form).choices
            more = {"tool_choice": "required", "parallel_tool_calls": False} | form
            forced = ask(client, **more).choices[0].message.tool_calls
        assert forced[0].function.name in ("weather", "time")
        if text == call and template == QWEN:
            assert free.message.tool_calls[0].function.name == "weather"
        else:
            assert json.loads(free.message.content)["n"] in (1, 2)


STRICT = function("weather", PARAMETERS, strict=True)


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("more", [{}, {"parallel_tool_calls": False}, {"tools": [STRICT]}])
def test_a_call_in_a_thought_is_content(more, opened):
    """This holds whether the model or the prompt opens the thought; whole, streamed and as a response."""
    call = '{"name": "weather", "arguments": {"city": "Bern"}}'
    template = QWEN + "<think>" * opened
    draft = "<think>" * (not opened) + f"\n{tagged(call)}\n</think>"
    said = saying(draft + "\n\n" + tagged(call), mark="<assistant>" + "<think>" * opened)
    with serving(said, template) as running:
        with running.client() as client:
            tools = more.get("tools", [WEATHER, TIME])
            [choice] = ask(client, **more).choices
            assert choice.message.content == draft
            [called] = choice.message.tool_calls
            assert called.function.arguments == '{"city": "Bern"}'
            deltas = [chunk.choices[0].delta for chunk in ask(client, stream=True, **more)]
            assert "".join(delta.content or "" for delta in deltas) == draft
            calls = [call for delta in deltas for call in delta.tool_calls or ()]
            assert len([call for call in calls if call.id]) == 1
            flat = [{"type": "function"} | tool["function"] for tool in tools]
            answer = client.responses.create(
                model="scripted", input="?", temperature=0, **more | {"tools": flat}
            )
            assert [item.type for item in answer.output] == ["message", "function_call"]
            # What is held to calls has no thought before them.
            forced = ask(client, tool_choice="required", **more)
            assert forced.choices[0].message.tool_calls


def test_a_strict_call_after_a_thought_fits():
    said = f"<think>{LLAMA_CALL}</think>\n" + LLAMA_CALL.replace("Rom", "Paris")
    with serving(saying(said), LLAMA_3) as running, running.client() as client:
        message = ask(client, tools=[STRICT]).choices[0].message
    assert message.content == f"<think>{LLAMA_CALL}</think>"
    assert json.loads(message.tool_calls[0].function.arguments)["city"] in ("Bern", "Rom")


def test_an_answer_that_is_continued_in_its_thought_has_no_call_there():
    begun = {"role": "assistant", "content": "<think>draft:"}
    with serving(saying(tagged(CALL) + "</think>" + tagged(OTHER))) as running:
        with running.client() as client:
            [call] = ask(client, messages=[*QUESTION, begun]).choices[0].message.tool_calls
    assert call.function.name == "time"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"tool_choice": "required", "tools": None}, "needs tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "not one of the tools"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "x"}}}, "none, auto, required or"),
        ({"tools": [TIME, TIME]}, "same name"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "name"),
        (
            {"tool_choice": "required", "extra_body": {"grammar": 'root ::= "a"'}},
            "or a grammar, not both",
        ),
        (
            {
                **{"tool_choice": "required", "response_format": {"type": "text"}},
                "extra_body": {"grammar": 'root ::= "a"'},
            },
            "or a grammar, not both",
        ),
        ({"tools": [TIME, function("f", [])]}, "tools.1.function.parameters: Input should be"),
    ],
)
def test_contradicting_parameters_are_refused(more, message):
    with serving(saying("x")) as running, running.client() as client:
        with pytest.raises(openai.BadRequestError, match=message):
            ask(client, **more)


@pytest.mark.parametrize("template", [QWEN, LLAMA_3])
def test_only_a_binding_schema_is_refused_and_names_its_tool(template):
    nested = {"type": "object"}
    for _ in range(80):
        nested = {"type": "object", "properties": {"a": nested}}
    strict = function("s", PARAMETERS, strict=True)
    with serving(saying("x"), template) as running, running.client() as client:
        for schema, name in (
            ({"type": "string", "pattern": "(?=a)"}, "tool f: "),
            ({"type": "no // tool s\n ^"}, "tool f: "),
            ({"$ref": "#/nowhere"}, "tool f: "),
            (nested, "recursion limit exceeded"),
        ):
            for more in (
                {"tools": [strict, function("f", schema, strict=True)]},
                {"tools": [strict, function("f", schema)], "tool_choice": "required"},
            ):
                for _ in range(2):  # a refusal is remembered
                    with pytest.raises(openai.BadRequestError, match=name):
                        ask(client, **more)
            for more in ({}, {"parallel_tool_calls": False}):
                for tools in ([function("f", schema)], [strict, function("f", schema)]):
                    assert ask(client, tools=tools, **more).choices[0].message.content == "x"


def test_templates_without_tools_refuse_them():
    with serving(saying("x"), "{{ messages }}<assistant>") as running, running.client() as client:
        with pytest.raises(openai.BadRequestError, match="supports no tools"):
            ask(client)
        assert ask(client, tool_choice="none").choices[0].message.content == "x"
