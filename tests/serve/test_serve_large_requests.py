# SPDX-License-Identifier: Apache-2.0
"""One request, however large, holds nothing up: what is too much is refused before anything is built of
it, and what is allowed is built and written in small pieces, beside the event loop."""

import asyncio
import json
import threading

import httpx
import pytest
from starlette.requests import ClientDisconnect

from scripted_engine import ScriptedEngine
from serving_thread import server
from sparse_bitnet.generation.text import TextTokenizer
from sparse_bitnet.serve import generations
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


def test_large_answers_are_the_same_whole_and_streamed(served):
    fields = {"prompt": [f"{i}" * 900 for i in range(9)], "echo": True, "logprobs": 20}
    fields |= {"max_tokens": 100, "temperature": 0}
    whole = post(served, **fields)
    assert "content-length" not in whole.headers, "written as it is sent"
    text = post(served, stream=True, **fields).text
    events = [json.loads(line[6:]) for line in text.split("\n\n")[:-2]]
    assert max(len(event["choices"][0]["text"]) for event in events) <= 900
    choices = [event["choices"][0] for event in events]
    for choice in whole.json()["choices"]:
        parts = [part for part in choices if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for name, values in choice["logprobs"].items():
            pieces = [part["logprobs"][name] or [] for part in parts if part["logprobs"]]
            assert [value for piece in pieces for value in piece] == values, name
