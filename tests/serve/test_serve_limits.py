# SPDX-License-Identifier: Apache-2.0
"""Behaviour under overload and at the end: full queues, large bodies, clients that leave, shutdown."""

import concurrent.futures
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest

from scripted_engine import ScriptedEngine
from serving_thread import application, endless, server
from sparse_bitnet.errors import UserError
from sparse_bitnet.serve import answer, generations
from sparse_bitnet.serve.http_server import listen, serve

VOCAB = 257
HERE = Path(__file__).parent


def slow(**options):
    return ScriptedEngine(vocab_size=VOCAB, delay=0.01, logits=endless, **options)


def start(client, prompt="x", count=900, **more):
    return client.completions.create(
        model="scripted", prompt=prompt, max_tokens=count, temperature=0, **more
    )


def first_piece(stream):
    for chunk in stream:
        if chunk.choices[0].text:
            return chunk
    raise AssertionError("no text")


def wait_for(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_full_queue_is_429_with_retry_after():
    with server(slow(), max_running=1, max_queue=1) as running, running.client() as client:
        streams = [start(client, stream=True)]
        wait_for(lambda: running.scheduler.load().running == 1)
        streams.append(start(client, stream=True))
        with pytest.raises(openai.RateLimitError) as refused:
            start(client)
        assert int(refused.value.response.headers["Retry-After"]) >= 1
        assert refused.value.code == "queue_full"
        for stream in streams:
            stream.close()
        assert running.is_idle()
        assert start(client, count=2).choices[0].finish_reason == "length"
        # A client that tries again by itself gets through when there is room.
        streams = [start(client, count=80, stream=True) for _ in range(2)]
        with running.client(max_retries=5) as patient:
            assert start(patient, count=2).usage.completion_tokens == 2


@pytest.mark.parametrize("kind", ["stream", "whole", "waiting"])
def test_client_that_leaves_ends_its_generation(kind, monkeypatch):
    monkeypatch.setattr(answer, "KEEP_ALIVE_SECONDS", 0.1)
    with server(slow(), max_running=1) as running, running.client() as client:
        other = first = None
        if kind == "waiting":
            other = start(client, stream=True)
            wait_for(lambda: running.scheduler.load().running == 1)
        if kind == "stream":
            first = start(client, stream=True)
            first_piece(first)
            first.close()
        else:
            with running.client(timeout=0.2) as impatient:
                with pytest.raises(openai.APITimeoutError):
                    start(impatient)
        if other is not None:
            wait_for(lambda: running.scheduler.load().waiting == 0)
            assert running.scheduler.load().running == 1
            other.close()
        assert running.is_idle(2), "900 tokens would take nine seconds"
        with running.http() as http:
            assert 'requests_total{outcome="cancelled"} ' in http.get("/metrics").text


def raw_request(running, head, body=b"", read=True):
    """Send raw bytes; return the status of the answer."""
    with running.connect() as connection:
        connection.sendall(head.replace(b"\n", b"\r\n") + b"\r\n\r\n" + body)
        if not read:
            return None
        return int(connection.makefile("rb").readline().split()[1])


def test_bodies_above_the_limit_are_refused_while_reading():
    engine = ScriptedEngine(vocab_size=VOCAB)
    with server(engine, max_body_bytes=1000) as running, running.http() as http:
        head = b"POST /v1/completions HTTP/1.1\nHost: localhost\nContent-Type: application/json\n"
        assert raw_request(running, head + b"Content-Length: 1001", b" " * 1001) == 413
        # Chunks that never end: refused when the limit is passed, not when they stop.
        chunks = head + b"Transfer-Encoding: chunked"
        assert raw_request(running, chunks, (b"190\r\n" + b" " * 400 + b"\r\n") * 3) == 413
        answer = http.post("/v1/completions", json={"prompt": "x" * 2000})
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"
        fits = {"model": "scripted", "prompt": "x" * 900, "max_tokens": 1}
        assert http.post("/v1/completions", json=fits).status_code == 200
        # A client that leaves in the middle of its body.
        raw_request(running, head + b"Content-Length: 900", b"{", read=False)
        assert http.post("/v1/completions", content=b"{}").status_code == 415
        assert http.get("/health").status_code == 200


def test_body_that_does_not_arrive_is_given_up(monkeypatch):
    monkeypatch.setattr("sparse_bitnet.serve.app._BODY_SECONDS", 0.2)
    with server(ScriptedEngine(vocab_size=VOCAB)) as running:
        head = b"POST /v1/completions HTTP/1.1\nHost: localhost\nContent-Type: application/json\n"
        assert raw_request(running, head + b"Content-Length: 9", b"{") == 408


def test_failed_generation_is_an_error_for_its_client_alone():
    engine = ScriptedEngine(vocab_size=VOCAB, fails=lambda tokens: tokens[0] == ord("!") - 33)
    with server(engine) as running, running.client() as client:
        with concurrent.futures.ThreadPoolExecutor(9) as pool:
            good = [pool.submit(start, client, f"good {i}", 50) for i in range(8)]
            with pytest.raises(openai.InternalServerError, match="generation failed"):
                start(client, "!", 5)
            assert all(future.result().choices for future in good)
        with pytest.raises(openai.APIError, match="generation failed"):
            list(start(client, "!", 5, stream=True))
        assert start(client, "fine", 3).choices


def test_taken_port_and_unknown_host_are_errors_of_the_user():
    with listen("127.0.0.1", 0) as bound:
        assert bound.proto == socket.IPPROTO_TCP, "asyncio would wait before it sends an event"
        with pytest.raises(UserError, match="--port"):
            listen("127.0.0.1", bound.getsockname()[1])
    for host, port in (("no such host", 0), ("127.0.0.1", 70_000)):
        with pytest.raises(UserError, match=f"--host {host} --port {port}"):
            listen(host, port)


SCRIPT = """
import sys
sys.path[:0] = [sys.argv[1], f"{sys.argv[1]}/.."]
from test_serve_limits import serve_in_this_process
serve_in_this_process(grace=float(sys.argv[2]))
"""


def serve_in_this_process(grace):
    """Serve in a child process, whose main thread gets the signals."""
    engine, bound = slow(), listen("127.0.0.1", 0)
    app, scheduler, _ = application(engine, template=None, max_running=1)
    print(bound.getsockname()[1], flush=True)
    serve(app, scheduler, bound, grace)
    assert engine.sequences == []
    print("ended in order", flush=True)


@contextmanager
def child(grace):
    """A process that serves."""
    command = [sys.executable, "-c", SCRIPT, str(HERE), str(grace)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process, f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


@pytest.mark.parametrize(("signals", "grace"), [([signal.SIGTERM], 0), ([signal.SIGINT] * 2, 60)])
def test_shutdown_ends_streams_with_an_event_and_exit_code_0(signals, grace):
    with child(grace) as (process, url):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0, timeout=120)
        stream = start(client, stream=True)
        first_piece(stream)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            waiting = pool.submit(start, client)
            wait_for(lambda: httpx.get(f"{url}/health").json()["waiting"] == 1)
            for number in signals:
                os.kill(process.pid, number)
                time.sleep(0.3)
            with pytest.raises(openai.APIError, match="shutting down"):
                list(stream)
            with pytest.raises(openai.APIStatusError, match="shutting down") as refused:
                waiting.result()
            assert refused.value.status_code == 503
        output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert output == "ended in order\n"
    assert "Traceback" not in errors


def test_shutdown_lets_running_generations_end_within_the_grace_time():
    with child(60) as (process, url):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0, timeout=120)
        stream = start(client, count=60, stream=True)
        first_piece(stream)
        process.terminate()
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
        process.communicate(timeout=120)
    assert process.returncode == 0


