# SPDX-License-Identifier: Apache-2.0
"""Connections over real sockets: which hosts and origins may connect, and for how long."""

from contextlib import suppress

import httpx
import pytest
from starlette.datastructures import Headers

from scripted_engine import ScriptedEngine
from serving_thread import server
from sparse_bitnet.errors import UserError
from sparse_bitnet.serve import http_server
from sparse_bitnet.serve.api_error import ApiError
from sparse_bitnet.serve.http_server import AllowedHosts

VOCAB = 257


def headers(host, *origin):
    hosts = [(b"host", host.encode())] if host is not None else []
    return Headers(raw=hosts + [(b"origin", value.encode()) for value in origin])


@pytest.mark.parametrize(
    ("names", "allowed", "refused"),
    [
        (
            (),
            ["127.0.0.1", "10.0.0.6:8000", "localhost:1", "LOCALHOST.", "[::1]:8000", "[fe80::1]"],
            ["evil.example:8000", "127.0.0.1.evil.example", "", "::x", "a b", "[::", "8443"],
        ),
        (["Box.example", "fd00::1"], ["box.example", "BOX.example:1"], ["boxes", "x.box.example"]),
        (["*"], ["evil.example"], []),
    ],
)
def test_addresses_and_named_hosts_are_allowed(names, allowed, refused):
    hosts = AllowedHosts(names)
    for host in allowed:
        hosts.check(headers(host))
        hosts.check(headers(host, f"http://{host}"))
    for host in refused:
        with pytest.raises(ApiError, match="--allowed-host"):
            hosts.check(headers(host))
        with pytest.raises(ApiError, match="--cors-origin"):
            hosts.check(headers(allowed[0], f"http://{host}"))


def test_a_page_at_another_address_is_refused():
    hosts = AllowedHosts()
    for origin in ("http://10.0.0.6:9", "http://localhost:3000"):
        hosts.check(headers("10.0.0.6:8000", origin))
    with pytest.raises(ApiError, match=r"Origin 'http://6\.6\.6\.6'"):
        hosts.check(headers("10.0.0.6:8000", "http://6.6.6.6"))


@pytest.mark.parametrize("name", ["", "http://box", "a b", "[::1", "x@box"])
def test_invalid_host_names_are_refused(name):
    with pytest.raises(UserError, match="--allowed-host"):
        AllowedHosts([name])
    # Nor is an origin what no browser sends.
    known = ["https://Chat.example:8443/", "http://[::1]:80", "null", "*", "app://x"]
    assert "https://chat.example:8443" in AllowedHosts(origins=known).origins
    for origin in (name, f"https://{name}/page"):
        if origin != "http://box":
            with pytest.raises(UserError, match="write it as https://"):
                AllowedHosts(origins=[*known, origin])


def test_a_host_that_is_missing_or_doubled_is_refused():
    hosts = AllowedHosts()
    doubled = Headers(raw=headers("localhost").raw * 2)
    for given in (headers(None), doubled, headers("localhost", "null")):
        with pytest.raises(ApiError) as refused:
            hosts.check(given)
        assert refused.value.status == 403


def test_a_page_that_rebinds_its_name_reaches_nothing():
    with server(ScriptedEngine(vocab_size=VOCAB)) as running, running.http() as http:
        for path in ("/health", "/v1/models", "/metrics", "/nothing"):
            answer = http.get(path, headers={"Host": "evil.example"})
            assert answer.status_code == 403
            assert answer.json()["error"]["code"] == "host_not_allowed"
            answer = http.get(path, headers={"Origin": "http://evil.example"})
            assert answer.status_code == 403
        body = {"model": "scripted", "prompt": "x"}
        answer = http.post("/v1/completions", json=body, headers={"Host": "evil.example"})
        assert answer.status_code == 403
        assert running.engine.batches == []
        assert http.get("/health", headers={"Origin": running.url}).status_code == 200
        assert 'http_responses_total{path="/health",status="403"} 2.0' in http.get("/metrics").text


def test_half_requests_do_not_block_whole_ones(monkeypatch):
    """With room for thirty connections, 130 that send half a request, and then whole ones."""
    monkeypatch.setattr(http_server, "_MOST_CONNECTIONS", 30)
    with server(ScriptedEngine(vocab_size=VOCAB)) as running, running.http() as http:
        halves = [running.connect() for _ in range(130)]
        for number, connection in enumerate(halves):
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            body = b"Content-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
            with suppress(ConnectionError):
                connection.sendall(head + body if number % 2 else head)
        for _ in range(3):
            assert httpx.get(f"{running.url}/health", timeout=60).status_code == 200
        assert len(running.connections) <= 30
        # An answer that has begun is completed.
        body = {"model": "scripted", "prompt": "x", "max_tokens": 200, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            halves += [running.connect() for _ in range(60)]
            assert [*lines][-2] == "data: [DONE]"
        for connection in halves:
            connection.close()
