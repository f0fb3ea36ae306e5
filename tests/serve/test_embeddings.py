# SPDX-License-Identifier: Apache-2.0
"""/v1/embeddings through the real `openai` client: pooled states of transformers, of unit length."""

import json

import numpy as np
import openai
import pytest
import torch

from packed_models import load_reference, make_packed
from scripted_engine import ScriptedEngine, greedy, logits_after
from serving_thread import byte_tokenizer, server
from sparse_bitnet.errors import UserError
from sparse_bitnet.export.pack_checkpoint import pack_checkpoint
from sparse_bitnet.generation.pooling import read_pooling

VOCAB = 257
TOKENIZER = byte_tokenizer()
TEXTS = ["hello", "Grüße, 世界", "a longer text, which is computed in several slices " * 5]


def unit(vector):
    return vector / np.linalg.norm(vector)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_packed(
        tmp_path_factory.mktemp("embeds"), vocab_size=VOCAB, max_position_embeddings=512
    )


@pytest.fixture(scope="module")
def states(folder):
    """Return the hidden states of each text, float32 [tokens, hidden_size]."""
    model = load_reference(folder).base_model
    with torch.no_grad():
        tokens = [torch.tensor([TOKENIZER.encode(text)]) for text in TEXTS]
        return [model(given).last_hidden_state[0].numpy() for given in tokens]


def embed(client, given, **more):
    return client.embeddings.create(model="scripted", input=given, **more)


@pytest.mark.parametrize("pooling", ["lasttoken", "mean"])
def test_vectors_are_those_of_transformers(folder, states, pooling):
    pytest.importorskip("sparse_bitnet._cpu")
    from sparse_bitnet.engine.engine import Engine

    engine = Engine.load(folder, threads=1, kv_cache="float32", head="stored")
    expected = [unit(rows[-1] if pooling == "lasttoken" else rows.mean(0)) for rows in states]
    with server(engine, pooling=pooling, prefill_slice=5) as running, running.client() as client:
        # The client asks for base64 by itself.
        answer = embed(client, TEXTS)
        assert answer.model == "scripted"
        assert [entry.index for entry in answer.data] == [0, 1, 2]
        for entry, vector in zip(answer.data, expected, strict=True):
            np.testing.assert_allclose(entry.embedding, vector, atol=2e-3)
        count = sum(len(TOKENIZER.encode(text)) for text in TEXTS)
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (count, count)
        tokens = [TOKENIZER.encode(text) for text in TEXTS]
        for given in (tokens, TEXTS):
            same = embed(client, given, encoding_format="float")
            assert [e.embedding for e in same.data] == [e.embedding for e in answer.data]
        one = embed(client, tokens[1], dimensions=10).data[0].embedding
        np.testing.assert_allclose(one, unit(np.array(answer.data[1].embedding)[:10]), atol=1e-6)
        [entry] = client.models.list().data
        assert entry.embedding_pooling == pooling
    engine.close()


@pytest.fixture(scope="module")
def served():
    with server(ScriptedEngine(vocab_size=VOCAB), max_running=4, max_queue=2) as running:
        yield running


def test_many_texts_leave_room_for_a_chat(client):
    messages = [{"role": "user", "content": "go on"}]
    chat = {"model": "scripted", "messages": messages, "temperature": 0, "max_tokens": 40}
    texts = [f"text {number}" for number in range(50)]
    with client.chat.completions.create(stream=True, **chat) as stream:
        pieces = [next(stream)]
        entries = embed(client, texts).data
        pieces += list(stream)
    for text, entry in zip(texts, entries, strict=True):
        np.testing.assert_allclose(
            entry.embedding, unit(logits_after(TOKENIZER.encode(text), 8)), rtol=1e-5
        )
    prompt = TOKENIZER.encode("<user>go on<assistant>")
    expected = TOKENIZER.decode(greedy(prompt, 40, VOCAB))
    assert "".join(p.choices[0].delta.content or "" for p in pieces) == expected


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a" * 2000}, "more tokens than the context length"),
        ({"input": ["fine", [257]]}, "outside the vocabulary"),
        ({"input": ["fine", 3]}, "input"),
        ({}, "input is missing"),
        ({"input": "a", "dimensions": 9}, "dimensions 9: the model's vectors have 8"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "dimension": 4}, "did you mean dimensions?"),
    ],
)
def test_invalid_embedding_requests_are_one_line(served, body, says):
    with served.http() as http:
        answer = http.post("/v1/embeddings", json={"model": "scripted"} | body)
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400
    assert says in message
    assert "\n" not in message
    assert served.is_idle()


def test_a_failure_is_an_error_and_the_others_end():
    [mark] = TOKENIZER.encode("!")
    engine = ScriptedEngine(vocab_size=VOCAB, fails=lambda tokens: tokens[-1] == mark)
    with server(engine, max_running=4) as running, running.client() as own:
        with pytest.raises(openai.InternalServerError, match="the generation failed"):
            embed(own, ["a", "b", "c!", *["d"] * 20])
        assert running.is_idle()
        assert len(embed(own, "a").data) == 1


def test_pooling_is_that_of_sentence_transformers_files(tmp_path, folder):
    assert read_pooling(tmp_path) == "lasttoken"
    config = tmp_path / "1_Pooling" / "config.json"
    config.parent.mkdir()
    names = ("cls_token", "mean_tokens", "max_tokens", "weightedmean_tokens", "lasttoken")

    def write(*chosen):
        modes = {f"pooling_mode_{name}": name in chosen for name in names}
        config.write_text(json.dumps(modes | {"include_prompt": True}))

    for name, pooling in [("mean_tokens", "mean"), ("lasttoken", "lasttoken")]:
        write(name)
        assert read_pooling(tmp_path) == pooling
    for chosen in [("cls_token",), ("mean_tokens", "max_tokens"), ()]:
        write(*chosen)
        with pytest.raises(UserError, match="supported are lasttoken, mean"):
            read_pooling(tmp_path)
    write("mean_tokens")
    # Packed models keep it.
    trained = folder.parent / "trained"
    (trained / "1_Pooling").mkdir()
    (trained / "1_Pooling" / "config.json").write_bytes(config.read_bytes())
    pack_checkpoint(trained, tmp_path / "packed")
    assert read_pooling(tmp_path / "packed") == "mean"
    # And what follows it, which is refused there too.
    (trained / "2_Dense").mkdir()
    (trained / "2_Dense" / "config.json").write_text("{}")
    pack_checkpoint(trained, tmp_path / "with layers")
    for place in (trained, tmp_path / "with layers"):
        with pytest.raises(UserError, match="2_Dense follows the pooling"):
            read_pooling(place)
