# SPDX-License-Identifier: Apache-2.0
"""Features for operators: request ids, logs, CORS, token counts, clients that stop reading."""

import json
from unittest.mock import Mock

import pytest
from test_tools import QWEN
from tokenizers import Tokenizer, models, processors

from scripted_engine import ScriptedEngine
from serving_thread import END, byte_tokenizer, server

TOKENIZER = byte_tokenizer()
ORIGIN = "https://chat.example"


def engine(**options):
    return ScriptedEngine(vocab_size=300, **options)


def test_requests_have_ids():
    with server(engine()) as running, running.http() as http:
        ids = [http.get("/health").headers["X-Request-Id"] for _ in "ab"]
        assert len({*ids}) == 2
        for given, taken in (("a-1:b", True), ("x y", False), ("", False), ("é", False)):
            headers = {"X-Request-Id": given.encode()}
            answered = http.get("/v1/nothing", headers=headers).headers["X-Request-Id"]
            assert (answered == given) is taken


def test_log_has_no_prompts(capfd):
    with server(engine(), log_requests=True) as running, running.http() as http:
        body = {"model": "scripted", "prompt": "secret words", "max_tokens": 5, "temperature": 0}
        http.post("/v1/completions", json=body, headers={"X-Request-Id": "mine"})
        http.post("/v1/completions", json=body | {"stream": True})
        http.get("/secret")
        assert running.is_idle()
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert len(lines) == 3
    assert lines[0]["request_id"] == "mine"
    assert [(line["path"], line["status"]) for line in lines] == [
        ("/v1/completions", 200),
        ("/v1/completions", 200),
        ("other", 404),
    ]
    for line in lines[:2]:
        assert (line["prompt_tokens"], line["generated_tokens"]) == (12, 5)
    assert "secret" not in json.dumps(lines)


def test_other_origins_are_allowed_by_name():
    preflight = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
    preflight["Access-Control-Request-Headers"] = "authorization,content-type,x-stainless-lang"
    with server(engine(), cors_origins=(ORIGIN,)) as running, running.http() as http:
        answer = http.options("/v1/completions", headers=preflight)
        assert answer.status_code == 200
        assert answer.headers["Access-Control-Allow-Origin"] == ORIGIN
        body = {"model": "scripted", "prompt": "x", "max_tokens": 1}
        for more, status in (({"stream": True}, 200), ({"n": 0}, 400), ({"model": "a"}, 404)):
            answer = http.post("/v1/completions", json=body | more, headers={"Origin": ORIGIN})
            assert answer.status_code == status
            assert answer.headers["Access-Control-Allow-Origin"] == ORIGIN
        assert http.get("/v1/models", headers={"Origin": "https://x.example"}).status_code == 403
    with server(engine()) as running, running.http() as http:
        assert http.options("/v1/completions", headers=preflight).status_code == 403


def test_a_defect_is_an_error_object_that_is_counted_and_logged(monkeypatch, caplog):
    fails = Mock(side_effect=RuntimeError("secret"))
    monkeypatch.setattr("sparse_bitnet.serve.answer.parse_body", fails)
    with server(engine(), cors_origins=(ORIGIN,)) as running, running.http() as http:
        for _ in range(2):  # over one connection
            answer = http.post("/v1/completions", json={}, headers={"Origin": ORIGIN})
            assert answer.status_code == 500
            assert answer.json()["error"]["type"] == "server_error"
            assert "secret" not in answer.text
            assert {"x-request-id", "access-control-allow-origin"} <= {*answer.headers}
        counted = 'http_responses_total{path="/v1/completions",status="500"} 2.0'
        assert counted in http.get("/metrics").text
    assert caplog.records[0].exc_info[1].args == ("secret",)


def test_requests_after_stopping_get_retry_after():
    with server(engine()) as running, running.http() as http:
        running.scheduler.stop()
        body = {"model": "scripted", "prompt": "x"}
        for answer in (http.get("/health"), http.post("/v1/completions", json=body)):
            assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")


def test_lone_surrogates_are_refused():
    half = '{"a": "\\ud800"}'
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": half}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    with server(engine(), template=QWEN) as running, running.http() as http:
        body = {"model": "scripted", "messages": messages}
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400
        assert "surrogate" in answer.json()["error"]["message"]
    refusing = "{{ raise_exception(messages[0].tool_calls[0].function.arguments.a) }}"
    with server(engine(), template=refusing) as running, running.http() as http:
        assert http.post("/v1/chat/completions", json=body).status_code == 400


@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses"])
def test_a_tokenizer_that_fails_is_one_line_without_paths(path):
    broken = Tokenizer(models.WordLevel({"a": 0}, unk_token="?"))
    with server(engine()) as running, running.http() as http:
        running.model.tokenizer._tokenizer = broken
        body = {"model": "scripted", "prompt": "b", "input": "b"}
        body |= {"messages": [{"role": "user", "content": "b"}]}
        keys = {"completions": "prompt", "chat/completions": "messages", "responses": "input"}
        answer = http.post(f"/v1/{path}", json={key: body[key] for key in ("model", keys[path])})
    assert answer.status_code == 400
    said = answer.json()["error"]["message"]
    assert said.startswith("the model's tokenizer.json cannot encode this text: WordLevel error")
    assert "/" not in said


def test_texts_and_chats_are_tokenised():
    with server(engine(), template=QWEN) as running, running.http() as http:
        tokens = TOKENIZER.encode("é!")
        for body in ({"prompt": "é!"}, {"content": "é!", "add_special": False}):
            assert http.post("/tokenize", json=body).json() == {
                "tokens": tokens,
                "count": 3,
                "max_model_len": 1024,
            }
        own = running.model.tokenizer._tokenizer = Tokenizer.from_str(TOKENIZER._tokenizer.to_str())
        own.post_processor = processors.TemplateProcessing(
            single="<|end|> $0", special_tokens=[("<|end|>", END)]
        )
        more = [{}, {"add_special": True}, {"add_special_tokens": True}]
        bodies = ({"prompt": "a"}, *({"content": "a"} | each for each in more))
        counts = [http.post("/tokenize", json=body).json()["count"] for body in bodies]
        assert counts == [2, 1, 2, 2]
        messages = [{"role": "user", "content": "hi"}]
        chat = http.post("/tokenize", json={"model": "scripted", "messages": messages}).json()
        assert chat["tokens"] == TOKENIZER.encode("<user>hi[]<assistant>")
        text = http.post("/detokenize", json={"tokens": [*tokens, END]}).json()
        assert text == {"prompt": "é!<|end|>", "content": "é!<|end|>"}
        for path, body in (
            ("/tokenize", {}),
            ("/tokenize", {"prompt": "a", "content": "b"}),
            ("/tokenize", {"messages": [{"role": "x"}]}),
            ("/tokenize", {"prompt": "x" * 2000}),
            ("/detokenize", {"tokens": [300]}),
            ("/detokenize", {"tokens": ["a"]}),
        ):
            assert http.post(path, json=body).status_code == 400, body
        assert http.post("/tokenize", json={"model": "other", "prompt": "a"}).status_code == 404
