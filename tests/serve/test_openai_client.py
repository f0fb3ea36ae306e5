# SPDX-License-Identifier: Apache-2.0
"""The HTTP server as clients meet it: through the real `openai` client, over a real socket."""

import concurrent.futures
import json

import numpy as np
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from scripted_engine import ScriptedEngine, greedy, logits_after
from serving_thread import END, byte_tokenizer, endless, server

VOCAB = 257
IGNORED = "X-Ignored-Parameters"


def engine(**options):
    return ScriptedEngine(vocab_size=VOCAB, **options)


@pytest.fixture(scope="module")
def served():
    with server(engine(), max_queue=60, max_running=8) as running:
        yield running


TOKENIZER = byte_tokenizer()


def expected_tokens(prompt, count):
    """Up to and with the token that ends a text."""
    tokens = greedy(prompt, count, VOCAB)
    return tokens[: tokens.index(END) + 1] if END in tokens else tokens


def expected_text(prompt, count):
    return TOKENIZER.decode(expected_tokens(prompt, count))


def complete(client, prompt, count=12, **more):
    more = {"temperature": 0, "max_tokens": count} | more
    return client.completions.create(model="scripted", prompt=prompt, **more)


def chat(client, text="hello", count=12, **more):
    more = {"temperature": 0, "max_tokens": count} | more
    messages = more.pop("messages", [{"role": "user", "content": text}])
    return client.chat.completions.create(model="scripted", messages=messages, **more)


def test_completion_has_text_and_usage(client):
    prompt = "Grüße, 世界"
    answer = complete(client, prompt, 20)
    tokens = TOKENIZER.encode(prompt)
    assert answer.object == "text_completion"
    assert answer.model == "scripted"
    [choice] = answer.choices
    assert choice.text == expected_text(tokens, 20)
    assert choice.finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(tokens), 20)
    assert answer.usage.total_tokens == len(tokens) + 20


@pytest.mark.parametrize("limits", [{"context_length": 15}, {"max_tokens": 5}])
def test_max_tokens_defaults_to_the_room_in_the_context(client, limits):
    prompt = "0123456789"
    whole = client.completions.create(model="scripted", prompt=prompt, temperature=0)
    assert whole.choices[0].text == expected_text(TOKENIZER.encode(prompt), 16)
    options = {name: limits[name] for name in limits if name == "max_tokens"}
    short = engine(context_length=limits.get("context_length", 1024), logits=endless)
    with server(short, template="{{ messages[0].content }}", **options) as running:
        with running.client() as own:
            answers = [own.completions.create(model="scripted", prompt=prompt)]
            answers += [complete(own, prompt, limit) for limit in (5, 6, -1)]
            messages = [{"role": "user", "content": prompt}]
            answers += [own.chat.completions.create(model="scripted", messages=messages)]
    assert [answer.usage.completion_tokens for answer in answers] == [5] * 5
    assert {answer.choices[0].finish_reason for answer in answers} == {"length"}


def test_empty_prompt_starts_after_the_end_of_another_text(client):
    assert complete(client, "", 5).choices[0].text == expected_text([END], 5)


def test_prompts_may_be_texts_or_tokens(client):
    tokens = TOKENIZER.encode("abc")
    for prompt, texts in [
        ("abc", ["abc"]),
        (["abc", "d"], ["abc", "d"]),
        (tokens, ["abc"]),
        ([tokens, tokens[:2]], ["abc", "ab"]),
    ]:
        answer = complete(client, prompt, 5, n=2)
        assert [choice.index for choice in answer.choices] == list(range(2 * len(texts)))
        for choice in answer.choices:
            wanted = TOKENIZER.encode(texts[choice.index // 2])
            assert choice.text == expected_text(wanted, 5)
        assert answer.usage.prompt_tokens == sum(map(len, texts))
        generated = [expected_tokens(TOKENIZER.encode(text), 5) for text in texts]
        assert answer.usage.completion_tokens == 2 * sum(map(len, generated))


def test_usage_reports_cached_tokens(client):
    prompt = "~ begins no prompt of another test " * 3
    counts = [complete(client, prompt).usage.prompt_tokens_details.cached_tokens for _ in "ab"]
    assert counts == [0, len(prompt) - 1]


def test_streamed_completion_is_the_whole_one(client):
    whole = complete(client, "stream", 40)
    options = {"include_usage": True}
    chunks = list(complete(client, "stream", 40, stream=True, stream_options=options))
    *pieces, last = chunks
    assert "".join(chunk.choices[0].text for chunk in pieces) == whole.choices[0].text
    assert all(chunk.choices[0].text for chunk in pieces[:-1]), "no event says nothing"
    assert [chunk.choices[0].finish_reason for chunk in pieces][-1] == "length"
    assert all(chunk.usage is None for chunk in pieces)
    assert last.choices == []
    assert last.usage.completion_tokens == 40
    assert len({chunk.id for chunk in chunks}) == 1
    options["continuous_usage_stats"] = True
    chunks = list(complete(client, "stream", 40, stream=True, stream_options=options))
    tokens, text = expected_tokens(TOKENIZER.encode("stream"), 40), ""
    for chunk in chunks:
        text += "".join(choice.text for choice in chunk.choices)
        # An event can take several tokens; a character's first bytes wait for the others.
        assert TOKENIZER.decode(tokens[: chunk.usage.completion_tokens]).startswith(text)
    assert (text, chunks[-1].usage.completion_tokens) == (whole.choices[0].text, 40)


def test_chat_is_the_same_whole_and_streamed(client):
    messages = [
        {"role": "system", "content": "be brief"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}],
        },
    ]
    tokens = TOKENIZER.encode("<system>be brief<user>hello<assistant>")
    answer = chat(client, messages=messages, count=30)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == expected_text(tokens, 30)
    assert answer.usage.prompt_tokens == len(tokens)
    chunks = list(chat(client, messages=messages, count=30, stream=True))
    assert chunks[0].object == "chat.completion.chunk"
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == answer.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "length"


