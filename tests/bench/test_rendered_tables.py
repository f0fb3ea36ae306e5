# SPDX-License-Identifier: Apache-2.0
"""The tables of the README and the docs are as benchmarks/render.py renders them from results."""

from pathlib import Path
from types import ModuleType

import pytest

from benchmark_scripts import load_script


@pytest.fixture(scope="module")
def rendering() -> ModuleType:
    return load_script("render")


def test_committed_documents_are_as_rendered(rendering: ModuleType) -> None:
    tables = 0
    for document in rendering.DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        tables += text.count("<!-- table: ")
        assert rendering.render(text) == text, f"{document}: run python benchmarks/render.py"
    assert tables >= 7


def test_a_table_without_rows_stays(
    rendering: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_script("recorded"), "RESULTS", tmp_path)
    text = "a\n<!-- table: peers -->\nold\n<!-- end -->\nb"
    assert rendering.render(text) == text
