# SPDX-License-Identifier: Apache-2.0
"""The commands `generate` and `chat`: prompts from files and pipes, streaming, statistics, Ctrl-C."""

import io
import signal
import sys
from contextlib import nullcontext

import pytest

from small_models import write_models
from sparse_bitnet.checkpoint.load import from_pretrained, load_tokenizer
from sparse_bitnet.cli import generate
from sparse_bitnet.errors import UserError

TEMPLATE = "{% for message in messages %}{{ message.content }}:{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    models = write_models(tmp_path_factory.mktemp("models"), chat_template=TEMPLATE)
    return str(models / "trained")


GREEDY = ["--temperature", "0", "--max-tokens", "20"]


@pytest.fixture
def expected(folder):
    model, tokenizer = from_pretrained(folder), load_tokenizer(folder)
    prompt = tokenizer("some words", return_tensors="pt").input_ids
    tokens = model.generate(prompt, max_new_tokens=20, do_sample=False)[0]
    return tokenizer.decode(tokens, skip_special_tokens=True)


def test_generate_prints_the_text_of_transformers(folder, expected, capsys):
    generate.main([folder, "--prompt", "some words", *GREEDY])
    assert capsys.readouterr().out == expected + "\n"


def test_structured_output_fits_its_grammar(folder, capsys, tmp_path):
    rules = tmp_path / "rules.gbnf"
    rules.write_text('root ::= " (" [a-c] ")"')
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": [12, 12]}')
    for options, text in (
        (["--regex", " ab{2}!"], " abb!"),
        (["--json-schema", '{"const": [1]}'], "[1]"),
        (["--json-schema", str(schema)], "12"),
        (["--grammar-file", str(rules)], " ("),
    ):
        generate.main([folder, "--prompt", "x", "--temperature", "0", *options])
        output = capsys.readouterr().out
        output = output if "const" not in options[1] else output.replace(" ", "").replace("\n", "")
        assert output.startswith("x" + text)
        assert len(output) <= len("x" + text) + 3
    for options, message in (
        (["--regex", "a", "--json-schema", "{}"], "either --json-schema or --regex"),
        (["--json-schema", "{"], "JSON schema"),
        (["--json-schema", str(tmp_path / "none")], "--json-schema"),
        (["--regex", "("], "regex"),
    ):
        with pytest.raises(UserError, match=message):
            generate.main([folder, "--prompt", "x", *options])


@pytest.mark.parametrize("way", ["file", "pipe", "dash"])
def test_prompts_are_read_from_files_and_pipes(
    folder, expected, capsys, monkeypatch, tmp_path, way
):
    path = tmp_path / "prompt.txt"
    path.write_text("some words")
    monkeypatch.setattr(sys, "stdin", io.StringIO("some words"))
    options = {"file": ["--prompt-file", str(path)], "dash": ["--prompt-file", "-"], "pipe": []}
    generate.main([folder, *options[way], *GREEDY])
    assert capsys.readouterr().out == expected + "\n"


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_piped_bytes_that_are_no_text_are_one_line(folder, capsys, monkeypatch, errors):
    def pipe():
        piped = io.TextIOWrapper(io.BytesIO(b"some \xff words"), encoding="utf-8", errors=errors)
        monkeypatch.setattr(sys, "stdin", piped)

    pipe()
    with pytest.raises(UserError, match=r"decode|surrogate"):
        generate.main([folder, "--max-tokens", "1"])
    pipe()
    with pytest.raises(UserError, match="standard input") if errors == "strict" else nullcontext():
        generate.chat([folder, "--max-tokens", "1"])
    assert capsys.readouterr().out == ""


def test_an_empty_prompt_starts_a_text(folder, capsys):
    sampling = ["--temperature", "9", "--seed", "1", "--max-tokens", "5"]
    generate.main([folder, "--prompt", "", *sampling, "--stats"])
    output = capsys.readouterr()
    assert output.out.strip()
    assert "prompt 1 tokens" in output.err
    assert "generated 5 tokens" in output.err
    assert "tokens/s" in output.err
    assert output.err.strip().endswith("ended by length; engine transformers")


def test_stop_strings_and_sampling_are_options(folder, expected, capsys):
    stop = expected[-3:]
    generate.main([folder, "--prompt", "some words", *GREEDY, "--stop", stop, "never"])
    text = capsys.readouterr().out
    assert text == expected[: expected.index(stop, len("some words"))] + "\n"
    texts = []
    for seed in ("1", "1", "2"):
        options = ["--seed", seed, "--top-k", "50", "--min-p", "0.001", "--temperature", "2"]
        generate.main([folder, "--prompt", "some words", *options])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prompt", "a", "--prompt-file", "b"], "either --prompt or --prompt-file"),
        (["--prompt-file", "nowhere.txt"], "nowhere.txt"),
        (["--prompt", "a", "--top-p", "2"], "--top-p 2"),
        (["--prompt", "a", "--max-tokens", "0"], "--max-tokens 0: must be at least 1"),
        (["--prompt", "a", "--max-tokens", "5000"], "the context has room for 512"),
        (["--prompt", "a", "--engine", "cpu"], "pack it first"),
    ],
)
def test_invalid_requests_are_one_line(folder, options, words, capsys):
    with pytest.raises(UserError, match=words) as raised:
        generate.main([folder, *options])
    assert "\n" not in str(raised.value)
    assert not capsys.readouterr().out


def test_a_chat_continues_until_exit_or_end_of_input(folder, capsys, monkeypatch):
    lines = "some words\n\n/reset\nsome words\n/unknown\nmore\n/exit\nnever\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    generate.chat([folder, "--temperature", "0", "--max-tokens", "6", "--stats"])
    output = capsys.readouterr()
    answers = output.out.split(" [cut off: --max-tokens]\n")
    assert len(answers) == 4
    assert answers[0] == answers[1] != ""
    assert answers[3] == ""
    statistics, again, unknown, third = output.err.splitlines()
    assert "cached" not in statistics
    assert "cached" in again
    assert unknown.startswith("/unknown is unknown")
    assert "cached" in third


def test_a_chat_survives_a_failed_message(folder, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("word " * 5000 + "\nshort\n"))
    generate.chat([folder, "--max-tokens", "3"])
    output = capsys.readouterr()
    assert output.err.endswith("start over, or write less (/reset starts over)\n")
    assert output.err.count("\n") == 1
    assert output.out.strip()


def test_an_answer_that_the_context_cuts_off_says_so(folder, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("some words\n"))
    generate.chat([folder, "--max-tokens", "900", "--context-length", "40", "--temperature", "0"])
    assert capsys.readouterr().out.endswith(" [cut off: the context is full, /reset starts over]\n")


class Interrupting(io.StringIO):
    """Presses Ctrl-C when the first text is written to it."""

    is_pressed = False

    def write(self, text):
        if not self.is_pressed and text:
            self.is_pressed = True
            signal.raise_signal(signal.SIGINT)
        return super().write(text)


def test_ctrl_c_stops_the_answer_and_not_the_program(folder, monkeypatch):
    output = Interrupting()
    monkeypatch.setattr(sys, "stdin", io.StringIO("some words\nmore\n"))
    monkeypatch.setattr(sys, "stdout", output)
    signal.signal(signal.SIGINT, before := signal.default_int_handler)  # a background job has none
    generate.chat([folder, "--max-tokens", "30", "--temperature", "0"])
    first, second, rest = output.getvalue().split("]\n")
    assert first.endswith(" [stopped")
    assert len(first) < 20
    assert second.endswith(" [cut off: --max-tokens")
    assert rest == ""
    assert signal.getsignal(signal.SIGINT) is before
