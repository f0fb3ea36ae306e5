# SPDX-License-Identifier: Apache-2.0
"""One request, however large, holds nothing up: what is too much is refused before anything is built of
it, and what is allowed is built and written in small pieces, beside the event loop."""

import asyncio
import json
import threading

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect

from scripted_engine import ScriptedEngine
from serving_thread import byte_tokenizer, server
from sparse_bitnet.data.tokenizer import train_tokenizer
from sparse_bitnet.generation.text import TextTokenizer
from sparse_bitnet.serve import generations, replies, schema
from sparse_bitnet.serve.answer import Turns
from sparse_bitnet.serve.api_error import ApiError

VOCAB = 257
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def served():
    with server(ScriptedEngine(vocab_size=VOCAB), max_queue=60, max_running=8) as running:
        with httpx.Client(base_url=f"{running.url}/v1", timeout=120, headers=JSON) as http:
            yield running, http


def post(served, path="/completions", **fields):
    return served[1].post(path, content=json.dumps({"model": "scripted"} | fields))


def test_a_prompt_that_is_too_long_is_not_tokenised(served, monkeypatch):
    sizes = []
    encode = TextTokenizer.encode

    def spy(self, text, **options):
        sizes.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(TextTokenizer, "encode", spy)
    long = "x" * 900_000
    for answer in (
        post(served, prompt=long),
        post(served, prompt=["a", long]),
        post(served, "/chat/completions", messages=[{"role": "user", "content": long}]),
    ):
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert max(sizes) < 8 * served[0].scheduler.capacity


def test_too_many_choices_are_refused_before_they_are_built(served, monkeypatch):
    def never(*arguments):
        raise AssertionError

    monkeypatch.setattr(generations, "GenerationRequest", never)
    monkeypatch.setattr(TextTokenizer, "encode", never)
    answer = post(served, prompt=["a"] * 128, n=128)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")


def test_too_many_log_probabilities_are_refused(served, monkeypatch):
    monkeypatch.setattr(generations, "_MOST_LOGPROBS", 200)
    fields = {"echo": True, "logprobs": 1, "n": 2, "max_tokens": 10}
    assert post(served, prompt="a" * 40, **fields).status_code == 200
    answer = post(served, prompt="a" * 41, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logprobs")


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":[' + b"1," * 200_001 + b"1]}",
        b'{"prompt":[' + b"[1]," * 20_000 + b"[1]]}",
        b'{"user":[' + b"{}," * 20_001 + b"1]}",
        b"{" + b",".join(b'"k%d":1' % i for i in range(20_001)) + b"}",
        b'{"messages":[' + b'{"role":"user","content":"a"},' * 5_000 + b"1]}",
        b"[" * 1_000_000,
        b'["\\""' * 100_000,
    ],
    ids=range(7),
)
def test_bodies_of_too_many_values_are_not_read(body, monkeypatch):
    monkeypatch.setattr(schema.ChatBody, "model_validate_json", lambda raw: pytest.fail("read"))
    with pytest.raises(ApiError, match=r"20,000 texts.* 200,000 numbers"):
        schema.parse_body(schema.ChatBody, body)


@pytest.mark.parametrize(
    "prompt",
    [
        "a, " * 300_000,
        '"' * 200_000,
        "\\" * 200_000,
        '\\"[{,' * 50_000 + "\\",
        [1] * 190_000,
        [[1, 2, 3]] * 128,
        "\n\u4e16{" * 100_000,
    ],
    ids=range(7),
)
@pytest.mark.parametrize("ascii_only", [True, False])
def test_texts_and_token_ids_are_no_values_by_what_is_in_them(prompt, ascii_only):
    raw = json.dumps({"model": "m", "prompt": prompt}, ensure_ascii=ascii_only).encode()
    assert schema.parse_body(schema.CompletionBody, raw).prompt == prompt


class Client:
    """A request whose client may have gone."""

    def __init__(self, gone=False):
        self.gone = gone

    async def is_disconnected(self):
        return self.gone


