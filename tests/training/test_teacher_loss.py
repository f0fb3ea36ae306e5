# SPDX-License-Identifier: Apache-2.0
"""Distillation: its loss, the cache of a teacher's logits, the command, refusals."""

import dataclasses
import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from small_runs import logged, losses

from factories import tiny_model
from sparse_bitnet.checkpoint.load import from_pretrained, load_tokenizer
from sparse_bitnet.checkpoint.open_checkpoint import fingerprint
from sparse_bitnet.checkpoint.trained import save_pretrained
from sparse_bitnet.cli.main import main
from sparse_bitnet.cli.train import distill, next_commands
from sparse_bitnet.data.loader import TokenLoader
from sparse_bitnet.data.shards import TokenDataset
from sparse_bitnet.errors import UserError
from sparse_bitnet.nn.convert import convert_, sparse_layers
from sparse_bitnet.progress import Progress
from sparse_bitnet.training import distillation as teacher_module
from sparse_bitnet.training import reconstruction
from sparse_bitnet.training import trainer as trainer_module
from sparse_bitnet.training.config import read_config
from sparse_bitnet.training.distillation import DistillationLoss, LogitCache, Teacher
from sparse_bitnet.training.logits import hidden_states
from sparse_bitnet.training.reconstruction import reconstruct_
from sparse_bitnet.training.trainer import train

CPU = torch.device("cpu")
VOCAB = 304
PART = 8 * 32 * VOCAB * 4  # bytes of all logits of 8 windows
SHORT = "--steps 1 --batch-size 2 --sequence-length 16 --threads 1 --validation-tokens 64"


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    tiny_model("llama", vocab_size=VOCAB).save_pretrained(folder)
    return folder


