# SPDX-License-Identifier: Apache-2.0
"""Verification detects differences, names missing packages, and sets the exit code."""

import dataclasses
import importlib.util
import json
import re
from pathlib import Path

import pytest

from exported import verified_export
from factories import changed, edit_tensors
from sparse_bitnet.checkpoint.open_checkpoint import open_checkpoint
from sparse_bitnet.cli.main import main
from sparse_bitnet.errors import UserError
from sparse_bitnet.export import export_checkpoint
from sparse_bitnet.export.export_checkpoint import export
from sparse_bitnet.export.export_config import ExportConfig
from sparse_bitnet.export.model_card import read_record
from sparse_bitnet.export.pack_checkpoint import pack_checkpoint
from sparse_bitnet.export.verify import Verification, text_to_verify, verify

BITNET = ExportConfig(format="bitnet", embeddings="f32")


@pytest.fixture
def exported(checkpoint: Path, tmp_path: Path) -> Path:
    export(checkpoint, tmp_path / "out", BITNET)
    return tmp_path / "out"


def verified(source, exported: Path, config: ExportConfig, on_progress=None) -> Verification:
    return verify(source, exported, config, text_to_verify(source, config), on_progress)


@pytest.mark.parametrize(
    ("embeddings", "bound", "difference"), [("f32", 0.002, 2e-5), ("bf16", 0.03, 0.02)]
)
def test_an_export_passes_its_verification(
    source, tmp_path: Path, embeddings, bound: float, difference: float
) -> None:
    seen: list[tuple[int, int]] = []
    config = ExportConfig(format="bitnet", embeddings=embeddings)
    export(source.folder, tmp_path / "out", config)
    verification = verified(source, tmp_path / "out", config, lambda *now: seen.append(now))
    assert verification.failures == []
    assert verification.mean_difference < difference
    assert verification.tokens > 300
    assert verification.reader.startswith("transformers ")
    assert verification.bound == pytest.approx(bound * 2**0.5, rel=0.05)
    assert seen[-1] == (2 * verification.tokens, 2 * verification.tokens)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        # What a reader that quantises masked weights again would make of a scale.
        ("model.layers.0.mlp.down_proj.weight_scale", lambda scale: scale / 0.654),
        # A code of one in four rows moved by one place.
        ("model.layers.1.self_attn.v_proj.weight", lambda weight: weight ^ 1),
        ("model.norm.weight", lambda weight: weight * float("nan")),
    ],
)
def test_an_export_that_differs_fails_its_verification(source, exported: Path, name: str, change):
    edit_tensors(exported, {name: change})
    failures = verified(source, exported, BITNET).failures
    assert any(failure.startswith("log-probabilities") for failure in failures)


def test_another_tokenizer_fails_the_verification(source, exported: Path) -> None:
    path = exported / "tokenizer.json"
    content = json.loads(path.read_text("utf-8"))
    content["model"]["merges"] = content["model"]["merges"][:-40]
    path.write_text(json.dumps(content))
    assert verified(source, exported, BITNET).failures == ["token ids differ"]


def test_the_data_is_found_away_from_where_training_ran(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "project" / "runs" / "one"
    (run / "final").mkdir(parents=True)
    (run / "config.json").write_text(json.dumps({"data": "data/words"}))
    data = tmp_path / "project" / "data" / "words"
    monkeypatch.chdir(tmp_path)
    assert read_record(run / "final").data_folder is None
    data.mkdir(parents=True)
    (data / "manifest.json").write_text("{}")
    assert read_record(run / "final").data_folder == data


def test_the_text_to_verify_with_can_be_chosen(source, exported: Path, tmp_path: Path) -> None:
    text = tmp_path / "words.txt"
    text.write_text("some words to predict " * 40)
    config = dataclasses.replace(BITNET, verify=True, text=str(text), verify_tokens=50)
    verification = verified(source, exported, config)
    assert (verification.text, verification.tokens) == ("words.txt", 50)
    text.write_text("")
    with pytest.raises(UserError):
        export(source.folder, tmp_path / "no", config)
    assert not (tmp_path / "no").exists()


def test_an_absent_reader_is_named(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    format = "compressed-tensors-w2a8"
    message = f"compressed-tensors, which reads {format}, is not installed (pip install"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=f"--verify: {re.escape(message)}.*; without --verify"):
        export(checkpoint, tmp_path / "out", ExportConfig(format=format, verify=True))
    assert list(tmp_path.iterdir()) == []


def test_the_command_prints_a_table_and_the_card_keeps_it(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    main(["export", str(checkpoint), str(out), "--to", "bitnet", "--verify"])
    printed = capsys.readouterr().out
    assert "best token" in printed
    assert "(bound 1%)" in printed
    assert "## Checked against the trained model" in (out / "README.md").read_text("utf-8")


def test_the_command_exits_with_2_when_out_of_bounds(
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong = open_checkpoint(checkpoint)

    def doubled(layer: str):
        codes, weight_scale = wrong.ternary(layer)
        return codes, 2 * weight_scale

    faulty = changed(wrong, ternary=doubled)
    monkeypatch.setattr(export_checkpoint, "open_checkpoint", lambda checkpoint, *kinds: faulty)
    command = ["export", str(checkpoint), str(tmp_path / "out"), "--to", "bitnet", "--verify"]
    with pytest.raises(SystemExit) as stopped:
        main(command)
    assert stopped.value.code == 2
    assert "verification failed: log-probabilities" in capsys.readouterr().err


def test_an_export_of_a_packed_model_passes(checkpoint: Path, tmp_path: Path) -> None:
    pack_checkpoint(checkpoint, tmp_path / "packed", embeddings="float32")
    verified_export(tmp_path / "packed", tmp_path / "out", "bitnet", embeddings="f32")
