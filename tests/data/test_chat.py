# SPDX-License-Identifier: Apache-2.0
"""Conversations: which tokens are learnt, and how conversations share windows."""

import copy
import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from small_models import ENDED_TEMPLATE as BY_PROMPTS
from small_models import conversation, write_conversations
from sparse_bitnet.checkpoint.load import load_tokenizer
from sparse_bitnet.cli.prepare import main
from sparse_bitnet.data.chat import BEGINS, IDS, LEARNT, encode, end_of_turn_tokens
from sparse_bitnet.data.loader import TokenLoader, Windows
from sparse_bitnet.data.preparation import prepare
from sparse_bitnet.data.shards import TokenDataset
from sparse_bitnet.data.sources import parse_source
from sparse_bitnet.data.tokenizer import train_tokenizer
from sparse_bitnet.errors import UserError

BY_MARKS = BY_PROMPTS.replace(
    "{{ m.content }}{{ eos_token }}",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}",
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    trained = train_tokenizer(iter(["one and two is three? <|user|><|assistant|>"] * 3), 300)
    trained.chat_template = BY_PROMPTS
    return trained


def learnt_text(tokenizer: Any, tokens: np.ndarray) -> str:
    return tokenizer.decode(tokens[tokens & LEARNT != 0] & IDS)


