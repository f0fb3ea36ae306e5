# SPDX-License-Identifier: Apache-2.0
"""A conversation: the template's prompts, earlier turns from the cache, and what goes wrong in one."""

import shutil

import pytest

from small_models import CHAT_TEMPLATE, write_models
from sparse_bitnet.engine.engine_options import EngineOptions
from sparse_bitnet.errors import UserError
from sparse_bitnet.generation.conversation import ChatTemplate, Conversation
from sparse_bitnet.generation.open_model import open_model
from sparse_bitnet.generation.sampling_options import SamplingOptions

GREEDY = SamplingOptions(temperature=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("models"), chat_template=CHAT_TEMPLATE) / "trained"


@pytest.fixture(scope="module")
def model(folder):
    model = open_model(folder)
    yield model
    model.engine.close()


@pytest.fixture
def conversation(model):
    return Conversation(model, sampling=GREEDY, max_tokens=6, system="Few words.")


def ask(conversation, message):
    pieces = []
    result = conversation.answer(message, on_text=pieces.append)
    assert "".join(pieces) == result.text
    return result


def test_earlier_turns_are_part_of_the_prompt_and_not_computed_again(conversation, model):
    first = ask(conversation, "some words")
    second = ask(conversation, "and more")
    assert [message["role"] for message in conversation.messages] == [
        *("system", "user", "assistant", "user", "assistant")
    ]
    assert conversation.messages[2]["content"] == first.text
    prompt = ChatTemplate.load(model.folder).render(conversation.messages[:4])
    tokens = model.tokenizer.encode(prompt, add_special_tokens=False)
    assert second.prompt_tokens == len(tokens)
    assert second.cached_tokens >= first.prompt_tokens - 1


def test_reset_forgets_all_but_the_instructions(conversation):
    once = ask(conversation, "some words")
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": "Few words."}]
    again = ask(conversation, "some words")
    assert again.tokens == once.tokens
    assert again.cached_tokens == again.prompt_tokens - 1


def test_an_answer_that_ctrl_c_stops_stays_as_far_as_it_came(conversation):
    seen = []

    def interrupted(piece):
        seen.append(piece)
        if len(seen) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        conversation.answer("some words", on_text=interrupted)
    assert conversation.messages[-1] == {"role": "assistant", "content": "".join(seen)}
    ask(conversation, "more")


def test_answers_end_where_the_context_does(folder):
    model = open_model(folder, EngineOptions(context_length=40))
    conversation = Conversation(model, sampling=GREEDY, max_tokens=500)
    answer = ask(conversation, "w")
    assert answer.finish_reason == "length"
    assert len(answer.tokens) + answer.prompt_tokens == 40
    before = list(conversation.messages)
    with pytest.raises(UserError, match="the context has room for 40: start over, or write less"):
        ask(conversation, "too much")
    assert conversation.messages == before
    model.engine.close()


def test_a_run_has_the_template_of_its_final_model(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "final")
    (tmp_path / "config.json").write_text('{"sequence_length": 128}')
    model = open_model(tmp_path)
    ask(Conversation(model, max_tokens=6), "some words")
    model.engine.close()
