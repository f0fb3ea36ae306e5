# SPDX-License-Identifier: Apache-2.0
"""Refused requests over plain HTTP: status, parameter and code of every error object."""

import json

import pytest

from scripted_engine import ScriptedEngine
from serving_thread import endless, server

VOCAB = 257


@pytest.fixture(scope="module")
def served():
    with server(ScriptedEngine(vocab_size=VOCAB), max_queue=60, max_running=8) as running:
        yield running


@pytest.mark.parametrize(
    ("status", "param", "code", "change"),
    [
        (404, "model", "model_not_found", {"model": "gpt-4"}),
        (400, "model", "missing_required_parameter", {"model": ...}),
        (400, "prompt", "missing_required_parameter", {"prompt": ...}),
        (400, "prompt", None, {"prompt": []}),
        (400, "prompt", None, {"prompt": [1, "a"]}),
        (400, "prompt", None, {"prompt": [VOCAB]}),
        (400, "prompt", None, {"prompt": [-1]}),
        (400, "prompt", None, {"prompt": [True]}),
        (400, "prompt", None, {"prompt": ["a"] * 129}),
        (400, None, "context_length_exceeded", {"prompt": "x" * 1024}),
        (400, "max_tokens", None, {"max_tokens": 0}),
        (400, "max_tokens", None, {"max_tokens": -2}),
        (400, "max_tokens", None, {"max_tokens": 1.5}),
        (400, "temperature", None, {"temperature": -1}),
        (400, "temperature", None, {"temperature": "0"}),
        (400, "temperature", None, {"temperature": float("nan")}),
        (400, "top_p", None, {"top_p": 2}),
        (400, "seed", None, {"seed": 2**64}),
        (400, "stop", None, {"stop": [""]}),
        (400, "n", None, {"n": 0}),
        (400, "n", None, {"n": 100}),
        (400, "n", None, {"prompt": ["a"] * 128, "n": 128}),
        (400, None, "context_length_exceeded", {"prompt": ["a", "x" * 900_000]}),
        (400, "frequency_penalty", None, {"frequency_penalty": 2.5}),
        (400, "presence_penalty", None, {"presence_penalty": "1"}),
        (400, "logit_bias", None, {"logit_bias": {"5": 101}}),
        (400, "logit_bias", None, {"logit_bias": {"a": 1}}),
        (400, "logit_bias", None, {"logit_bias": {str(VOCAB): 1}}),
        (400, "best_of", "unsupported_parameter", {"best_of": 4}),
        (400, "suffix", "unsupported_parameter", {"suffix": "end"}),
        (400, "temprature", "unknown_parameter", {"temprature": 1}),
        (400, "stream_options.a", "unknown_parameter", {"stream_options": {"a": 1}}),
    ],
)
def test_bad_requests_are_named(served, status, param, code, change):
    body = {"model": "scripted", "prompt": "x"} | change
    body = {name: value for name, value in body.items() if value is not ...}
    with served.http() as http:
        answer = http.post(
            "/v1/completions",
            content=json.dumps(body),
            headers={"Content-Type": "application/json"},
        )
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (status, param, code), error
    assert "\n" not in error["message"]
    assert ("did you mean temperature?" in error["message"]) == ("temprature" in change)


def test_an_empty_list_is_named(served):
    with served.http() as http:
        for path, name in (("completions", "prompt"), ("embeddings", "input")):
            answer = http.post(f"/v1/{path}", json={"model": "scripted", name: []})
            assert "at least 1 item" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_parameters_without_effect_are_accepted_and_named(served, stream):
    body = {
        "model": "scripted",
        "stream": stream,
        "metadata": {"a": 1},
        "user": None,
        "prediction": [],
        "store": True,
        "timings_per_token": True,
    }
    with served.http() as http:
        for path, own in (
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("/v1/responses", {"input": "x"}),
        ):
            answer = http.post(path, json=body | own)
            assert answer.status_code == 200
            named = "metadata, prediction, store, timings_per_token"
            assert answer.headers["X-Ignored-Parameters"] == named
            own["max_output_tokens" if "input" in own else "max_tokens"] = 2
            assert (
                "X-Ignored-Parameters"
                not in http.post(path, json={"model": "scripted"} | own).headers
            )


