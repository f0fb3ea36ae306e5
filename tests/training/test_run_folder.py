# SPDX-License-Identifier: Apache-2.0
"""Folders that a run accepts or refuses, and their state after a command that fails."""

import dataclasses
import errno
import json
import os
import re
import shutil
import stat
import sys
from pathlib import Path

import pytest

from sparse_bitnet.checkpoint.load import load_tokenizer
from sparse_bitnet.cli import train as command
from sparse_bitnet.cli.main import main
from sparse_bitnet.data.preparation import prepare
from sparse_bitnet.data.sources import parse_source
from sparse_bitnet.errors import UserError
from sparse_bitnet.files import locked_folder
from sparse_bitnet.training.distillation import LogitCache
from sparse_bitnet.training.recipes import paper
from sparse_bitnet.training.trainer import train


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"model": "typo"}, "typo"),
        ({"init": "norun"}, "norun"),
        ({"sequence_length": 120, "format": "ternary-6:8,dense_layers=typo"}, "typo"),
        ({"batch_size": 4, "micro_batch_size": None, "vocab_size": 100}, "vocabulary"),
        ({"sequence_length": 256}, "positions"),
        ({"sequence_length": 10**6}, "its [0-9,]+ validation tokens are fewer than a window"),
        ({"tensorboard": True}, r'install "\.\[tensorboard\]"$'),
    ],
    ids=["model", "init", "layers", "vocabulary", "positions", "text", "missing package"],
)
def test_a_config_that_cannot_train_leaves_no_trace(small_run, monkeypatch, wrong, reason):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    config = small_run(steps=1)
    with pytest.raises(UserError, match=reason) as refused:
        train(dataclasses.replace(config, **wrong))
    assert "\n" not in str(refused.value)
    assert not Path(config.out).exists()
    assert train(config).steps == 1, "the corrected command"


def test_a_model_is_not_trained_in_its_own_folder(small_run):
    (out := Path(small_run().out)).mkdir()
    (out / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(UserError, match=r"its config\.json is not a run's; choose another folder"):
        train(small_run())
    assert os.listdir(out) == ["config.json"]


def test_text_of_another_tokenizer_is_refused(small_run, prepared, tmp_path, capsys):
    train(start := small_run(steps=2, out=str(tmp_path / "start")))
    other = tmp_path / "other"
    texts = parse_source(f"{prepared.parent}/texts/*.txt", validation_fraction=0.2)
    prepare(texts, other, vocab_size=290)
    cache = {"teacher": start.out, "logit_cache": str(tmp_path / "cache")}
    started = {"init": start.out, "teacher": start.out}
    for changes in ({"init": start.out}, {"teacher": start.out}, started, cache):
        with pytest.raises(UserError, match="another tokenizer than that of"):
            train(small_run(data=str(other), **changes))
    assert len(load_tokenizer(start.out)) == 300, "a run is a tokenizer, too"
    shutil.rmtree(tmp_path / "start" / "final")
    with pytest.raises(UserError, match="prepared with another tokenizer"):
        train(small_run(data=str(other), init=start.out))
    shutil.copytree(prepared, mixed := tmp_path / "mixed")
    shutil.copytree(other / "tokenizer", mixed / "tokenizer", dirs_exist_ok=True)
    with pytest.raises(UserError, match="another tokenizer than that of its own tokenizer folder"):
        train(small_run(data=str(mixed)))
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "cache").exists()
    train(small_run(init=start.out, steps=1, format="full-2:4"))
    said = capsys.readouterr().err
    assert f"{start.out} is ternary-6:8: the run converts it to full-2:4 (--format)" in said