@pytest.mark.parametrize("template", [BY_PROMPTS, BY_MARKS], ids=["prompts", "marks"])
def test_assistant_words_are_learnt(tokenizer: Any, template: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    messages = conversation("one?", "öne!", "two?", "two and ö")
    tokens = encode(tokenizer, json.dumps(messages))
    end = tokenizer.eos_token
    assert learnt_text(tokenizer, tokens) == f"öne!{end}two and ö{end}"
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert (tokens & IDS).tolist() == tokenizer(rendered)["input_ids"]
    assert np.flatnonzero(tokens & BEGINS).tolist() == [0]


def pieces_learnt(tokenizer: Any, template: str, row: Any) -> list[str]:
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = template
    tokens = encode(tokenizer, json.dumps(row))
    begins = np.flatnonzero(tokens & BEGINS)[1:]
    return [learnt_text(tokenizer, part) for part in np.split(tokens, begins)]


ALWAYS_PROMPTS = BY_PROMPTS.replace("{% if add_generation_prompt %}", "{% if 1 %}")
WITHOUT_END = BY_MARKS.replace("}}{{ eos_token }}{% endg", "}}{% endg")
NO_HEADERS = (
    "{% for m in messages %}{{ m.role[0] }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
IN_A_MACRO = (
    "{% macro said(m) %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}\n  {%- generation -%}\n "
    "{{ m.content }}\n{%- endgeneration +%}\n{% else %}{{ m.content }}{% endif %}\n{% endmacro %}"
    "{% for m in messages %}{{ said(m) }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("contents", "template", "learnt"),
    [
        (["one?", "q", "two?", "z"], WITHOUT_END, "qz"),
        (["one?", "", "two?", "z"], WITHOUT_END, "z"),
        (["one?", "two", "three?", "two two"], NO_HEADERS, "wowo two"),
        (["one?", "q", "two?", "one"], IN_A_MACRO, "qone"),
        (["one?", "", "two?", "one"], IN_A_MACRO, "one"),
        (["one?", "", "two?", "one"], BY_PROMPTS, "<|endoftext|>one<|endoftext|>"),
        (["one?", "q", "two?", "one"], ALWAYS_PROMPTS, "q<|endoftext|>one<|endoftext|>"),
    ],
)
def test_no_token_outside_of_the_answers_is_learnt(contents: list[str], template: str, learnt: str):
    tokenizer = train_tokenizer(iter(["one and at two is three? <|user|><|assistant|>"] * 3), 300)
    assert tokenizer.tokenize("at") == ["at"], "no token of its own: the t of NO_HEADERS' answers"
    assert pieces_learnt(tokenizer, template, conversation(*contents)) == [learnt]


def test_a_first_token_is_not_learnt(tokenizer: Any) -> None:
    greeting = conversation("", "Hello!", "one?", "two")[1:]
    contents_alone = NO_HEADERS.replace("{{ m.role[0] }}", "")
    assert pieces_learnt(tokenizer, contents_alone, greeting) == ["ello!two"]
    end = tokenizer.eos_token
    assert pieces_learnt(tokenizer, BY_PROMPTS, greeting) == [f"two{end}"]


@pytest.mark.parametrize("template", [BY_PROMPTS, BY_MARKS], ids=["prompts", "marks"])
def test_answers_that_are_rewritten_later_make_a_sample_each(tokenizer: Any, template: str) -> None:
    template = template.replace(
        "{{ m.content }}", "{{ m.content if loop.last else m.content.split('/')[-1] }}"
    )
    end = tokenizer.eos_token
    rewritten = conversation("one?", "so/two", "three?", "and/one")
    assert pieces_learnt(tokenizer, template, rewritten) == [f"so/two{end}", f"and/one{end}"]
    plain = conversation("one?", "two", "three?", "one")
    assert pieces_learnt(tokenizer, template, plain) == [f"two{end}one{end}"]


TOOLS = [{"type": "function", "function": {"name": "sum", "parameters": {"type": "object"}}}]
WITH_TOOLS = "{{ tools | tojson if tools else '' }}" + BY_PROMPTS.replace(
    "{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls %}CALL{% endfor %}"
)


@pytest.mark.parametrize(
    ("call", "written"),
    [
        ("{{ c.function.arguments | tojson }}", '{"a": [1, 2]}'),
        ("{{ c.function.arguments }}", '{"a":[1, 2]}'),
        ("{{ '' + c.function.arguments + '.' }}", '{"a":[1, 2]}.'),
        (
            "{{ c.function.name }}{% for k, v in c.function.arguments | items %}{{ k }}{% endfor %}",
            "suma",
        ),
    ],
)
def test_tools_and_calls_reach_the_template(tokenizer: Any, call: str, written: str) -> None:
    template = WITH_TOOLS.replace("CALL", call)
    function = {"name": "sum", "arguments": '{"a":[1, 2]}'}
    # A user who writes as Python does is no template that does.
    messages: list[Any] = conversation("is it {'a': [1, 2]}?", "")
    messages[1]["tool_calls"] = [{"type": "function", "function": function}]
    row = {"messages": messages, "tools": TOOLS}
    assert pieces_learnt(tokenizer, template, row) == [f"{written}{tokenizer.eos_token}"]
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = template
    tokens = encode(tokenizer, json.dumps(row)) & IDS
    assert tokenizer.decode(tokens).startswith(json.dumps(TOOLS))
    for without, name in ((BY_PROMPTS, "tools"), (BY_PROMPTS + "{# tools #}", "tool_calls")):
        with pytest.raises(UserError, match=f"no place for {name}"):
            pieces_learnt(tokenizer, without, row)


@pytest.mark.parametrize(
    ("end", "tokens"),
    [
        ("<|im_end|>\n", ["<|im_end|>"]),
        (" {{ eos_token }}", ["<|endoftext|>"]),
        ("{{ '<|end|>' if not loop.last else '<|endoftext|>' }}", ["<|endoftext|>", "<|end|>"]),
        ("<|im_end|>x{{ eos_token }}", ["<|im_end|>"]),
        ("\nUser:", []),
        ("{{ raise_exception('no') }}", []),
    ],
)
def test_end_of_turn_tokens_are_read_from_the_template(end: str, tokens: list[str]) -> None:
    tokenizer = train_tokenizer(iter(["one and two"]), 300)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>", "<|end|>", "<|im"]})
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}" + end + "{% endfor %}"
    tokenizer.chat_template = template
    assert tokenizer.convert_ids_to_tokens(end_of_turn_tokens(tokenizer)) == tokens


def test_templates_that_leave_nothing_to_learn_are_refused(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = json.dumps(conversation("one?", "two", "three?", "one"))
    last = BY_PROMPTS.replace("{{ m.content }}", "{{ m.content if loop.last else '' }}")
    for template, message in (
        (last, "message 2 follows"),
        ("{{ raise_exception('no such roles') }}", "refuses .*no such roles"),
        ("{{ messages[0", "the chat template refuses"),
        (BY_MARKS.replace("== 'assistant'", "== 'robot'"), "marks nothing to learn"),
        ("{% set all %}" + BY_MARKS + "{% endset %}{{ all[:-3] }}", "changes text that it has"),
    ):
        monkeypatch.setattr(tokenizer, "chat_template", template)
        with pytest.raises(UserError, match=message):
            encode(tokenizer, text)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A folder with model/, chats.jsonl and data/: conversations of 5 to 60 tokens, some held out."""
    folder = tmp_path_factory.mktemp("chats")
    tokenizer.save_pretrained(folder / "model")
    rows = [conversation("x" * (n % 7), "yz" * (n % 23 + 1)) for n in range(60)]
    write_conversations(folder / "chats.jsonl", rows)
    options = ["--chat", "--tokenizer", str(folder / "model"), "--validation-fraction", "0.1"]
    main([str(folder / "chats.jsonl"), str(folder / "data"), *options, "--shard-tokens", "300"])
    return folder


@pytest.mark.parametrize("length", [8, 31, 64, 5000])
def test_windows_hold_each_answer_once_and_whole_conversations_if_they_fit(
    chats: Path, length: int
) -> None:
    dataset = TokenDataset.open(chats / "data")
    assert dataset.dtype == np.uint32
    assert len(dataset.shards) > 2
    stored = dataset.stored(slice(None))
    assert dataset[: len(dataset)].max() < dataset.vocab_size
    windows = Windows(dataset, length)
    ids, labels, positions = windows.batch(np.arange(len(windows)))
    assert ids.shape == labels.shape == positions.shape == (len(windows), length)
    counted = labels[labels >= 0]
    wanted = stored[stored & LEARNT != 0] & IDS
    assert counted.tolist() == wanted.tolist()
    assert [windows.learnt(np.array([n])) for n in range(len(windows))] == [
        int((row >= 0).sum()) for row in labels
    ]
    segments = {
        tuple(part.tolist())
        for row, places in zip(ids, positions, strict=True)
        for part in np.split(row, np.flatnonzero(places == 0))
    }
    whole = np.split(stored & IDS, np.flatnonzero(stored & BEGINS))[1:]
    fitting = [tuple(one.tolist()) for one in whole if len(one) <= length + 1]
    assert fitting or length == 8
    # The last token of a window is a label alone.
    assert all({one, one[:-1]} & segments for one in fitting)


def test_batches_of_conversations_have_positions_and_the_learnt_count_of_all_ranks(chats: Path):
    options: Any = {"sequence_length": 64, "batch_size": 4, "seed": 0}
    loader = TokenLoader(TokenDataset.open(chats / "data"), **options)
    halves = [TokenLoader(loader.dataset, **options, rank=r, world_size=2) for r in range(2)]
    for step in (0, 50):
        assert len(loader.batch(step)) == 3
        counted = sum(int((half.batch(step)[1] >= 0).sum()) for half in halves)
        assert loader.learnt(step) == halves[0].learnt(step) == counted


def prepared(tokenizer: Any, template: str, rows: Path | str, out: Path) -> TokenDataset:
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = template
    source = parse_source(str(rows), chat=True, validation_fraction=0.0)
    prepare(source, out, tokenizer=tokenizer, chat=True)
    return TokenDataset.open(out)


SHAREGPT = [{"from": "human", "value": "one?"}, {"from": "gpt", "value": "two"}]
PARTS = [{"type": "text", "text": "on"}, {"type": "text", "text": "e?"}]
ASKED = {"role": "user", "content": "one?"}


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"conversations": SHAREGPT, "system": "x"}, "<|system|>x|<|user|>one?|<|assistant|>two|"),
        ({"messages": json.dumps(conversation("one?", "two"))}, "<|user|>one?|<|assistant|>two|"),
        (
            {"messages": [{"role": "user", "content": PARTS}, conversation("", "two")[1]]},
            "<|user|>one?|<|assistant|>two|",
        ),
        ({"instruction": "one", "input": "x", "output": "two"}, "<|user|>one\nx|<|assistant|>two|"),
        (
            {"instruction": "one", "input": "", "output": "two", "history": [["three", "is"]]},
            "<|user|>three|<|assistant|>is|<|user|>one|<|assistant|>two|",
        ),
        (
            {"messages": [{**ASKED, "name": None}, {"role": "assistant", "content": "two"}]},
            "<|user|>one?|<|assistant|>two|",
        ),
        (
            {"conversations": [SHAREGPT[0], {"from": "function_call", "value": '{"name": "sum"}'}]},
            "<|user|>one?|<|assistant|>sum|",
        ),
    ],
)
def test_sharegpt_and_alpaca_rows_are_read(tmp_path: Path, tokenizer: Any, row: Any, text: str):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    template = WITH_TOOLS.replace("CALL", "{{ c.function.name }}").replace("{{ eos_token }}", "|")
    dataset = prepared(tokenizer, template, tmp_path / "rows.jsonl", tmp_path / "out")
    assert tokenizer.decode(dataset[:]) == text


def test_rows_without_conversation_are_skipped_and_counted(
    tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    image = [{"type": "image", "url": "a.png"}]
    calls = {"role": "assistant", "content": None, "tool_calls": [1]}
    bad: list[Any] = [None, [], [5], "{", conversation("one?"), conversation("one?", "\ud800")]
    bad += [[{"role": "user", "content": image}, conversation("", "two")[1]], [ASKED, calls]]
    bad += [[ASKED, {"role": "assistant", "content": None}], conversation("no such", "two")]
    good = conversation("one?", "two")
    rows = [{"messages": each} for each in (*bad, good)] + [{"text": "one"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    template = "{{ raise_exception('no') if 'no such' in messages[0].content }}" + BY_PROMPTS
    dataset = prepared(tokenizer, template, tmp_path / "rows.jsonl", tmp_path / "out")
    assert dataset.manifest.splits["train"].documents == 1
    said = capsys.readouterr().err
    assert "11 rows or files skipped, the first: " in said
    assert "rows.jsonl:1: column 'messages' is not a list of" in said


def test_plain_text_beside_conversations_is_learnt_whole(tmp_path: Path, chats: Path) -> None:
    texts = ["one and <|endoftext|>", "x" * 300, "<|user|>two", "left out by the limit"]
    rows: list[Any] = [{"text": 5}, *({"text": text} for text in texts)]
    books = tmp_path / "books.jsonl"
    books.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = [str(chats / "chats.jsonl"), str(tmp_path / "data"), "--chat"]
    options = ["--tokenizer", str(chats / "model"), "--validation-fraction", "0.1"]
    main([*source, *options, "--beside", str(books), "--beside-bytes", "330"])
    mixed, alone = TokenDataset.open(tmp_path / "data"), TokenDataset.open(chats / "data")
    stored = mixed.stored(slice(None))
    assert (stored[: len(alone)] == alone.stored(slice(None))).all()
    assert mixed.manifest.splits["validation"] == alone.manifest.splits["validation"]
    documents = np.split(stored, np.flatnonzero(stored & BEGINS))[-3:]
    tokenizer = load_tokenizer(chats / "model")
    assert [tokenizer.decode(each & IDS) for each in documents] == texts[:3]
    for document in documents:
        assert (document & LEARNT != 0).tolist() == [False] + [True] * (len(document) - 1)
        assert tokenizer.eos_token_id not in document & IDS
    with pytest.raises(UserError, match=r"settings: source.beside.limit_bytes is \d+ there, n"):
        main([*source, *options, "--beside", str(books)])
    with pytest.raises(UserError, match="--beside needs --chat, and --beside-bytes needs"):
        main([*source, *options, "--beside", str(books), "--no-chat"])


def test_keys_that_other_rows_have_are_not_learnt(tmp_path: Path, tokenizer: Any) -> None:
    """A column of .parquet gives every row the keys of all rows."""
    rows = []
    for name in ("one", "two"):
        tool = {"function": {"name": name, "parameters": {name: {"type": "string"}}}}
        call = {"function": {"name": name, "arguments": {name: "is"}}}
        said = {"role": "assistant", "content": None, "tool_calls": [call]}
        rows.append({"messages": [ASKED, said], "tools": [tool]})
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    template = WITH_TOOLS.replace("CALL", "{{ c.function | tojson }}")
    dataset = prepared(tokenizer, template, tmp_path / "rows.parquet", tmp_path / "out")
    text = tokenizer.decode(dataset[:])
    assert "null" not in text
    for row in rows:
        assert json.dumps(row["tools"]) in text
        assert json.dumps(row["messages"][1]["tool_calls"][0]["function"]) in text


def test_bad_conversations_are_refused(chats: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    options = ["--chat", "--tokenizer", str(chats / "model")]
    write_conversations(rows, [conversation("one?")])
    with pytest.raises(UserError, match="no assistant message"):
        main([str(rows), str(tmp_path / "out"), *options])
    dated = [{**message, "at": datetime.date(2026, 1, 1)} for message in conversation("a", "b")]
    pq.write_table(pa.table({"messages": [dated]}), tmp_path / "dated.parquet")
    with pytest.raises(UserError, match=r"row 1: column 'messages' is not JSON: .* date"):
        main([str(tmp_path / "dated.parquet"), str(tmp_path / "out"), *options])
    rows.write_text('{"text": "one"}')
    with pytest.raises(UserError, match="no column 'messages'"):
        main([str(rows), str(tmp_path / "out"), *options])
    with pytest.raises(UserError, match="needs a tokenizer with a chat template"):
        main([str(chats / "chats.jsonl"), str(tmp_path / "out"), "--chat", "--vocab-size", "300"])
