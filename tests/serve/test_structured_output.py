# SPDX-License-Identifier: Apache-2.0
"""Structured output, under the names of OpenAI, vLLM and llama.cpp."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from scripted_engine import ScriptedEngine, logits_after
from serving_thread import END, byte_tokenizer, server
from sparse_bitnet.generation.grammar import TokenGrammars

TOKENIZER = byte_tokenizer()
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}


def ending_soon(tokens, size):
    """Return logits that prefer tokens which end JSON values, so that outputs end."""
    logits = logits_after(tokens, size)
    logits[[*TOKENIZER.encode('"}'), END]] += 6
    logits[TOKENIZER.encode(" \n\t\r")] -= 30
    return logits


@pytest.fixture(scope="module")
def served():
    with server(ScriptedEngine(vocab_size=300, logits=ending_soon)) as running:
        yield running


def chat(client, **more):
    more = {"max_tokens": 300, "temperature": 0} | more
    messages = [{"role": "user", "content": "?"}]
    return client.chat.completions.create(model="scripted", messages=messages, **more)


def test_schema_holds_whole_and_streamed(client):
    answer = chat(client, response_format=FORMAT)
    assert answer.choices[0].finish_reason == "stop"
    assert set(json.loads(answer.choices[0].message.content)) == {"name", "age"}
    pieces = [
        chunk.choices[0].delta.content or ""
        for chunk in chat(client, response_format=FORMAT, stream=True)
    ]
    assert "".join(pieces) == answer.choices[0].message.content
    several = chat(client, response_format=FORMAT, n=3, temperature=1.5, seed=4)
    texts = [choice.message.content for choice in several.choices]
    assert len(set(texts)) == 3
    assert all(set(json.loads(text)) == {"name", "age"} for text in texts)


def test_output_is_parsed_by_the_openai_client(client):
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str
        age: int

    messages = [{"role": "user", "content": "?"}]
    answer = client.chat.completions.parse(
        model="scripted", messages=messages, response_format=Person, max_tokens=300, temperature=0
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


@pytest.mark.parametrize(
    "more",
    [
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"json_schema": SCHEMA},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"response_format": FORMAT, "json_schema": None, "grammar": ""},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "any"}}},
        {"structured_outputs": {"json_object": True}},
    ],
)
def test_every_name_of_a_schema_constrains_the_output(client, more):
    completion = client.completions.create(
        model="scripted", prompt="x", max_tokens=300, temperature=0, extra_body=more
    ).choices[0]
    answer = chat(client, extra_body=more).choices[0]
    for text, finish in (
        (answer.message.content, answer.finish_reason),
        (completion.text, completion.finish_reason),
    ):
        if "maxLength" in str(more):
            assert set(json.loads(text)) == {"name", "age"}
        elif finish == "stop":
            assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    ("more", "texts"),
    [
        ({"structured_outputs": {"regex": "a{3}"}}, {"aaa"}),
        ({"structured_outputs": {"choice": ["red", "green"]}}, {"red", "green"}),
        ({"grammar": 'start: "x" "y"'}, {"xy"}),
        ({"grammar": 'root ::= "x" "y"'}, {"xy"}),
        ({"structured_outputs": {"grammar": 'root ::= "xy"'}}, {"xy"}),
    ],
)
def test_every_name_of_other_grammars_constrains_the_output(client, more, texts):
    assert chat(client, extra_body=more).choices[0].message.content in texts


def test_slow_grammars_delay_no_other_requests(client, monkeypatch):
    """There are more slow grammars than the server has threads."""
    start, has_begun, may_end = TokenGrammars.start, threading.Event(), threading.Event()

    def slow(grammars, grammar):
        has_begun.set()
        may_end.wait()
        return start(grammars, grammar)

    known = chat(client, response_format=FORMAT)
    monkeypatch.setattr(TokenGrammars, "start", slow)
    with ThreadPoolExecutor(40) as pool:
        forms = [{"structured_outputs": {"regex": f"a{{{count}}}"}} for count in range(1, 41)]
        answers = [pool.submit(chat, client, extra_body=form) for form in forms]
        try:
            has_begun.wait()
            assert chat(client, max_tokens=3).choices
            assert chat(client, response_format=FORMAT).choices == known.choices
        finally:
            may_end.set()
        texts = [answer.result().choices[0].message.content for answer in answers]
    assert texts == ["a" * count for count in range(1, 41)]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"structured_outputs": {"regex": "(a"}}, "unclosed group"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "give one of"),
        ({"guided_regex": "a"}, "unknown parameter: guided_regex"),
        ({"grammar": "x = y"}, "neither Lark nor GBNF"),
        ({"structured_outputs": {"choice": []}}, "choice"),
        ({"structured_outputs": {"json": "{"}}, "JSON schema"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format: give"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structural_tag"),
        ({"response_format": {"type": "json_object", "schema": {"not": {}}}}, "not"),
        ({"json_schema": {"type": "string", "pattern": "(" * 5000}}, "grammar cannot be satisfied"),
        ({"json_schema": {"anyOf": [{"const": str(i)} for i in range(30000)]}}, "schema too large"),
    ],
)
def test_invalid_grammars_are_refused(client, more, message):
    with pytest.raises(openai.BadRequestError, match=message) as error:
        chat(client, extra_body=more)
    assert "\n" not in error.value.body["message"]
