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
from sparse_bitnet.serve import generations, replies
from sparse_bitnet.serve.answer import Lane

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


def test_a_lane_keeps_its_slots(monkeypatch):
    """Whoever waits for one leaves, is one too many, or waits too long."""
    monkeypatch.setattr("sparse_bitnet.serve.answer._LONGEST_WAIT", 0.05)
    may_end = threading.Event()

    class Client:
        is_gone = False

        async def is_disconnected(self):
            return self.is_gone

    async def main():
        lane, gone = Lane(1, 2), Client()
        gone.is_gone = True
        first = asyncio.create_task(lane.run(Client(), may_end.wait))
        await asyncio.sleep(0)
        left = asyncio.create_task(lane.run(Client(), list))
        await asyncio.sleep(0)
        left.cancel()
        waiting = [asyncio.create_task(lane.run(Client(), list)) for _ in range(3)]
        refused = await asyncio.gather(left, *waiting, return_exceptions=True)
        may_end.set()
        assert await first
        with pytest.raises(ClientDisconnect):
            await lane.run(gone, list)
        return refused, await lane.run(Client(), list)

    (left, *refused), after = asyncio.run(main())
    assert isinstance(left, asyncio.CancelledError)
    assert [(error.status, error.body["error"]["code"]) for error in refused] == [
        (429, "queue_full")
    ] * 3
    assert after == []


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