def test_a_cache_of_logits_inside_the_run_folder_can_be_continued(small_run, tmp_path, monkeypatch):
    train(start := small_run(steps=1, out=str(tmp_path / "start")))
    cache = {"logit_cache": f"{tmp_path}/run/logits/k64", "sequence_length": 128}
    config = small_run(teacher=start.out, **cache, steps=1, batch_size=64, micro_batch_size=64)
    fill = LogitCache.fill

    def killed(*arguments):
        fill(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(LogitCache, "fill", killed)
        with pytest.raises(KeyboardInterrupt):
            train(config)
    assert train(dataclasses.replace(config, learning_rate=2e-3)).steps == 1, "of any config"


@pytest.mark.parametrize("place", ["/proc/run", "file/run"])
def test_a_place_that_cannot_be_written_is_one_line(prepared, tmp_path, capsys, place):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--data", str(prepared), "--out", str(tmp_path / place)])
    assert stopped.value.code == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert said[-1].startswith(f"sparse-bitnet: cannot write {tmp_path / place}")


def test_a_diverged_run_ends_with_an_error(small_run):
    with pytest.raises(UserError, match="the run has diverged: validation loss nan after step 1"):
        train(config := small_run(steps=1, learning_rate=1e30))
    assert not (Path(config.out) / "result.json").exists()


def test_a_finished_run_on_other_text_is_refused(small_run, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(small_run().data, data)
    config = small_run(steps=2, data=str(data))
    first = train(config)
    assert train(dataclasses.replace(config, data=small_run().data)) == first, "the same text"
    text = tmp_path / "other.jsonl"
    text.write_text("".join(f'{{"text": "{n} other words"}}\n' for n in range(400)))
    shutil.rmtree(data)
    source = parse_source(str(text), validation_fraction=0.2)
    prepare(source, data, tokenizer=str(Path(small_run().data) / "tokenizer"))
    with pytest.raises(UserError, match="holds a run on other data; use its data or choose"):
        train(config)
    config = dataclasses.replace(config, validation_tokens=128)
    with pytest.raises(UserError, match="is finished, with --validation-tokens 256: leave that"):
        train(dataclasses.replace(config, data=small_run().data))
    config = dataclasses.replace(config, validation_tokens=256)
    assert train(dataclasses.replace(config, data=small_run().data)) == first, "as it was"
    result = Path(config.out) / "result.json"
    result.write_text(result.read_text().replace('"steps": 2', '"steps": null'))
    with pytest.raises(UserError, match=r"result\.json is damaged"):
        train(dataclasses.replace(config, data=small_run().data))


def test_dense_layers_of_the_command_line_become_part_of_the_format(small_run, tmp_path, capsys):
    config = small_run(steps=1, out=str(tmp_path / f"{'long' * 30}[bold]"))
    named = ("data", "out", "steps", "batch_size", "sequence_length", "threads", "precision")
    given = [f"--{name.replace('_', '-')}={getattr(config, name)}" for name in named]
    main(["train", *given, "--validation-tokens=256", "--dense-layers", "down_proj,layers.0.*"])
    stored = json.loads((Path(config.out) / "config.json").read_text())
    assert stored["format"] == "ternary-6:8,dense_layers=down_proj+layers.0.*"
    assert f"model: {config.out}/final   curves" in capsys.readouterr().out, "as given"
    main(["train", "--out", config.out])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--init x --model qwen2.5-1m", "--model has no effect here (--init names the model)"),
        ("--init=x --initial-weights normal", "--initial-weights has no effect here"),
        ("--decay-fraction=0.1", "it is for --schedule wsd"),
        ("--init x --lora 4 --decay-embeddings", "--lora trains none"),
        ("--weight-decay 0 --final-weight-decay-fraction 0.5", "no weight decay"),
        ("--masters bf16 --precision float32", "--masters bf16 computes in bf16"),
    ],
)
def test_an_option_without_effect_is_refused(words, reason):
    with pytest.raises(UserError, match=re.escape(reason)):
        command.main(words.split())


def test_options_with_an_effect_are_accepted():
    for text in ("--init x --lora 2 --seed 3", "--schedule wsd --decay-fraction 0.1", "--init x"):
        command.check_effect(command.parse(text.split(), paper(), "paper"), text.split())


def test_files_of_a_run_are_readable_by_others(small_run):
    config = small_run(steps=1)
    previous = os.umask(0o022)
    try:
        train(config)
    finally:
        os.umask(previous)
    files = [path for path in Path(config.out).rglob("*") if path.is_file()]
    assert any(path.suffix == ".safetensors" for path in files)
    private = [path.name for path in files if not path.stat().st_mode & stat.S_IROTH]
    assert private in ([], [".lock"])


def test_a_file_system_without_locks_is_refused(tmp_path, monkeypatch):
    import fcntl

    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.raises(UserError, match=r"cannot lock .*run: No locks available"):
        with locked_folder(tmp_path / "run", "in use"):
            pass