def test_end_tokens_and_stop_strings_end_the_text(client):
    prompt = next(
        text
        for text in map(str, range(10_000))
        if END in expected_tokens(TOKENIZER.encode(text), 60)
    )
    tokens = expected_tokens(TOKENIZER.encode(prompt), 60)
    answer = complete(client, prompt, 60)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text == TOKENIZER.decode(tokens)
    assert answer.usage.completion_tokens == len(tokens)
    whole = expected_text(TOKENIZER.encode("stop here"), 40)
    stop = next(whole[i : i + 2] for i in range(8, 38) if whole[i : i + 2].isascii())
    for streamed in (False, True):
        options = {"stop": ["never there", stop], "stream": streamed, "logprobs": 0}
        answer = complete(client, "stop here", 40, **options)
        choices = [chunk.choices[0] for chunk in answer] if streamed else answer.choices
        assert "".join(choice.text for choice in choices) == whole[: whole.index(stop)]
        offsets = [place for choice in choices for place in choice.logprobs.text_offset]
        assert offsets[-1] == whole.index(stop) - 1
        assert choices[-1].finish_reason == "stop"


def test_seed_decides_whatever_else_runs(client, served):
    options = {"temperature": 1.0, "seed": 11, "top_p": 0.9, "extra_body": {"top_k": 50}}
    alone = complete(client, "seeded", 30, **options).choices[0].text
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        others = [
            pool.submit(complete, client, f"other {i}", 30, temperature=1.0, seed=i)
            for i in range(8)
        ]
        same = [pool.submit(complete, client, "seeded", 30, **options) for _ in range(4)]
        assert {future.result().choices[0].text for future in same} == {alone}
        assert len({future.result().choices[0].text for future in others}) == 8
    assert complete(client, "seeded", 30, **options | {"seed": -1}).choices[0].text != alone
    two = complete(client, "seeded", 30, n=2, **options)
    assert two.choices[0].text == alone != two.choices[1].text
    unseeded = {complete(client, "seeded", 30, temperature=1.0).choices[0].text for _ in "ab"}
    assert len(unseeded) == 2