def test_a_stream_that_waits_is_kept_alive(monkeypatch):
    monkeypatch.setattr(answer, "KEEP_ALIVE_SECONDS", 0.001)
    with server(slow()) as running:
        lines = post(running, prompt="x", max_tokens=5, stream=True).text.split("\n\n")
    assert ": keep-alive" in lines
    assert lines[-2] == "data: [DONE]"


def post(running, **fields):
    with running.http() as http:
        return http.post("/v1/completions", json={"model": "scripted", "temperature": 0} | fields)


def test_too_many_log_probabilities_are_refused(monkeypatch):
    monkeypatch.setattr(generations, "_MOST_LOGPROBS", 200)
    fields = {"echo": True, "logprobs": 1, "n": 2, "max_tokens": 10}
    with server(ScriptedEngine(vocab_size=VOCAB)) as running:
        assert post(running, prompt="a" * 40, **fields).status_code == 200
        refused = post(running, prompt="a" * 41, **fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprobs")


def test_large_answers_are_the_same_whole_and_streamed():
    fields = {"prompt": [f"{i}" * 900 for i in range(9)], "echo": True, "logprobs": 20}
    with server(ScriptedEngine(vocab_size=VOCAB)) as running:
        whole = post(running, max_tokens=100, **fields)
        text = post(running, max_tokens=100, stream=True, **fields).text
    assert "content-length" not in whole.headers, "written as it is sent"
    events = [json.loads(line[6:]) for line in text.split("\n\n")[:-2]]
    assert max(len(event["choices"][0]["text"]) for event in events) <= 900
    choices = [event["choices"][0] for event in events]
    for choice in whole.json()["choices"]:
        parts = [part for part in choices if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for name, values in choice["logprobs"].items():
            pieces = [part["logprobs"][name] or [] for part in parts if part["logprobs"]]
            assert [value for piece in pieces for value in piece] == values, name
