# SPDX-License-Identifier: Apache-2.0
"""Random and hostile requests and models: every answer is well-formed, and the server keeps running."""

import contextlib
import json
import os
import socket

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scripted_engine import ScriptedEngine, logits_after
from serving_thread import server

PATHS = ["/v1/completions", "/v1/chat/completions"]
JSON = {"Content-Type": "application/json"}
HUGE = 10**400
DAMAGED = "its weights are damaged"


def damaged_after(tokens, size):
    """Return logits that are sometimes NaN, as from damaged memory, or forbid most tokens."""
    logits = logits_after(tokens, size)
    match int(logits[0] * 1e4) % 97:
        case 0:
            logits[1] = np.nan
        case 1:
            logits[:] = -np.inf
        case 2:
            logits *= 3e36
        case 3:
            logits = np.where(logits > 0, np.inf, logits)
        case 4 | 5 | 6:
            logits[3:] = -np.inf
    return logits


@pytest.fixture(scope="module")
def served():
    engine = ScriptedEngine(vocab_size=257, context_length=64, logits=damaged_after)
    with server(engine, max_tokens=8, prefill_slice=5) as running:
        with httpx.Client(base_url=running.url, timeout=120) as http:
            yield running, http
            assert http.get("/health").json()["status"] == "ok"


# Valid, so that generations run, at the edges of what is allowed.
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
valid = {
    "stream": st.booleans(),
    "max_tokens": st.integers(0, 8),
    "n": st.integers(1, 5),
    "stop": st.one_of(st.text("ab�é", min_size=1, max_size=2), st.lists(text, max_size=3)),
    "temperature": st.one_of(
        st.floats(0, 100), st.sampled_from([1e-300, 5e-324, 0, 9e-5, 1e-4, 1, 100])
    ),
    "top_p": st.floats(0, 1),
    "top_k": st.one_of(st.integers(-1, 300), st.sampled_from([256, 257, 258, 2**31, HUGE])),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.one_of(st.floats(0.01, 100), st.sampled_from([0.01, 1, 100])),
    "frequency_penalty": st.floats(-2, 2),
    "presence_penalty": st.floats(-2, 2),
    "logit_bias": st.dictionaries(st.integers(0, 300).map(str), st.floats(-100, 100), max_size=3),
    "seed": st.integers(-(2**63), 2**64 - 1),
}
good_completions = st.fixed_dictionaries(
    {
        "model": st.just("scripted"),
        "prompt": st.one_of(
            text,
            st.lists(text, min_size=1, max_size=3),
            st.lists(st.integers(0, 256), min_size=1, max_size=64),
            st.lists(st.lists(st.integers(0, 256), min_size=1, max_size=9), min_size=1, max_size=3),
        ),
    },
    optional=valid
    | {
        "echo": st.booleans(),
        "logprobs": st.integers(0, 20),
        "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
    },
)
good_chats = st.fixed_dictionaries(
    {
        "model": st.just("scripted"),
        "messages": st.lists(
            st.fixed_dictionaries(
                {"role": st.sampled_from(["user", "system", "tool", "assistant"]), "content": text}
            ),
            min_size=1,
            max_size=3,
        ),
    },
    optional=valid | {"logprobs": st.just(True), "top_logprobs": st.integers(0, 20)},
)


def encoded(body):
    """Return JSON with values that JSON does not have: NaN, infinities, lone surrogates."""
    return json.dumps(body).encode("utf-8", "surrogatepass")


def strict(text):
    """JSON as clients in other languages read it, without NaN and infinities."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def check(answer):
    assert answer.status_code in (200, 400, 404, 413, 415, 429, 500), answer.text
    if answer.status_code == 200:
        if answer.headers["content-type"].startswith("text/event-stream"):
            *events, done, end = answer.text.split("\n\n")
            assert (done, end) == ("data: [DONE]", "")
            contents = [strict(event.removeprefix("data: ")) for event in events]
            errors = [event["error"] for event in contents if "error" in event]
            assert all(DAMAGED in error["message"] for error in errors)
        else:
            strict(answer.text)
        return
    error = strict(answer.text)["error"]
    if answer.status_code == 500:
        assert DAMAGED in error["message"], "a defect of the server's"
    assert set(error) == {"message", "type", "param", "code"}
    assert len(answer.content) < 2000


EXAMPLES = int(os.environ.get("SPARSE_BITNET_FUZZ", "150"))
"""Number of requests of each kind; 5000 take minutes."""

fuzz = settings(
    max_examples=EXAMPLES,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    deadline=None,
)


@fuzz
@given(bodies=st.tuples(good_completions, good_chats))
def test_random_valid_requests_are_answered(served, bodies):
    for path, body in zip(PATHS, bodies, strict=True):
        check(served[1].post(path, content=encoded(body), headers=JSON))


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        b'{"model":"scripted","prompt":' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"model":"scripted","prompt":"x","metadata":' + b"[" * 150 + b"]" * 150 + b"}",
        b'{"model":"scripted","prompt":"x","max_tokens":' + b"9" * 500_000 + b"}",
        b'{"model":"scripted","prompt":"x","temperature":1e' + b"9" * 5000 + b"}",
        b'{"model":"scripted","prompt":"x","temperature":NaN}',
        b'{"model":"scripted","prompt":"\\ud800"}',
        b'{"model":"scripted","prompt":"\xff\xfe"}',
        b'{"model":"' + b"m" * 900_000 + b'","prompt":"x"}',
        b'{"model":"scripted","prompt":["' + b'","' * 200_000 + b'"]}',
        b'{"model":"scripted","prompt":[' + b'"a",' * 200_000 + b"1]}",
        b'{"model":"scripted","prompt":[' + b"1," * 400_000 + b"1]}",
        b'{"model":"scripted","messages":[' + b"1," * 400_000 + b"1]}",
        b'{"' + b"k" * 900_000 + b'":1}',
        b"{" + b",".join(b'"k%d":1' % i for i in range(60_000)) + b"}",
        b'{"model":"scripted","prompt":"a","seed":1' + b"0" * 400 + b"}",
        b'{"model":"scripted","prompt":["' + b"a" * 1001 + b'"],"stop":"' + b"a" * 1001 + b'"}',
        b"",
        b"null",
        b"\x00",
    ],
    ids=range(21),
)
def test_hostile_bodies_are_error_objects(served, body):
    for path in PATHS:
        check(served[1].post(path, content=body, headers=JSON))


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: "
        b"chunked\r\n\r\nzz\r\n",
        b"GET /v1/models/" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /v1/models/%ff%00%0a HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nAuthorization: \xff\xfe\r\n\r\n",
        b"\r\n" * 1000,
    ],
    ids=range(8),
)
def test_broken_http_does_not_stop_the_server(served, sent):
    running, http = served
    with running.connect() as connection, contextlib.suppress(ConnectionError):  # reset if unread
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        assert b" 500 " not in connection.makefile("rb").read()[:20]
    assert http.get("/health").status_code == 200
