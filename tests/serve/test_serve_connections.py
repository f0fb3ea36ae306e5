# SPDX-License-Identifier: Apache-2.0
"""Who may connect, as what, and for how long: raw requests over real sockets."""

import socket

import httpx
import pytest
from test_serve_limits import child, raw_request

from scripted_engine import ScriptedEngine
from serving_thread import server
from sparse_bitnet.errors import UserError
from sparse_bitnet.serve.api_error import ApiError
from sparse_bitnet.serve.entrance import AllowedHosts

VOCAB = 257


def request(host, *origin):
    headers = [(b"host", host.encode())] if host is not None else []
    return {"headers": headers + [(b"origin", value.encode()) for value in origin]}


@pytest.mark.parametrize(
    ("listening", "names", "allowed", "refused"),
    [
        (
            "127.0.0.1",
            (),
            ["127.0.0.1", "127.0.0.1:8000", "localhost:1", "LOCALHOST.", "[::1]:8000"],
            ["evil.example:8000", "127.0.0.1.evil.example", "10.0.0.1", "", "::x", "a b", "[::"],
        ),
        (
            "::1",
            ["Box.example:8443", "[fe80::1]:80", "fd00::1"],
            ["box.example", "BOX.example:1", "[FE80::1]", "[fd00::1]:9", "[::1]"],
            ["x@box.example", "box.example:1:1", "box.example/x", "8443", "[::2]", "boxes"],
        ),
        ("10.0.0.5", (), ["10.0.0.5:80"], ["localhost", "10.0.0.6", "evil.example"]),
        ("0.0.0.0", (), ["10.0.0.6", "[fe80::1]", "localhost"], ["evil.example"]),
        ("::", ["*"], ["evil.example"], []),
    ],
)
def test_hosts_are_those_of_the_address_and_those_named(listening, names, allowed, refused):
    hosts = AllowedHosts(listening, names)
    for host in allowed:
        hosts.check(request(host))
        hosts.check(request(host, f"http://{host}"))
    for host in refused:
        with pytest.raises(ApiError, match="--allowed-host"):
            hosts.check(request(host))
        with pytest.raises(ApiError, match="--allowed-host"):
            hosts.check(request(allowed[0], f"http://{host}"))


def test_a_page_at_another_number_is_a_strangers():
    hosts = AllowedHosts("0.0.0.0")
    for origin in ("http://10.0.0.6:9", "http://localhost:3000"):
        hosts.check(request("10.0.0.6:8000", origin))
    with pytest.raises(ApiError, match=r"Origin 'http://6\.6\.6\.6'"):
        hosts.check(request("10.0.0.6:8000", "http://6.6.6.6"))


@pytest.mark.parametrize("name", ["", "http://box", "a b", "[::1", "x@box"])
def test_names_that_are_none_are_refused(name):
    with pytest.raises(UserError, match="--allowed-host"):
        AllowedHosts("127.0.0.1", [name])
    # Nor is an origin what no browser sends.
    known = ["https://Chat.example:8443/", "http://[::1]:80", "null", "*", "app://x"]
    assert "https://chat.example:8443" in AllowedHosts("127.0.0.1", origins=known).origins
    for origin in (name, f"https://{name}/page"):
        if origin != "http://box":
            with pytest.raises(UserError, match="write it as https://"):
                AllowedHosts("127.0.0.1", origins=[*known, origin])


def test_a_host_that_is_missing_or_doubled_is_refused():
    hosts = AllowedHosts("127.0.0.1")
    doubled = {"headers": request("localhost")["headers"] * 2}
    for scope in (request(None), doubled, request("localhost", "null")):
        with pytest.raises(ApiError) as refused:
            hosts.check(scope)
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


def test_two_ends_of_one_body_are_refused():
    with server(ScriptedEngine(vocab_size=VOCAB)) as running:
        head = b"POST /v1/completions HTTP/1.1\nHost: localhost\nContent-Type: application/json\n"
        both = head + b"Content-Length: 5\nTransfer-Encoding: chunked"
        assert raw_request(running.url, both, b"0\r\n\r\n") == 400


def connect(url):
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=120)


def is_closed(connection):
    """Soon; what comes before is let pass."""
    try:
        while connection.recv(9999):
            pass
        return True
    except ConnectionError:
        return True


@pytest.mark.parametrize("sent", [b"", b"GET /hea", b"GET /health HTTP/1.1\r\nHost: localhost\r\n"])
def test_headers_that_do_not_end_are_given_up(monkeypatch, sent):
    monkeypatch.setattr("sparse_bitnet.serve.http_server._HEADER_SECONDS", 0.2)
    with server(ScriptedEngine(vocab_size=VOCAB)) as running:
        with connect(running.url) as connection:
            connection.sendall(sent)
            assert is_closed(connection)
        with connect(running.url) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert connection.recv(9999).startswith(b"HTTP/1.1 200")
            # One byte ends uvicorn's wait for the next request, not ours.
            connection.sendall(b"G")
            assert is_closed(connection)


def test_half_requests_never_keep_whole_ones_out():
    """With room for a hundred connections, 260 that send half a request, and then a whole one."""
    with child(0, files=200) as (process, url):
        halves = []
        for number in range(260):
            halves.append(connect(url))
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            body = b"Content-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
            try:
                halves[-1].sendall(head + body if number % 2 else head)
            except ConnectionError:
                pytest.fail("the newest is not the one to go")
        for _ in range(3):
            assert httpx.get(f"{url}/health", timeout=60).status_code == 200
        for connection in halves:
            connection.close()
        process.terminate()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert len(errors) < 2000, errors[:2000]
