"""The tables of the README and the docs are what benchmarks/render.py makes of the result files."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "render.py"


@pytest.fixture(scope="module")
def rendering() -> ModuleType:
    spec = importlib.util.spec_from_file_location("render", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_documents_are_as_rendered(rendering: ModuleType) -> None:
    tables = 0
    for document in rendering.DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        tables += text.count("<!-- table: ")
        assert rendering.render(text) == text, f"{document}: run {SCRIPT}"
    assert tables >= 7


def test_a_table_without_rows_stays(
    rendering: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "RESULTS", tmp_path)
    text = "a\n<!-- table: peers -->\nold\n<!-- end -->\nb"
    assert rendering.render(text) == text
