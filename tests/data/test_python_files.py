# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys
from pathlib import Path

import pytest

from sparse_bitnet.data.documents import TRAIN, VALIDATION
from sparse_bitnet.data.python_files import PythonSource
from sparse_bitnet.data.sources import parse_source
from sparse_bitnet.errors import UserError


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "lib"
    for number in range(200):
        folder = root / f"package{number % 7}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"module{number}.py").write_text(f"value = {number}\n")
    for skipped in ("site-packages/a.py", "test/b.py", "x/tests/c.py", "config-3.11-x/d.py"):
        (root / skipped).parent.mkdir(parents=True, exist_ok=True)
        (root / skipped).write_text("skipped = True\n")
    (root / "_sysconfigdata_linux.py").write_text("skipped = True\n")
    (root / "empty.py").touch()
    (root / "latin.py").write_bytes("# naïve\n".encode("latin-1"))
    (root / "binary.py").write_bytes(b"x = '\0'\n")
    (root / "notes.txt").write_text("no Python")
    for table in (
        "encodings/cp437.py",
        "pydoc_data/topics.py",
        "html/entities.py",
        "stringprep.py",
    ):
        (root / table).parent.mkdir(exist_ok=True)
        (root / table).write_text("table = {}\n")
    return root


def source_of(*roots: Path, **options: float) -> PythonSource:
    return PythonSource(name="python-packages", roots=roots, **options)


def test_which_files(tree: Path) -> None:
    texts = [document.text for document in source_of(tree).documents()]
    assert sorted(texts) == sorted(f"value = {number}\n" for number in range(200))


def test_order_and_split_follow_the_path_below_the_root(tree: Path, tmp_path: Path) -> None:
    documents = list(source_of(tree, validation_fraction=0.2).documents())
    tree.rename(tmp_path / "moved")
    moved = source_of(tmp_path / "moved", validation_fraction=0.2)
    assert list(moved.documents()) == documents
    splits = [document.split for document in documents]
    assert 20 < splits.count(VALIDATION) < 60
    # Neither split lies at one end, and the order is not that of the names.
    assert VALIDATION in splits[:50]
    assert VALIDATION in splits[-50:]
    assert [document.text for document in documents] != sorted(d.text for d in documents)
    # More text changes no file's side.
    (tmp_path / "moved" / "new.py").write_text("new = True\n")
    by_text = {
        d.text: d.split for d in source_of(tmp_path / "moved", validation_fraction=0.2).documents()
    }
    assert {d.text: d.split for d in documents}.items() <= by_text.items()


def test_copies_and_line_ends(tree: Path) -> None:
    before = list(source_of(tree).documents())
    (tree / "copy.py").write_bytes(b"value = 7\r\n")
    after = list(source_of(tree).documents())
    assert len(after) == 200
    assert {document.text for document in after} == {document.text for document in before}


def test_resumes(tree: Path) -> None:
    source = source_of(tree)
    documents = list(source.documents())
    assert documents[-1].progress == 1.0
    for number in (1, 77, 200):
        assert list(source.documents(documents[number - 1].state)) == documents[number:]


def test_description(tree: Path) -> None:
    before = source_of(tree).describe()
    assert source_of(tree).describe() == before
    assert before["files"] == 200
    (tree / "package0" / "module0.py").write_text("value = 'changed'\n")
    assert source_of(tree).describe() != before


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="python-packages: no Python source files under"):
        list(source_of(tmp_path).documents())


def test_file_that_vanishes(tree: Path) -> None:
    documents = source_of(tree).documents()
    next(documents)
    for path in tree.rglob("*.py"):
        path.unlink()
    with pytest.raises(UserError, match="changed while it was read"):
        list(documents)


def test_standard_library() -> None:
    source = parse_source("python-stdlib")
    size = dict.fromkeys((TRAIN, VALIDATION), 0)
    for document in source.documents():
        size[document.split] += len(document.text.encode())
    assert sum(size.values()) == source.describe()["bytes"] > 5_000_000
    assert 0.01 < size[VALIDATION] / sum(size.values()) < 0.07


def test_installed_packages(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sysconfig

    monkeypatch.setattr(
        sysconfig, "get_paths", lambda: {"purelib": str(tree), "platlib": str(tree)}
    )
    source = parse_source("python-packages", near_duplicates=False)
    assert source.roots == (tree.resolve(),)


def test_sources_do_not_import_torch() -> None:
    modules = "documents python_files text_files sources tokenizer manifest checksums shards loader"
    code = "import sys\n" + "".join(
        f"import sparse_bitnet.data.{module}\n" for module in [*modules.split(), "preparation"]
    )
    code += "assert not {'torch', 'transformers', 'datasets', 'pyarrow', 'rich'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
