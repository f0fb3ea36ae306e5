# SPDX-License-Identifier: Apache-2.0
"""GGUF files and folders of other tools run on the CPU engine, packed once."""

import hashlib
import http.server
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from small_models import CHAT_TEMPLATE, write_models
from sparse_bitnet.checkpoint.model_folder import local_folder
from sparse_bitnet.checkpoint.open_checkpoint import resolve_checkpoint
from sparse_bitnet.cli.main import main
from sparse_bitnet.engine.engine_options import EngineOptions
from sparse_bitnet.errors import UserError
from sparse_bitnet.export.export_checkpoint import export
from sparse_bitnet.export.export_config import ExportConfig
from sparse_bitnet.generation.open_model import open_model

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
def test_packed_once_and_run(
    models: Path, cache: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for packs in (True, False):
        main(["generate", str(models / name), *GREEDY])
        found = capsys.readouterr()
        texts.append(found.out)
        assert ("packing" in found.err) == packs
    assert texts[0] == texts[1] != ""
    (folder,) = (path for path in cache.iterdir() if path.is_dir())
    assert (folder / "config.json").is_file()
    os.utime(
        models / name if name.endswith("gguf") else models / name / "model.safetensors", (1, 1)
    )
    main(["generate", str(models / name), *GREEDY])
    assert "packing" in capsys.readouterr().err


def test_foreign_models_are_scored(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("some words and more words " * 9)
    main(
        [
            "evaluate",
            str(models / "bitnet"),
            "--engine",
            "cpu",
            "--data",
            str(tmp_path / "text.txt"),
        ]
    )
    assert "on cpu engine" in capsys.readouterr().out


def test_engine_tokenizer_template_and_end(models: Path) -> None:
    opened = open_model(models / "model.gguf", EngineOptions(threads=1))
    assert opened.engine_name == "cpu"
    assert opened.end_tokens == {opened.tokenizer.token_id("<|endoftext|>")}
    config = json.loads(Path(opened.folder, "tokenizer_config.json").read_text())
    assert config["chat_template"] == CHAT_TEMPLATE
    opened.engine.close()


def _oid(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


class _Hub(http.server.BaseHTTPRequestHandler):
    """A hub with one model, whose commit is 40 times "a" and which has a branch `old`."""

    folder: Path
    asked: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.asked.append(self.path)
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/owner/name/revision/"):
            files = [{"rfilename": file.name} for file in self.folder.iterdir() if file.is_file()]
            return self._send(
                json.dumps({"id": "owner/name", "sha": "a" * 40, "siblings": files}).encode()
            )
        if path.startswith("/api/models/owner/name/tree/"):
            files = [
                {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": _oid(file)}
                for file in self.folder.iterdir()
                if file.is_file()
            ]
            return self._send(json.dumps(files).encode())
        file = self.folder / path.rpartition("/")[2]
        if path.startswith("/owner/name/resolve/") and file.is_file():
            return self._send(file.read_bytes(), file)
        self.send_error(404)
        return None

    def _send(self, data: bytes, file: Path | None = None) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Repo-Commit", "a" * 40)
        if file is not None:
            self.send_header("ETag", f'"{_oid(file)}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def hub(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What a local hub was asked for; huggingface_hub talks to it and keeps its cache in `tmp_path`."""
    from huggingface_hub import constants, hf_api

    _Hub.folder, _Hub.asked = tmp_path / "hub", []
    _Hub.folder.mkdir()
    for source in (models / "model.gguf", *(models / "bitnet").iterdir()):
        (_Hub.folder / source.name).write_bytes(source.read_bytes())
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        address + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setattr(hf_api.api, "endpoint", address)
    yield _Hub.asked
    server.shutdown()
    thread.join()
    server.server_close()


def test_hub_ids(
    models: Path, hub: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model, a file of one, each with a revision; what was fetched is found without the network."""
    for name, local in (("owner/name@old", "bitnet"), ("owner/name/model.gguf@old", "model.gguf")):
        main(["generate", str(models / local), *GREEDY])
        expected = capsys.readouterr().out
        main(["generate", name, *GREEDY])
        assert capsys.readouterr().out == expected
    (tmp_path / "text.txt").write_text("some words and more words " * 9)
    main(["evaluate", "owner/name/model.gguf@old", "--data", str(tmp_path / "text.txt")])
    assert "on cpu engine" in capsys.readouterr().out
    assert any("/revision/old" in path for path in hub)
    assert any("/resolve/old/model.gguf" in path for path in hub)
    folder = local_folder("owner/name@old", ("*.json",))
    assert (folder / "config.json").is_file()
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
def test_a_name_of_which_no_file_can_be_is_one_line(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--port", "0"] if verb == "serve" else []
    with pytest.raises(SystemExit, match="2"):
        main([verb, "a" * 300, *options])
    assert capsys.readouterr().err.startswith("sparse-bitnet: cannot read aaa")
