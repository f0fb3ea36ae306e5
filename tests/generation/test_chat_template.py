"""Chats are rendered as transformers renders them, in a sandbox."""

import json

import pytest

from sparse_bitnet.data.tokenizer import load_tokenizer, train_tokenizer
from sparse_bitnet.errors import UserError
from sparse_bitnet.generation.chat_template import ChatTemplate

CHATML = """{%- for message in messages %}
    {%- if loop.first and message['role'] != 'system' %}
        {{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

EVERYTHING = """{{ bos_token }}{{ eos_token }}
{% if tools is not none %}
  {{ tools | tojson }}{{ tools[0] | tojson(indent=2) }}
{% endif %}
{% for message in messages %}
  {% if message.role == 'skip' %}{% continue %}{% endif %}
  {% generation %}{{ message.content }}{% endgeneration %}
{% endfor %}
{% set state = namespace(last='') %}{% for m in messages %}{% set state.last = m.role %}{% endfor %}
{{ state.last }}{{ extra | default('none') }}{{ strftime_now('%Y') }}
"""

CHATS = [
    [{"role": "user", "content": " Hello "}],
    [
        {"role": "system", "content": "Be <b>brief</b>."},
        {"role": "user", "content": "Ünïcödé & 中文"},
        {"role": "assistant", "content": "Yes."},
        {"role": "skip", "content": "never"},
        {"role": "user", "content": "More"},
    ],
]


@pytest.fixture(params=[CHATML, EVERYTHING], ids=["chatml", "everything"])
def folder(request, tmp_path):
    tokenizer = train_tokenizer(["text"], 260)
    tokenizer.chat_template = request.param
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("chat", CHATS, ids=["one", "many"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("tools", [None, [{"type": "function", "name": "ä<b>"}]])
def test_the_text_is_that_of_transformers(folder, chat, add_generation_prompt, tools):
    variables = {"tools": tools, "extra": "more"}
    expected = load_tokenizer(folder).apply_chat_template(
        chat, tokenize=False, add_generation_prompt=add_generation_prompt, **variables
    )
    template = ChatTemplate.load(folder)
    found = template.render(chat, add_generation_prompt=add_generation_prompt, **variables)
    assert found == expected
    assert found


def test_the_older_places_of_a_template(folder):
    source = (folder / "chat_template.jinja").read_text()
    expected = ChatTemplate.load(folder).render(CHATS[0])
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "chat_template.jinja").unlink()
    for form in (
        source,
        [{"name": "other", "template": "x"}, {"name": "default", "template": source}],
    ):
        config["chat_template"] = form
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        assert ChatTemplate.load(folder).render(CHATS[0]) == expected


def test_a_model_without_template_says_what_to_do(tmp_path):
    with pytest.raises(UserError, match=r"no chat template.*sparse-bitnet generate"):
        ChatTemplate.load(tmp_path)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[5].content + 1 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ 1 / 0 }}",
    ],
)
def test_refusals_and_attacks_are_one_line_errors(source):
    template = ChatTemplate(source)
    with pytest.raises(UserError, match="refuses this chat"):
        template.render(CHATS[0])


def test_a_syntax_error_names_its_line():
    with pytest.raises(UserError, match="line 2"):
        ChatTemplate("a\n{% if %}")


def test_only_plain_values_reach_the_template():
    class Rich(str):
        def dangerous(self):
            raise AssertionError

    chat = [{"role": Rich("user"), "content": Rich("hi"), "image": object()}]
    assert (
        ChatTemplate("{{ messages[0].content }}{{ messages[0].image }}").render(chat)
        == "hi<object>"
    )
    with pytest.raises(UserError, match="refuses"):
        ChatTemplate("{{ messages[0].content.dangerous() }}").render(chat)
