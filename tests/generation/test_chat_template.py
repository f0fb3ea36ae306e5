# SPDX-License-Identifier: Apache-2.0
"""Chats are rendered as transformers renders them, in a sandbox."""

import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_bitnet.checkpoint.load import load_tokenizer
from sparse_bitnet.data.tokenizer import train_tokenizer
from sparse_bitnet.errors import UserError
from sparse_bitnet.generation.conversation import ChatTemplate

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
def test_rendered_chats_are_those_of_transformers(folder, chat, add_generation_prompt, tools):
    variables = {"tools": tools, "extra": "more"}
    expected = load_tokenizer(folder).apply_chat_template(
        chat, tokenize=False, add_generation_prompt=add_generation_prompt, **variables
    )
    template = ChatTemplate.load(folder)
    rendered = template.render(chat, add_generation_prompt=add_generation_prompt, **variables)
    assert rendered == expected
    assert rendered


def test_older_files_of_a_template_are_read(folder):
    source = (folder / "chat_template.jinja").read_text()
    expected = ChatTemplate.load(folder).render(CHATS[0])
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "chat_template.jinja").unlink()
    for form in (
        source,
        [{"name": "tool_use", "template": "x"}, {"name": "default", "template": source}],
    ):
        config["chat_template"] = form
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        assert ChatTemplate.load(folder).render(CHATS[0]) == expected
    assert ChatTemplate.load(folder).render(CHATS[0], tools=[]) == "x"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("y")
    assert ChatTemplate.load(folder).with_tools == "y"


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


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ 'a' * 10**9 }}", "[mM]emory"),
        ("{{ [0] * 10**9 }}", "[mM]emory"),
        ("{{ messages | tojson(indent=10**9) }}", "[mM]emory"),
        ("{{ 'a' | center(10**9) }}", "[mM]emory"),
        ("{{ '%1000000000d' % 1 }}", "[mM]emory"),
        ("{{ '{:1000000000}'.format(1) }}", "[mM]emory"),
        ("{% set n = namespace(x='ab') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
         "[mM]emory"),
        ("{{ lipsum(10**9) }}", "lipsum"),
        ("{% for i in range(10**5) %}{{ '%1000d' % i }}{% endfor %}", "16,777,216 characters"),
        ("{% for i in range(10**5) %}{% for i in range(10**5) %}{% endfor %}{% endfor %}", "long"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ (messages | length + 8) ** (9 ** 9) }}", "long"),
        ("{{ raise_exception('two\nlines') }}", "two lines"),
    ],
)  # fmt: skip
def test_time_and_memory_of_a_template_are_limited(source, words):
    """Only for the message that asks for it: the next one is answered as before."""
    template = ChatTemplate("{% if messages[0].attack %}" + source + "{% else %}fine{% endif %}")
    with pytest.raises(UserError, match=words) as refused:
        template.render([{"attack": True}])
    assert "\n" not in str(refused.value)
    assert template.render([{"attack": False}]) == "fine"


def test_an_interrupted_template_answers_no_later_request(monkeypatch):
    template = ChatTemplate("{{ messages[0].content }}")
    stdout = Mock(readline=Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(template._sandbox._process, "stdout", stdout)
    with pytest.raises(KeyboardInterrupt):
        template.render([{"content": "one"}])
    assert template.render([{"content": "two"}]) == "two"


def test_without_posix_a_clock_ends_a_template(monkeypatch):
    script = """
import signal, sys
sys.modules["resource"] = None
del signal.setitimer
from sparse_bitnet.generation import sandbox
sandbox.SECONDS["template"] = 0.4
sandbox.main("template")
"""
    start = subprocess.Popen
    words = [sys.executable, "-c", script]
    monkeypatch.setattr(subprocess, "Popen", lambda _, **options: start(words, **options))
    monkeypatch.delattr(signal, "SIGPROF")
    template = ChatTemplate(
        "{% if messages %}{{ (messages | length + 8) ** (9 ** 9) }}{% endif %}fine"
    )
    with pytest.raises(UserError, match="too long"):
        template.render([{}])
    assert template.render([]) == "fine"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff{{ 1 }}", "jinja is damaged"),
        (b"{{ " + b"(" * 5000 + b")" * 5000 + b" }}", "is damaged"),
        (b"{% if 1 %}" * 3000 + b"{% endif %}" * 3000, "is damaged"),
        (b"{{ 1 +" + b"+" * 200_000 + b"1 }}", "is damaged"),
        (b"a\n{% if %}", "line 2"),
        (b"", None),
    ],
    ids=range(6),
)
def test_a_damaged_template_is_one_line(tmp_path, content, words):
    (tmp_path / "chat_template.jinja").write_bytes(content)
    if words is None:
        assert ChatTemplate.load(tmp_path).render([]) == ""
        return
    with pytest.raises(UserError, match=words) as refused:
        ChatTemplate.load(tmp_path)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 1000


@given(
    st.recursive(
        st.one_of(st.none(), st.integers(), st.text(max_size=9), st.just("default")),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(st.sampled_from(["name", "template", "content", "x"]), inner),
        ),
        max_leaves=6,
    )
)
@settings(max_examples=60, deadline=None)
def test_any_json_as_a_template_is_read_or_refused_in_one_line(value):
    with tempfile.TemporaryDirectory() as name:
        config = {"chat_template": value, "eos_token": value}
        Path(name, "tokenizer_config.json").write_text(json.dumps(config))
        try:
            ChatTemplate.load(name)
        except UserError as error:
            assert "\n" not in str(error)  # noqa: PT017