@pytest.fixture
def distil(small_run: Any, teacher: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`distil(**changes)`: the config of a short distillation; a cache fills in small parts."""
    monkeypatch.setattr("sparse_bitnet.training.distillation._PART_BYTES", PART)

    values = {"teacher": str(teacher), "init": str(teacher), "steps": 2}
    return lambda **changes: small_run(**{**values, **changes})


@pytest.mark.parametrize("rows", [VOCAB, VOCAB - 16, VOCAB + 16])
def test_the_loss_and_its_gradient_are_those_of_the_formula(distil, teacher, rows):
    """Also over the rows that both heads have, where the student's or the teacher's is padded."""
    both = min(rows, VOCAB)
    config = distil(temperature=3.0, ce_weight=0.3, logits_weight=0.7, loss_chunk_tokens=7)
    student = tiny_model("llama", seed=5, vocab_size=rows).train()
    loaded = Teacher(teacher, torch.float32, CPU, both)
    torch.manual_seed(1)
    tokens = torch.randint(0, both, (3, 17))
    ids, labels = tokens[:, :-1], tokens[:, 1:].clone()
    labels[0, :5] = -100
    loss = DistillationLoss(student, config, loaded)(ids, labels)
    loss.backward()
    gradients = [p.grad.clone() for p in student.parameters()]
    student.zero_grad()

    scored = (labels >= 0).flatten()
    logits = student(ids).logits.flatten(0, 1)[scored]
    wanted = loaded.model(ids).logits.flatten(0, 1)[scored]
    ce = F.cross_entropy(logits, labels.flatten()[scored], reduction="sum")
    mine, theirs = (logits[:, :both] / 3).log_softmax(-1), (wanted[:, :both] / 3).softmax(-1)
    kl = F.kl_div(mine, theirs, reduction="sum")
    expected = 0.3 * ce + 0.7 * 9 * kl
    expected.backward()
    torch.testing.assert_close(loss, expected.double(), rtol=1e-5, atol=1e-5)
    for gradient, parameter in zip(gradients, student.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-4)

    student.eval()
    plain = DistillationLoss(student, config, loaded)(ids, labels)
    torch.testing.assert_close(plain, ce.detach().double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_a_run_with_a_teacher_learns(distil, tmp_path, family, capsys):
    tiny_model(family, vocab_size=VOCAB).save_pretrained(folder := str(tmp_path / "model"))
    values = {"teacher": folder, "init": folder, "temperature": 2.0, "learning_rate": 3e-4}
    config = distil(steps=6, reconstruction_windows=0, **values)
    clock = iter(range(0, 9**9, 9))
    train(config, progress=Progress(Console(get_time=clock.__next__), plain_lines=1))
    shown, said = capsys.readouterr()
    labels = re.findall("(validating.*)  256/256 tokens", shown)
    assert labels == ["validating", "validating the teacher", "validating"]
    rows = logged(config)
    assert rows[0]["step"] == 0
    before = rows[0]["validation_perplexity"]
    assert f"before the first step: validation perplexity {before:,.3f}" in said
    curve = losses(config)
    assert curve[-1] < curve[0]
    assert rows[0]["teacher_perplexity"] > 1
    # The loss is the divergence alone, times the temperature squared.
    np.testing.assert_allclose([4 * row["kl_divergence"] for row in rows[1:7]], curve)
    student = from_pretrained(Path(config.out) / "final")
    layers = {name.rpartition(".")[2] for name in sparse_layers(student)}
    assert not layers & {"in_proj_a", "in_proj_b", "lm_head"}
    of_run = Teacher(config.out, torch.float32, CPU, VOCAB)
    torch.testing.assert_close(of_run.model.state_dict(), student.state_dict(), rtol=0, atol=0)
    assert fingerprint(config.out) == fingerprint(f"{config.out}/final")
    state, *_ = Path(config.out).glob("checkpoints/*/state.json")
    assert json.loads(state.read_text())["data"]["teacher"] == fingerprint(folder)
    tiny_model(family, seed=1, vocab_size=VOCAB).save_pretrained(folder)
    with pytest.raises(UserError, match="holds a run with another teacher; use it or choose"):
        train(config)


def test_a_cache_of_all_logits_trains_as_the_teacher_itself(distil, tmp_path, capfd, monkeypatch):
    cache, made, init = tmp_path / "cache", [], Teacher.__init__
    monkeypatch.setattr(Teacher, "__init__", lambda *given: made.append(given) or init(*given))
    train(direct := distil(ce_weight=1.0, out=str(tmp_path / "direct")))
    options = dict(ce_weight=1.0, logit_cache=str(cache), top_logits=VOCAB)
    train(cached := distil(**options, out=str(tmp_path / "cached")))
    assert len(made) == 2, "each run loads it once"
    np.testing.assert_allclose(losses(cached), losses(direct), rtol=1e-3)
    assert logged(cached)[0] == logged(direct)[0]
    manifest = json.loads((cache / "manifest.json").read_text())
    assert len(manifest["checksums"]) == 1
    assert (cache / "part-00000.bin").stat().st_size == PART
    said = [line for line in capfd.readouterr().err.splitlines() if "teacher's logits" in line]
    assert "tokens/s" in said[-1]
    assert "256/256 tokens" in said[-1]

    damaged = bytearray((cache / "part-00000.bin").read_bytes())
    damaged[100] ^= 1
    (cache / "part-00000.bin").write_bytes(damaged)
    with pytest.raises(UserError, match=r"part-00000.bin is damaged"):
        train(dataclasses.replace(cached, out=str(tmp_path / "third")))


def test_reconstructed_blocks_are_closer_to_the_teacher() -> None:
    torch.manual_seed(0)
    original, student = (tiny_model("llama", vocab_size=VOCAB) for _ in range(2))
    student.load_state_dict(original.state_dict())
    convert_(student, "ternary-6:8")
    ids = torch.randint(0, VOCAB, (8, 32))

    def error() -> float:
        with torch.no_grad():
            own, wanted = (hidden_states(each, ids) for each in (student, original))
        return float((own - wanted).norm() / wanted.norm())

    before, done = error(), []
    errors = reconstruct_(
        student, original, (ids,), dtype=torch.float32, report=lambda *counts: done.append(counts)
    )
    assert error() < 0.9 * before
    assert len(errors) == 2
    assert done == [(1, 2), (2, 2)]
    with pytest.raises(UserError, match="blocks cannot be reconstructed"):
        reconstruct_(student, tiny_model("llama", hidden_size=32), (ids,), dtype=torch.float32)


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_5_text"])
def test_blocks_get_the_arguments_that_the_model_gives_them(family: str) -> None:
    model = tiny_model(family, vocab_size=VOCAB).eval()
    ids = torch.randint(0, VOCAB, (2, 32))
    with torch.no_grad():
        stream, others = reconstruction._calls(model, (ids,))
        for block in others:
            stream = reconstruction._output(block, stream, others)
        assert torch.equal(model.model.norm(stream), hidden_states(model, ids))


def test_a_run_from_reconstructed_blocks_is_deterministic(distil, tmp_path, capsys):
    first, again = (
        distil(reconstruction_windows=8, out=str(tmp_path / name)) for name in ("first", "again")
    )
    for config in (first, again, again):  # a finished run does nothing
        train(config)
    assert capsys.readouterr().err.count("blocks reconstructed: relative error") == 2
    assert logged(again) == logged(first)


@pytest.mark.parametrize(("own", "theirs"), [(304, 320), (320, 304)])
def test_a_padded_head_trains_on_the_rows_that_both_have(distil, tmp_path, own, theirs):
    tokenizer = load_tokenizer(Path(distil().data) / "tokenizer")
    for name, rows in (("init", own), ("teacher", theirs)):
        tiny_model("llama", vocab_size=rows).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    named = {name: str(tmp_path / name) for name in ("init", "teacher")}
    train(direct := distil(**named, out=str(tmp_path / "direct")))
    cache = {"logit_cache": str(tmp_path / "cache"), "top_logits": 1000}
    train(cached := distil(**named, **cache, out=str(tmp_path / "cached")))
    np.testing.assert_allclose(losses(cached), losses(direct), rtol=1e-3)
    assert json.loads((tmp_path / "cache" / "manifest.json").read_text())["k"] == 304
    assert from_pretrained(tmp_path / "cached" / "final").config.vocab_size == own


def test_an_unfinished_cache_resumes(distil, teacher, tmp_path, monkeypatch):
    def cache(name: str, split: str = "train", **changes: Any) -> LogitCache:
        options = {"steps": 100, "top_logits": 8, "logit_cache": str(tmp_path / name)}
        config = distil(**{**options, **changes})
        dataset = TokenDataset.open(config.data, split)
        loader = TokenLoader(dataset, sequence_length=32, batch_size=4, seed=config.data_seed)
        return LogitCache(config, fingerprint(config.teacher), loader, VOCAB, torch.float32)

    monkeypatch.setattr("sparse_bitnet.training.distillation._PART_BYTES", 1 << 17)
    monkeypatch.setattr("sparse_bitnet.training.distillation.default_chunk_tokens", lambda _: 100)
    whole, parts, loaded = (
        cache("whole"),
        cache("parts"),
        Teacher(teacher, torch.float32, CPU, VOCAB),
    )
    assert whole.token.itemsize == 8 * 4
    whole.fill(loaded, 16)
    assert whole.parts > 2
    crc32 = teacher_module.zlib_ng.crc32

    def stop(content: bytes) -> int:
        if len(parts.checksums) == 2:
            raise KeyboardInterrupt
        return crc32(content)

    with monkeypatch.context() as patched:
        patched.setattr(teacher_module.zlib_ng, "crc32", stop)
        with pytest.raises(KeyboardInterrupt, match=r"2 of \d files of logits are kept"):
            parts.fill(loaded, 16)
    again = cache("parts")
    assert len(again.checksums) == 2
    again.fill(loaded, 16)
    for file in (tmp_path / "whole").iterdir():
        assert file.read_bytes() == (tmp_path / "parts" / file.name).read_bytes()
    ids, logits = again.batch(whole.order[[0, whole.per_part]])
    assert ids.shape == logits.shape == (2, 32, 8)
    assert (logits[..., :-1] >= logits[..., 1:]).all()

    other = tmp_path / "other teacher"
    tiny_model("llama", seed=9, vocab_size=VOCAB).save_pretrained(other)
    for changes, what in (
        ({"teacher": str(other)}, "teacher"),
        ({"split": "validation"}, "text"),
        ({"data_seed": 1}, "data seed"),
        ({"top_logits": 9}, "top_logits"),
    ):
        with pytest.raises(UserError, match=f"is a cache of another {what}"):
            cache("parts", **changes)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^cannot write .*file is not a writable folder$"):
        cache("file/cache")
    free = SimpleNamespace(free=1 << 18)
    monkeypatch.setattr(teacher_module.shutil, "disk_usage", lambda _: free)
    with pytest.raises(UserError, match=r"new needs .* MB more, and .* MB are free there"):
        cache("new")
    monkeypatch.setattr(teacher_module.os, "access", lambda *_: False)
    assert len(cache("whole").checksums) == whole.parts
    with pytest.raises(UserError, match="is neither empty nor a logit cache"):
        cache(distil().data)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"temperature": 0.0}, "temperature=0.0: must be above 0"),
        ({"teacher": None, "logit_cache": "c"}, "has no effect without --teacher: add"),
        ({"logit_cache": "c", "logits_weight": 0.0}, "logit_cache=c has no effect without"),
        ({"logits_weight": 0.0}, "are both 0"),
        ({"teacher": "not/at/all"}, "no such checkpoint: no folder or file not/at/all"),
        ({"init": None}, "has a vocabulary of 304 tokens, the student one of"),
        ({"init": None, "sequence_length": 65}, "65: teacher .* has at most 64 positions"),
    ],
)
def test_invalid_distillation_options_are_refused(distil, changes, reason):
    with pytest.raises(UserError, match=reason) as raised:
        train(distil(**changes))
    assert "\n" not in str(raised.value)


def test_command_distils_and_refuses_extra_arguments(distil, tmp_path, capsys, monkeypatch):
    teacher, out = distil().teacher, tmp_path / "run"
    distill([teacher, str(out), "--data", distil().data, *SHORT.split()])
    stored = read_config(out)
    text = TokenDataset.open(distil().data, "validation")[:16]
    prompt = " ".join(load_tokenizer(f"{distil().data}/tokenizer").decode(text).split())
    said = re.findall("after step (.*): val.*, sample: (.*)", capsys.readouterr().out)
    assert [step for step, _ in said] == ["0", "1"]
    assert all(sample.startswith(f"{prompt} ... ") for _, sample in said)
    assert (stored.teacher, stored.init, stored.learning_rate) == (teacher, teacher, 2e-3)
    assert "activation=int8-hadamard:block=32,quantizer=per-group:size=32" in stored.format
    distill([teacher, str(out), "--data", distil().data])
    with pytest.raises(UserError, match="--teacher is not an option"):
        distill([teacher, str(out), "--teacher", "other"])
    monkeypatch.setattr(reconstruction, "reconstruct_", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(SystemExit, match="130"):
        main(["distill", teacher, f"{out}-2", "--data", distil().data, *SHORT.split()])
    assert capsys.readouterr().err.endswith("same command to start over from the first block\n")
    monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.setattr(trainer_module, "start_from_teacher_", None)
    with pytest.raises(UserError, match="lora needs peft"):
        distill([teacher, f"{out}-lora", "--data", distil().data, "--lora", "2"])
    monkeypatch.setattr(trainer_module, "fingerprint", None)
    for lost in ("nothing", "checkpoints", "final"):  # the result alone is one of a run, too
        shutil.rmtree(out / lost, ignore_errors=True)
        with pytest.raises(UserError, match=r"another config \(temperature 1.0 -> 2.0\)"):
            distill([teacher, str(out), "--temperature", "2"])


def test_a_teacher_with_transposed_layers_is_known_to_be_unpackable_at_the_start(
    distil: Any, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    tiny_model("gpt2", vocab_size=VOCAB, num_hidden_layers=1).save_pretrained(tmp_path / "gpt2")
    out = tmp_path / "run"
    distill([str(tmp_path / "gpt2"), str(out), "--data", distil().data, *SHORT.split()])
    assert "activation=int8-hadamard:block=32" in read_config(out).format
    shown, said = capsys.readouterr()
    assert said.index("c_attn of") < said.index("before the first step")
    assert shown.endswith(f"next:\n  sparse-bitnet generate {out} --prompt TEXT\n")


@pytest.mark.parametrize(
    ("format", "verbs"),
    [
        ("full-6:8", "generate export"),
        ("ternary-6:8", "pack generate export"),
        ("ternary-6:8,quantizer=per-group:size=16", "generate export"),
        ("ternary-6:8,activation=int4-hadamard", "pack generate"),
    ],
)
def test_the_commands_that_are_printed_run(distil, tmp_path, monkeypatch, format, verbs):
    model = convert_(tiny_model("llama", vocab_size=VOCAB), format)
    tokenizer = load_tokenizer(Path(distil().data) / "tokenizer")
    save_pretrained(model, run := tmp_path / "the run", tokenizer)
    monkeypatch.chdir(tmp_path)
    for verb, command in zip(verbs.split(), next_commands(str(run)), strict=True):
        assert command.startswith(verb)
        main([*shlex.split(command), *(["-n", "1"] if verb == "generate" else [])])
