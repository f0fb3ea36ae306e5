# SPDX-License-Identifier: Apache-2.0
"""Conversations that a teacher writes by itself."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from factories import tiny_model
from sparse_bitnet.cli.prepare import main
from sparse_bitnet.data.tokenizer import train_tokenizer
from sparse_bitnet.errors import UserError
from sparse_bitnet.files import locked_folder
from sparse_bitnet.training import teacher_chats
from sparse_bitnet.training.teacher_chats import write_conversations

TEMPLATE = (
    "You are a model.{{ eos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LETTERS = "abcdefghijklm"


def make_teacher(folder: Path, template: str | None = TEMPLATE, spread: float = 0.1) -> Any:
    """Save and return a model that writes random letters, and its tokenizer."""
    tokenizer: Any = train_tokenizer(iter(["one and two"]), 257)
    tokenizer.chat_template = template
    sizes = {"vocab_size": 257, "max_position_embeddings": 1024, "tie_word_embeddings": False}
    model: Any = tiny_model("llama", **sizes)
    with torch.no_grad():  # the first feature is large, so its weights in the head are a bias
        model.model.embed_tokens.weight.normal_(std=0.5)[:, 0] = 4
        model.lm_head.weight.normal_(std=spread)[:, 0] = -3
        model.lm_head.weight[tokenizer(LETTERS + tokenizer.eos_token)["input_ids"], 0] = 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def test_resumed_writing_gives_the_same_bytes(tmp_path: Path, capsys: Any) -> None:
    make_teacher(tmp_path / "teacher")
    teacher, whole, cut = (str(tmp_path / name) for name in ("teacher", "a.jsonl", "b.jsonl"))
    words = f"{whole} {tmp_path}/data --from-model {teacher} --conversations 20 --batch-size 8"
    main(words.split())
    assert "vocabulary 257, uint32, written" in capsys.readouterr().out
    main(words.split())
    assert "already there, shards verified" in capsys.readouterr().out
    content = Path(whole).read_bytes()
    write = partial(write_conversations, cut, teacher, batch_size=8)
    chats = [json.loads(line)["messages"] for line in content.splitlines()]
    assert len({chat[0]["content"].lower() for chat in chats}) == len(chats) == 20
    for size in (0, 7, len(content) // 2, len(content) - 1):
        Path(cut).write_bytes(content[:size])
        write(20)
        assert Path(cut).read_bytes() == content
    assert capsys.readouterr().err.endswith("empty since the resumption\n")
    write(25)
    assert Path(cut).read_bytes().startswith(content)
    with pytest.raises(UserError, match="was made with another seed: choose another file"):
        write(30, seed=4)
    with pytest.raises(UserError, match="holds 25 conversations: request at least that many"):
        write(24)
    with pytest.raises(UserError, match="holds 20 conversations: request at least that many"):
        main(words.replace("conversations 20", "conversations 19").split())
    mine = json.dumps({"messages": chats[0]}).encode()
    for others in (mine, mine[:20], content + mine):
        Path(cut).write_bytes(others)
        with pytest.raises(UserError, match="rows of another kind, choose another file"):
            write(25)
        assert Path(cut).read_bytes() == others


def test_what_follows_the_sampling_is_refused_before_it(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(teacher_chats, "_sample", lambda *_, **__: pytest.fail("sampled"))
    make_teacher(Path("teacher"))
    sampling = ["--from-model", "teacher", "--conversations", "3"]
    for words, message in {
        "out --vocab-size 300": "give either --tokenizer",
        "out --limit-bytes 0": "--limit-bytes 0: must be at least 1",
        "out --shard-tokens 0": "--shard-tokens 0: must be at least 1",
        "out --beside-bytes 5": "--beside-bytes needs --beside",
        "out --beside absent.txt": "no such file: absent.txt",
        "out --validation a.txt --validation-fraction 0.1": "not both",
        "out --batch-size 0": "--conversations and --batch-size at least 1",
        "out --eos-token nowhere": "nowhere",
        "out --column text": "--from-model writes the column messages",
        "teacher": "teacher is neither empty nor prepared from these conversations",
        ".": "cannot be written into",
    }.items():
        with pytest.raises(UserError, match=message):
            main(["rows.jsonl", *words.split(), *sampling])
    assert [path.name for path in tmp_path.iterdir()] == ["teacher"]
    with locked_folder(Path("out"), ""), pytest.raises(UserError, match="another running process"):
        main(["rows.jsonl", "out", *sampling])


def test_a_batch_writes_what_each_prompt_alone_gives(tmp_path: Path, monkeypatch: Any) -> None:
    model, tokenizer = make_teacher(tmp_path, spread=1.0)
    monkeypatch.setattr(teacher_chats, "_ROUND_TOKENS", 3)
    ends, prompts = {*tokenizer("adhm")["input_ids"]}, [c * (n + 1) for n, c in enumerate(LETTERS)]
    texts = teacher_chats._sample(model, tokenizer, prompts, ends, max_tokens=20, temperature=1e-5)
    for prompt, text in zip(prompts, texts, strict=True):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        alone = model.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=[*ends])[0]
        new = alone[ids.shape[1] :].tolist()
        assert text == (tokenizer.decode(new[:-1]) if new[-1] in ends else None)
    assert {None} < {*texts}


UNUSABLE = {
    "no chat template": None,
    "put text before a user's message, an end token after it": TEMPLATE.replace(
        "content }}{{ eos_token }}", "content }}"
    ),
    "an end token after it": "{{ messages[0].content }}{{ eos_token }}",
    "refuses": "{{ raise_exception('no') }}",
    "writes no more conversations .dropped 0 repeated, 44 too long": TEMPLATE,
}


@pytest.mark.parametrize("message", UNUSABLE)
def test_a_model_that_cannot_chat_is_refused(tmp_path: Path, message: str, monkeypatch: Any):
    make_teacher(tmp_path, UNUSABLE[message])
    monkeypatch.setattr(teacher_chats, "_sample", lambda *given, **_: [None] * len(given[2]))
    with pytest.raises(UserError, match=message):
        write_conversations(tmp_path / "chats.jsonl", str(tmp_path), 3, batch_size=4)