def test_completions_report_logprobs_and_echo(client):
    prompt = "Echo é"
    tokens = TOKENIZER.encode(prompt)
    answer = complete(client, prompt, 4, echo=True, logprobs=2)
    [choice] = answer.choices
    assert choice.text == prompt + expected_text(tokens, 4)
    scores = choice.logprobs
    assert scores.tokens[:5] == ["E", "c", "h", "o", " "]
    assert scores.tokens[5:7] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert scores.text_offset[:7] == [0, 1, 2, 3, 4, 5, 5]
    assert scores.text_offset[7] == 6
    assert scores.token_logprobs[0] is None
    logits = logits_after(tokens[:1], VOCAB).astype(float)
    wanted = logits[tokens[1]] - np.log(np.exp(logits).sum())
    assert scores.token_logprobs[1] == pytest.approx(wanted)
    assert len(scores.tokens) == len(tokens) + 4
    assert max(scores.top_logprobs[-1].values()) == pytest.approx(scores.token_logprobs[-1])
    scored = complete(client, prompt, 0, echo=True, logprobs=0)
    assert scored.choices[0].text == prompt
    assert scored.choices[0].logprobs.token_logprobs == scores.token_logprobs[: len(tokens)]
    assert scored.usage.completion_tokens == 0
    streamed = list(complete(client, prompt, 4, echo=True, logprobs=2, stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == choice.text
    pieces = [chunk.choices[0].logprobs for chunk in streamed if chunk.choices[0].logprobs]
    assert [value for piece in pieces for value in piece.token_logprobs] == scores.token_logprobs
    spelt = complete(client, "a<|end|>b", 0, echo=True, logprobs=0).choices[0]
    assert (spelt.text, spelt.logprobs.text_offset) == ("a<|end|>b", [0, 1, 8])
    plain = complete(client, prompt, 4, echo=True)
    assert (plain.choices[0].text, plain.choices[0].logprobs) == (choice.text, None)


def test_chats_report_logprobs(client):
    answer = chat(client, count=5, logprobs=True, top_logprobs=3)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == 5
    spelled = bytes(byte for entry in entries for byte in entry.bytes)
    assert spelled.decode(errors="replace") == answer.choices[0].message.content
    assert all(entry.top_logprobs[0].logprob == entry.logprob for entry in entries)
    assert {len(entry.top_logprobs) for entry in entries} == {3}


def test_models_health_and_metrics_are_served(client, served):
    assert [model.id for model in client.models.list()] == ["scripted"]
    assert client.models.retrieve("scripted").owned_by == "sparse-bitnet"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with served.http() as http:
        assert served.is_idle()
        assert http.get("/health").json() == {"status": "ok", "running": 0, "waiting": 0}

        def metrics():
            page = http.get("/metrics")
            assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
            return {
                (sample.name, *sorted(sample.labels.values())): sample.value
                for family in text_string_to_metric_families(page.text)
                for sample in family.samples
            }

        before = metrics()
        complete(client, "measured", 9)
        after = metrics()

    def grown(*name):
        name = (f"sparse_bitnet_{name[0]}", *name[1:])
        return after[name] - before.get(name, 0)

    assert grown("requests_total", "length") == 1
    assert grown("prompt_tokens_total") == len("measured")
    assert grown("generated_tokens_total") == 9
    assert grown("draft_tokens_total") == grown("accepted_tokens_total") == 0
    assert grown("time_to_first_token_seconds_count") == 1
    assert grown("time_per_token_seconds_count") == 8
    assert grown("http_responses_total", "/v1/completions", "200") == 1
    assert after[("sparse_bitnet_queue_length",)] == after[("sparse_bitnet_running",)] == 0
    assert 0 < after[("sparse_bitnet_cache_used_tokens",)] < after[("sparse_bitnet_cache_tokens",)]


def test_neutral_and_harmless_parameters_are_accepted(client):
    plain = complete(client, "neutral")
    options = {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "best_of": 1}
    full = complete(client, "neutral", user="me", suffix=None, stop=None, **options)
    assert full.choices == plain.choices
    chat(client, tools=[], tool_choice="none", response_format={"type": "text"}, store=False)
    chat(client, extra_body={"min_tokens": 0, "skip_special_tokens": True}, verbosity="medium")
    for name, value in {
        "functions": [{"name": "f"}],
        "verbosity": "low",
        "min_tokens": 2,
        "skip_special_tokens": False,
    }.items():
        with pytest.raises(openai.BadRequestError, match=f"{name} is not supported"):
            chat(client, extra_body={name: value})
    with pytest.raises(openai.BadRequestError, match="max_tokens is not supported"):
        chat(client, max_completion_tokens=4)
    part = {"type": "image_url", "image_url": {"url": "x"}}
    with pytest.raises(openai.BadRequestError, match="image_url"):
        chat(client, messages=[{"role": "user", "content": [part]}])


def test_history_with_tool_calls_reaches_the_template():
    template = "{{ messages | tojson }}"
    with server(engine(context_length=4096), template=template) as running:
        with running.client() as client:
            arguments = '{"city": "Zürich"}'
            call = {"id": "c1", "type": "function"}
            call["function"] = {"name": "weather", "arguments": arguments}
            empty = {"refusal": None, "annotations": [], "audio": None, "function_call": None}
            messages = [
                {"role": "developer", "content": [{"type": "text", "text": "brief"}]},
                {"role": "user", "content": "?"},
                {"role": "assistant", "content": None, "tool_calls": [call], **empty},
                {"role": "tool", "tool_call_id": "c1", "content": "rain"},
            ]
            parsed = call | {"function": {"name": "weather", "arguments": json.loads(arguments)}}
            seen = [
                {"role": "system", "content": "brief"},
                {"role": "user", "content": "?"},
                {"role": "assistant", "content": "", "tool_calls": [parsed]},
                {"role": "tool", "content": "rain", "tool_call_id": "c1"},
            ]
            answer = chat(client, messages=messages)
            assert answer.usage.prompt_tokens == len(json.dumps(seen, ensure_ascii=False).encode())
            # As clients dump what this or another server gave them, null or not.
            dumped = {"parsed": {}, "provider_specific_fields": {}, "reasoning": "r", "audio": {}}
            dumped |= {"thinking_blocks": [{}], "function_call": {}, "annotations": [1]}
            dumped["images"] = []
            for more in (dumped, dict.fromkeys(dumped)):
                call |= dict.fromkeys(more) | {"index": 0}
                thought = {"type": "thinking", "thinking": "t", **more}
                kept = {"type": "text", "text": "brief", "cache_control": {"type": "x"}, **more}
                old = [
                    {**messages[0], "content": [thought, kept], "tool_calls": None, **more},
                    {**messages[1], "reasoning_content": "x", "refusal": "x", **more},
                    {**messages[2], "tool_call_id": None, **more},
                    {**messages[3], "tool_calls": [], **more},
                ]
                raw = client.chat.completions.with_raw_response.create(
                    model="scripted", messages=old, temperature=0, max_tokens=12
                )
                assert raw.parse().usage.prompt_tokens == answer.usage.prompt_tokens
                named = {name.rpartition(".")[2] for name in raw.headers[IGNORED].split(", ")}
                given = {name for name, value in more.items() if value is not None}
                always = {"thinking", "cache_control", "index"}
                assert named == given | always
            call["function"]["arguments"] = "no JSON"
            chat(client, messages=messages)
            for wrong in (
                {"role": "user", "content": None},
                {"role": "user", "content": "x", "tool_call_id": "c1"},
                {"role": "user", "content": "x", "tool_calls": [call]},
                {"role": "user", "content": "x", "images": ["data:image/png;base64,"]},
                {"role": "user", "content": [{"type": "text"}]},
                {"role": "assistant", "tool_calls": [{"id": "x"}]},
            ):
                with pytest.raises(openai.BadRequestError, match="messages"):
                    chat(client, messages=[wrong])


@pytest.mark.parametrize("thought", ["", "<think>\n"])
def test_the_last_message_of_an_assistant_is_continued(thought):
    template = (
        "{% for m in messages %}<start>{{ m.role }}|{{ m.content | trim }}<end>{% endfor %}"
        "{% if add_generation_prompt %}<start>assistant|THOUGHT{% endif %}"
    ).replace("THOUGHT", thought)
    start, question = "<start>user|hi<end><start>assistant|", {"role": "user", "content": "hi"}

    def answer(client, content, **more):
        messages = [question, {"role": "assistant", "content": content}]
        return chat(client, messages=messages, extra_body=more)

    with server(engine(), template=template) as running, running.client() as client:
        for content, more in (
            (" Well, ", {}),
            ("end", {"continue_final_message": True, "add_generation_prompt": False}),
            ([{"type": "text", "text": "e"}], {}),
            (None, {}),
        ):
            continued = answer(client, content, **more)
            text = content if isinstance(content, str) else "" if content is None else "e"
            prompt = TOKENIZER.encode(start + text.lstrip())
            assert continued.usage.prompt_tokens == len(prompt)
            assert continued.choices[0].message.content == expected_text(prompt, 12)
        for more in ({"continue_final_message": False}, {"add_generation_prompt": True}):
            prompt = TOKENIZER.encode(f"{start}end<end><start>assistant|{thought}")
            assert answer(client, "end", **more).usage.prompt_tokens == len(prompt)
        with pytest.raises(openai.BadRequestError, match="at the end"):
            chat(client, extra_body={"continue_final_message": True})
        shown = chat(client, "hi", extra_body={"add_generation_prompt": False})
        assert shown.usage.prompt_tokens == len("<start>user|hi<end>")
        items = [question, {"role": "assistant", "content": "end"}]
        continued = client.responses.create(model="scripted", input=items)
        assert continued.usage.input_tokens == len(start + "end")
    with server(engine(), template="{{ messages[0].content }}") as running:
        with running.client() as client, pytest.raises(openai.BadRequestError, match="leaves the"):
            answer(client, "x")


def test_chat_without_a_template_is_refused():
    with server(engine(), template=None) as running, running.client() as client:
        with pytest.raises(openai.BadRequestError, match="no chat template"):
            chat(client)
        assert complete(client, "x").choices
    with server(engine(), template="{{ raise_exception('only questions') }}") as running:
        with running.client() as client, pytest.raises(openai.BadRequestError, match="only quest"):
            chat(client)
