# SPDX-License-Identifier: Apache-2.0
"""GGUF files and folders of other tools run on the CPU engine, packed once."""

import json
import os
from pathlib import Path

import pytest

from small_models import CHAT_TEMPLATE, write_models
from sparse_bitnet.checkpoint.model_folder import local_folder
from sparse_bitnet.checkpoint.open_checkpoint import resolve_checkpoint
from sparse_bitnet.cli.main import main
from sparse_bitnet.engine import architecture
from sparse_bitnet.engine.engine_options import EngineOptions
from sparse_bitnet.errors import Unsupported, UserError
from sparse_bitnet.export.export_checkpoint import export
from sparse_bitnet.export.export_config import ExportConfig
from sparse_bitnet.generation.open_model import runnable_folder

pytest.importorskip("sparse_bitnet._cpu")

GREEDY = ["--prompt", "some words", "--max-tokens", "12", "--temperature", "0"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`trained`, `packed`, `bitnet` and a GGUF file `model.gguf`, of one model."""
    folder = write_models(tmp_path_factory.mktemp("models"), chat_template=CHAT_TEMPLATE)
    for format in ("bitnet", "gguf-q2_0"):
        config = ExportConfig(format=format, embeddings="f32")
        export(folder / "trained", folder / format, config)
    (file,) = (folder / "gguf-q2_0").glob("*.gguf")
    file.rename(folder / "model.gguf")
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPARSE_BITNET_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.mark.parametrize("name", ["model.gguf", "bitnet"])
def test_foreign_models_are_packed_once(
    models: Path, cache: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for packs in (True, False):
        main(["generate", str(models / name), *GREEDY])
        printed = capsys.readouterr()
        texts.append(printed.out)
        assert ("packing" in printed.err) == packs
    assert texts[0] == texts[1] != ""
    (folder,) = (path for path in cache.iterdir() if path.is_dir())
    assert (folder / "config.json").is_file()
    os.utime(
        models / name if name.endswith("gguf") else models / name / "model.safetensors", (1, 1)
    )
    main(["generate", str(models / name), *GREEDY])
    assert "packing" in capsys.readouterr().err


def test_a_foreign_model_that_the_engine_lacks_is_not_packed_and_says_so(
    models: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lacks(config: dict, where: str) -> None:
        raise Unsupported(f"{where}: no such layers")

    monkeypatch.setattr(architecture, "read_architecture", lacks)
    folder = runnable_folder(models / "bitnet", EngineOptions())
    assert (folder, cache.exists()) == (str(models / "bitnet"), False)
    assert capsys.readouterr().err == f"running through transformers: {folder}: no such layers\n"


def test_foreign_models_are_scored(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "result.json"
    text.write_text("some words and more words " * 9)
    names = [str(models / name) for name in ("bitnet", "model.gguf")]
    main(["evaluate", *names, "--engine", "cpu", "--data", str(text), "--out", str(out)])
    assert "on cpu engine" in capsys.readouterr().out
    assert [each["checkpoint"] for each in json.loads(out.read_text())] == names


@pytest.fixture
def hub(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Requests to the hub; it has one model, owner/name, with a branch `old`."""
    asked: list[str] = []
    folder = tmp_path / "hub"
    folder.mkdir()
    for source in (models / "model.gguf", *(models / "bitnet").iterdir()):
        (folder / source.name).write_bytes(source.read_bytes())

    def download(repository: str, file: str = "", *, revision: str | None, **_: object) -> str:
        asked.append(f"{repository}/{file}@{revision}")
        if (repository, revision) != ("owner/name", "old") or not (folder / file).exists():
            raise OSError("404")
        return str(folder / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    return asked


def test_hub_ids_files_and_revisions_are_resolved(
    models: Path, hub: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model, a file of one, each with a revision."""
    for name, local in (("owner/name@old", "bitnet"), ("owner/name/model.gguf@old", "model.gguf")):
        main(["generate", str(models / local), *GREEDY])
        expected = capsys.readouterr().out
        main(["generate", name, *GREEDY])
        assert capsys.readouterr().out == expected
    (tmp_path / "text.txt").write_text("some words and more words " * 9)
    main(["evaluate", "owner/name/model.gguf@old", "--data", str(tmp_path / "text.txt")])
    assert "on cpu engine" in capsys.readouterr().out
    assert set(hub) == {"owner/name/@old", "owner/name/model.gguf@old"}
    with pytest.raises(UserError, match=r"hf download owner/other --revision v1"):
        local_folder("owner/other@v1")
    with pytest.raises(UserError, match=r"hf download owner/other a\.gguf"):
        resolve_checkpoint("owner/other/a.gguf")


def test_a_cache_that_cannot_be_written_is_one_line(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPARSE_BITNET_CACHE", "/dev/null/cache")
    with pytest.raises(SystemExit, match="2"):
        main(["generate", str(models / "model.gguf"), "--prompt", "a"])
    assert "cannot write /dev/null/cache/models" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["generate", "chat", "serve"])
def test_an_impossible_file_name_is_one_line(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--port", "0"] if verb == "serve" else []
    with pytest.raises(SystemExit, match="2"):
        main([verb, "a" * 300, *options])
    assert capsys.readouterr().err.startswith("sparse-bitnet: cannot read aaa")