@pytest.mark.parametrize(
    ("path", "name", "own"),
    [
        ("completions", "max_tokens", {"prompt": "x"}),
        ("chat/completions", "max_tokens", {"messages": [{"role": "user", "content": "x"}]}),
        (
            "chat/completions",
            "max_completion_tokens",
            {"messages": [{"role": "user", "content": ""}]},
        ),
        ("responses", "max_output_tokens", {"input": "x"}),
    ],
)
def test_a_limit_above_the_room_is_cut_and_named(path, name, own):
    engine = ScriptedEngine(vocab_size=VOCAB, context_length=256, logits=endless)
    with server(engine) as running, running.http() as http:
        for limit in (1000, 10**30, 1e30, -1, 9.0):
            body = {"model": "scripted", "temperature": 0, name: limit} | own
            answer = http.post(f"/v1/{path}", json=body)
            named = "max_tokens" if name == "max_completion_tokens" else name
            assert answer.headers.get("X-Ignored-Parameters") == (named if limit > 256 else None)
            usage = answer.json()["usage"]
            generated = usage.get("output_tokens", usage.get("completion_tokens"))
            assert (generated == 9) if limit == 9 else (usage["total_tokens"] == 256)


def test_names_of_clients_fit_into_a_header(served):
    messages = [{"role": "user", "content": "x", "é\r\nSet-Cookie: a": 1, "k" * 1000: 1}]
    messages += [{"role": "assistant", "content": "x", f"k{i}": 1} for i in range(60)]
    body = {"model": "scripted", "messages": messages, "max_tokens": 1}
    with served.http() as http:
        answer = http.post("/v1/chat/completions", json=body)
    named = answer.headers["X-Ignored-Parameters"]
    assert answer.status_code == 200
    assert len(named) < 3000
    assert "set-cookie" not in answer.headers


def test_variables_reach_the_template():
    template = (
        "{{ messages[0].content }}{{ mood | default('') }}{{ reasoning_effort | default('') }}"
    )
    with (
        server(ScriptedEngine(vocab_size=VOCAB), template=template) as running,
        running.http() as http,
    ):

        def prompt_tokens(**more):
            body = {"model": "scripted", "messages": [{"role": "user", "content": "x"}]}
            return http.post("/v1/chat/completions", json=body | {"max_tokens": 1} | more).json()

        assert prompt_tokens()["usage"]["prompt_tokens"] == 1
        more = {"chat_template_kwargs": {"mood": "merry"}, "reasoning_effort": "low"}
        assert prompt_tokens(**more)["usage"]["prompt_tokens"] == 9
        for wrong in ({"messages": []}, {"mood": 1, "self": 2}, [1]):
            error = prompt_tokens(chat_template_kwargs=wrong)["error"]
            assert error["type"] == "invalid_request_error"
            assert "chat_template_kwargs" in error["message"]


def test_api_key_is_required():
    with server(ScriptedEngine(vocab_size=VOCAB), api_key="säcret") as running:
        with running.http() as http:
            for headers in (
                {},
                {"Authorization": "Bearer no"},
                {"Authorization": "säcret".encode()},
            ):
                for path in ("/v1/models", "/metrics"):
                    answer = http.get(path, headers=headers)
                    assert answer.status_code == 401
                    assert answer.json()["error"]["code"] == "invalid_api_key"
            assert http.post("/v1/completions", content=b"x").status_code == 401
            assert http.get("/health").status_code == 200
            right = {"Authorization": "Bearer säcret".encode()}
            assert http.get("/v1/models", headers=right).status_code == 200


def test_unknown_paths_and_methods_are_error_objects(served):
    with served.http() as http:
        for method, path, status in [
            ("POST", "/", 405),
            ("GET", "/v1/nothing", 404),
            ("GET", "/v1/completions", 405),
            ("DELETE", "/health", 405),
        ]:
            answer = http.request(method, path)
            assert answer.status_code == status
            assert answer.json()["error"]["type"] == "invalid_request_error"
