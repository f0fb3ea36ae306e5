# SPDX-License-Identifier: Apache-2.0
"""Chat templates reach other tools, and the CPU engine, as transformers reads them."""

import os
from pathlib import Path

import pytest

from exported import export_gguf
from factories import edit_json
from sparse_bitnet.checkpoint.gguf_file import GgufFile
from sparse_bitnet.checkpoint.load import load_tokenizer
from sparse_bitnet.engine.engine_options import EngineOptions
from sparse_bitnet.export.export_checkpoint import export
from sparse_bitnet.export.export_config import ExportConfig
from sparse_bitnet.export.pack_checkpoint import pack_checkpoint
from sparse_bitnet.generation.open_model import runnable_folder


def test_gguf_takes_the_template_that_transformers_takes(edited, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="pip install gguf")
    folder = edited()
    edit_json(folder / "tokenizer_config.json", chat_template="old")
    (folder / "chat_template.jinja").write_text("new")

    def templates(out: str) -> dict[str, object]:
        metadata = GgufFile(export_gguf(folder, tmp_path / out, "q2_0")).metadata
        return {key: value for key, value in metadata.items() if ".chat_template" in key}

    assert templates("one") == {"tokenizer.chat_template": "new"}
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert templates("several") == {
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template": "new",
        "tokenizer.chat_template.tool_use": "tools",
    }


def test_templates_by_name_are_copied(edited, tmp_path: Path) -> None:
    folder = edited()
    (folder / "chat_template.jinja").write_text("plain")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    export(folder, tmp_path / "dense", ExportConfig(format="dense"))
    pack_checkpoint(folder, tmp_path / "packed")
    for out in ("dense", "packed"):
        template = load_tokenizer(tmp_path / out).chat_template
        assert template == {"default": "plain", "tool_use": "tools"}


def test_a_changed_template_is_packed_again(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARSE_BITNET_CACHE", str(tmp_path / "cache"))
    export(checkpoint, tmp_path / "bitnet", ExportConfig(format="bitnet"))
    template = tmp_path / "bitnet" / "chat_template.jinja"
    folders = []
    for second, text in enumerate(("old", "new")):
        template.write_text(text)
        os.utime(template, (second, second))
        folders.append(Path(runnable_folder(tmp_path / "bitnet", EngineOptions())))
    assert [(folder / template.name).read_text() for folder in folders] == ["old", "new"]