def test_turns_go_to_the_newest_whose_client_is_there():
    may_end, done = threading.Event(), []

    async def main():
        turns = Turns(1, 4)

        def ask(name, gone=False):
            return asyncio.create_task(turns.take(Client(gone), lambda: done.append(name)))

        first = asyncio.create_task(turns.take(Client(), may_end.wait))
        asked = [ask("a"), ask("b"), ask("gone", True), ask("c"), ask("too many")]
        await asyncio.sleep(0)
        may_end.set()
        return await asyncio.gather(first, *asked, return_exceptions=True)

    *_, gone, _, too_many = asyncio.run(main())
    assert done == ["c", "b", "a"]
    assert isinstance(gone, ClientDisconnect)
    assert (too_many.status, too_many.body["error"]["code"]) == (429, "queue_full")


def test_nobody_waits_for_a_turn_for_ever(monkeypatch):
    monkeypatch.setattr("sparse_bitnet.serve.answer._LONGEST_WAIT", 0.01)
    may_end = threading.Event()

    async def main():
        turns = Turns(1, 4)
        first = asyncio.create_task(turns.take(Client(), may_end.wait))
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as refused:
            await turns.take(Client(), list)
        may_end.set()
        await first
        return refused.value.status, await turns.take(Client(), list)

    assert asyncio.run(main()) == (429, [])


def test_outputs_that_have_gathered_come_in_many_events(served):
    """As after a pause of the reader, during which nothing is sent."""
    running, http = served
    send, running.scheduler.delivered = running.scheduler.delivered, lambda: None
    body = {"model": "scripted", "prompt": "x", "max_tokens": 900, "stream": True}
    body["logit_bias"] = {"256": -100}  # the end
    try:
        with http.stream("POST", "/completions", json=body) as answer:
            assert running.is_idle()
            send()
            lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
    finally:
        running.scheduler.delivered = send
    assert len(lines) > 9


def test_wide_vectors_are_written_one_by_one(monkeypatch):
    dumped, sizes = replies.dumped, []

    def spy(content):
        sizes.append(len(dumped(content)))
        return dumped(content)

    monkeypatch.setattr(replies, "dumped", spy)
    vectors = [[place / 7] * 3000 for place in range(9)]
    assert json.loads(b"".join(replies.json_blocks({"data": iter(vectors)}))) == {"data": vectors}
    assert max(sizes) < 2 * 3000 * 20


def test_answers_are_written_in_small_pieces_beside_the_event_loop(served, monkeypatch):
    """Whole, and as events; both say the same."""
    dumped, pieces = replies.dumped, []

    def spy(content):
        text = dumped(content)
        pieces.append((len(text), threading.current_thread()))
        return text

    monkeypatch.setattr(replies, "dumped", spy)
    fields = {"prompt": [f"{i}" * 900 for i in range(9)], "echo": True, "logprobs": 20}
    fields |= {"max_tokens": 100, "temperature": 0}
    whole = post(served, **fields)
    assert len(whole.content) > 4_000_000
    # A piece holds at most 64 tokens with 20 others each.
    assert max(size for size, _ in pieces) < 64 * 20 * 30
    assert {thread.name.partition("_")[0] for _, thread in pieces} <= {
        "asyncio",
        "AnyIO worker thread",
    }
    pieces.clear()
    text = post(served, stream=True, **fields).text
    assert max(size for size, _ in pieces) < 64 * 20 * 40
    events = [json.loads(line[6:]) for line in text.split("\n\n")[:-2]]
    choices = [event["choices"][0] for event in events]
    for choice in whole.json()["choices"]:
        parts = [part for part in choices if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for name, values in choice["logprobs"].items():
            found = [part["logprobs"][name] or [] for part in parts if part["logprobs"]]
            assert [value for some in found for value in some] == values, name


TEXTS = ["the sparse house is green and the network is sparse"] * 9
TOKENIZERS = {
    "bytes": byte_tokenizer(),
    "words": TextTokenizer(train_tokenizer(TEXTS, 400).backend_tokenizer),
}


@pytest.mark.parametrize("name", TOKENIZERS)
@given(
    text=st.one_of(
        st.text(max_size=300),
        st.builds(lambda part, n: part * n, st.text(max_size=9), st.integers(0, 3000)),
    ),
    most=st.integers(1, 900),
)
@settings(max_examples=150, deadline=None)
def test_a_text_is_too_long_exactly_when_its_tokens_are_too_many(name, text, most):
    tokens = TOKENIZERS[name].encode(text)
    assert TOKENIZERS[name].encode_within(text, most) == (tokens if len(tokens) <= most else None)
