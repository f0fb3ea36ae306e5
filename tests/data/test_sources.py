# SPDX-License-Identifier: Apache-2.0
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from texts import some_texts, write_jsonl

from sparse_bitnet.data.documents import PIECE_CHARACTERS, TRAIN, VALIDATION
from sparse_bitnet.data.sources import PythonSource, TextSource, parse_source
from sparse_bitnet.errors import UserError


def texts_of(source: TextSource, split: str | None = None) -> list[str]:
    return [d.text for d in source.documents() if split is None or d.split == split]


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A folder with one file of each kind, and one that is not text."""
    folder = tmp_path / "mixed"
    (folder / "sub").mkdir(parents=True)
    write_jsonl(folder / "a.jsonl", some_texts(20, seed=1))
    (folder / "b.jsonl.zst").write_bytes(zstandard.compress((folder / "a.jsonl").read_bytes()))
    table = pyarrow.table({"text": some_texts(20, seed=2)})
    pyarrow.parquet.write_table(table, folder / "c.parquet")
    (folder / "sub" / "d.txt").write_text("A whole book.")
    (folder / "README.md").write_text("no text")
    (folder / "sub" / "scan.pdf").write_text("no text")
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    (folder / "link.txt").symlink_to(tmp_path / "elsewhere")
    return folder


def test_folders_globs_and_lists_read_files_of_every_kind(mixed, capsys):
    a, c = some_texts(20, seed=1), some_texts(20, seed=2)
    everything = parse_source(str(mixed))
    said = "skipped, not text (4): README.md, link, link.txt, sub/scan.pdf\n"
    assert capsys.readouterr().err.endswith(f"mixed: {said}")
    assert texts_of(everything) == [*a, *a, *c, "A whole book."]
    for name in ("loop", "again"):
        (mixed / "sub" / name).symlink_to("..")
    (mixed / "sub" / ".hidden.txt").write_text("hidden")
    for pattern in ("**/*.txt", "**/sub/*.txt", "sub/loop/*/d.txt"):
        assert texts_of(parse_source(f"{mixed}/{pattern}")) == ["A whole book."]
    assert texts_of(parse_source(f"{mixed}/*/.*.txt")) == ["hidden"]
    listed = parse_source(f"{mixed}/c.parquet,{mixed}/a.jsonl,{mixed}/*.parquet")
    assert texts_of(listed) == [*c, *a]


def test_split_of_files_follows_the_text_alone(tmp_path: Path) -> None:
    texts = some_texts(2000)
    forward = write_jsonl(tmp_path / "forward.jsonl", texts)
    backward = write_jsonl(tmp_path / "backward.jsonl", texts[::-1])
    first = parse_source(str(forward), validation_fraction=0.1)
    second = parse_source(str(backward), validation_fraction=0.1)
    validation = texts_of(first, VALIDATION)
    assert 150 < len(validation) < 250
    assert set(validation) == set(texts_of(second, VALIDATION))
    assert len(texts_of(first, TRAIN)) == 2000 - len(validation)


def test_validation_can_have_its_own_source(tmp_path: Path) -> None:
    train = write_jsonl(tmp_path / "train.jsonl", some_texts(50, seed=1))
    held_out = write_jsonl(tmp_path / "held-out.jsonl", some_texts(30, seed=2))
    source = parse_source(str(train), validation=str(held_out), limit_bytes=500)
    assert texts_of(source, TRAIN) == some_texts(50, seed=1)[: len(texts_of(source, TRAIN))]
    assert texts_of(source, VALIDATION) == some_texts(30, seed=2)
    assert source.describe()["validation"]["files"][0]["name"] == "held-out.jsonl"


@pytest.mark.parametrize("size", [500, 10**9])
def test_limit_stops_after_the_document_that_reaches_it(tmp_path: Path, size: int) -> None:
    source = parse_source(str(write_jsonl(tmp_path / "a.jsonl", some_texts(40))), limit_bytes=size)
    before = itertools.accumulate((len(text.encode()) for text in some_texts(40)), initial=0)
    expected = [text for text, read in zip(some_texts(40), before, strict=False) if read < size]
    assert texts_of(source) == expected
    assert list(source.documents())[-1].progress == 1.0


def test_texts_beside_conversations_take_turns(tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "r.jsonl", ['[{"role":"assistant","content":"1"}]'], "messages")
    names = [str(write_jsonl(tmp_path / f"{n}.jsonl", [str(n) * n] * 6)) for n in (7, 2)]
    for limit, expected in ((20, "722227"), (None, "722227227777")):
        source = parse_source(str(rows), chat=True, beside=",".join(names), beside_bytes=limit)
        beside = [document.text[0] for document in source.documents() if document.beside]
        assert "".join(beside) == expected


def test_description_depends_on_the_content(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", some_texts(10))
    before = parse_source(str(path)).describe()
    (tmp_path / "elsewhere").mkdir()
    copy = tmp_path / "elsewhere" / "a.jsonl"
    copy.write_bytes(path.read_bytes())
    assert parse_source(f"{tmp_path}/elsewhere/*.jsonl").describe() == before
    copy.write_bytes(path.read_bytes().replace(b"quick", b"quack"))
    assert parse_source(str(copy)).describe() != before
    assert parse_source(str(path), validation_fraction=0.2).describe() != before
    assert parse_source(str(path), limit_bytes=100).describe() != before
    assert json.loads(json.dumps(before)) == before


def test_bad_sources_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "image.png").write_bytes(b"x")
    (tmp_path / "folder").mkdir()
    for spec, message in {
        f"{tmp_path}/*.parquet": "no file matches '.*parquet'",
        f"{tmp_path}/folder": "no file matches '.*folder'",
        f"{tmp_path}/absent.jsonl": r"no such file: .*absent\.jsonl",
        f"{tmp_path}/empty.jsonl": r"empty\.jsonl: the file is empty",
        f"{tmp_path}/image.png": r"image\.png: unknown kind of file; known are \.jsonl",
        "hub:a/b/c/d": "not a hub data set: 'a/b/c/d'",
        "hub:": "not a hub data set: ''",
        f"{tmp_path}/a.jsonl,": "empty name between commas: remove a comma",
    }.items():
        with pytest.raises(UserError, match=message):
            parse_source(spec)


def test_contradicting_options_are_refused(tmp_path: Path) -> None:
    path = str(write_jsonl(tmp_path / "a.jsonl", ["x"]))
    with pytest.raises(UserError, match=r"validation fraction 1\.5 is not in"):
        parse_source(path, validation_fraction=1.5)
    with pytest.raises(UserError, match="no columns"):
        parse_source("python-stdlib", column="text")
    with pytest.raises(UserError, match=r"--validation .*a\.jsonl is SOURCE itself"):
        parse_source(str(tmp_path), validation=path)
    (tmp_path / "link.jsonl").symlink_to(path)
    with pytest.raises(UserError, match=r"--validation .*link\.jsonl is SOURCE itself"):
        parse_source(path, validation=str(tmp_path / "link.jsonl"))
    parse_source("python-stdlib", column="text", validation=path)
    for specs in (("python-stdlib", path), (path, "python-packages")):
        with pytest.raises(UserError, match=r"python-\w+ has no columns; leave out --chat"):
            parse_source(specs[0], validation=specs[1], chat=True)


def test_files_without_text_beside_others_are_skipped(tmp_path: Path) -> None:
    full = pyarrow.table({"text": some_texts(20)})
    pyarrow.parquet.write_table(full.slice(0, 0), tmp_path / "0.parquet")
    pyarrow.parquet.write_table(full, tmp_path / "1.parquet")
    (tmp_path / "2.jsonl").touch()
    source = parse_source(str(tmp_path), near_duplicates=False)
    assert [d.text for d in source.documents() if not d.skipped] == some_texts(20)
    skipped = [d.skipped for d in source.documents() if d.skipped]
    assert skipped == [
        f"{tmp_path / name}: no text in this file" for name in ("0.parquet", "2.jsonl")
    ]
    (tmp_path / "3.jsonl").touch()
    for spec in (f"{tmp_path}/0.parquet", f"{tmp_path}/2.jsonl,{tmp_path}/3.jsonl"):
        with pytest.raises(UserError, match="no text in this file"):
            texts_of(parse_source(spec))


def test_a_path_is_not_read_as_a_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("books").mkdir()
    for spec in ("books/absent", "./absent", "absent/train.jsonl", "~/absent", "no/folder"):
        with pytest.raises(UserError, match="no such file"):
            parse_source(spec)
    with pytest.raises(UserError, match=r"file: no/folder; a hub data set is hub:no/folder$"):
        parse_source("no/folder")


def test_hub_data_set_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"{number} " + "x" * 300_000 for number in range(20)]

    def rows() -> Iterator[dict[str, Any]]:
        for number, text in enumerate(texts):
            yield {"content": text, "url": f"http://{number}"}
            yield {"content": "", "url": ""}

    asked = []

    def load_dataset(*arguments: Any, **options: Any) -> datasets.IterableDataset:
        asked.append((arguments, options))
        return datasets.IterableDataset.from_generator(rows)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(huggingface_hub, "dataset_info", lambda *_, **__: None)
    source = parse_source("hub:tiiuae/falcon-refinedweb", column="content", validation_fraction=0.2)
    assert texts_of(source) == texts
    assert asked == [(("tiiuae/falcon-refinedweb", None), {"split": "train", "streaming": True})]
    with pytest.raises(UserError, match="no column 'text'; choose one with --column: content, url"):
        texts_of(parse_source("hub:tiiuae/falcon-refinedweb"))


def test_a_broken_hub_stream_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield {"text": "a"}
        raise ConnectionError("the line\nis dead")

    stream = datasets.IterableDataset.from_generator(rows)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: stream)
    monkeypatch.setattr(huggingface_hub, "dataset_info", lambda *_, **__: None)
    with pytest.raises(UserError, match=r"reading 'a/b' stopped: .*the same command resumes"):
        texts_of(parse_source("hub:a/b"))


def book(words: int) -> str:
    paragraphs = [" ".join(some_texts(5, seed=number)) for number in range(words // 150)]
    return "\n\n".join(paragraphs)


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_pieces_are_held_out_of_few_long_documents(tmp_path: Path, kind: str) -> None:
    text = book(100_000)
    if kind == "txt":
        path = tmp_path / "book.txt"
        path.write_text(text, "utf-8")
    else:
        path = write_jsonl(tmp_path / "books.jsonl", [text, "A short one.", text[::-1]])
    source = parse_source(str(path))
    held_out, kept = texts_of(source, VALIDATION), texts_of(source, TRAIN)
    assert 0.003 < sum(map(len, held_out)) / sum(map(len, held_out + kept)) < 0.03
    assert max(map(len, held_out)) <= 3 * PIECE_CHARACTERS
    assert all(each.endswith("\n\n") for each in held_out), "whole paragraphs"
    assert max(map(len, kept)) > 10 * PIECE_CHARACTERS, "the rest stays together"
    assert "".join(texts_of(source)).startswith(text)


@pytest.mark.parametrize("characters", [150, 500, 4_500, 9_000])
@pytest.mark.parametrize("kind", ["txt", "jsonl", "chat", "repeated"])
def test_most_of_a_small_text_is_for_training(tmp_path: Path, characters: int, kind: str) -> None:
    for seed in range(30):
        text = "".join(some_texts(100, seed=seed)).encode("ascii", "replace").decode()[:characters]
        parts = [text[: characters * 4 // 5], text[characters * 4 // 5 :]]
        path = tmp_path / f"{seed}.jsonl"
        if kind == "jsonl":
            write_jsonl(path, parts)
        elif kind == "chat":
            write_jsonl(
                path, [[{"role": "assistant", "content": each}] for each in parts], "messages"
            )
        else:
            path = path.with_suffix(".txt")
            path.write_text(
                "\n\n".join([text[: characters // 4]] * 4) if kind == "repeated" else text
            )
        source = parse_source(str(path), chat=kind == "chat")
        held_out, kept = texts_of(source, VALIDATION), texts_of(source, TRAIN)
        assert len("".join(held_out)) <= len("".join(kept))


def test_many_documents_stay_whole(tmp_path: Path) -> None:
    texts = [*some_texts(1000), book(10_000)]
    source = parse_source(str(write_jsonl(tmp_path / "a.jsonl", texts)))
    assert texts_of(source) == texts
    assert "piece" not in source.describe()
    assert parse_source(str(tmp_path / "a.jsonl"), validation_fraction=0.005).describe()["piece"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "lib"
    for number in range(200):
        folder = root / f"package{number % 7}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"module{number}.py").write_text(f"value = {number}\n")
    skipped = ["site-packages/a.py", "test/b.py", "x/tests/c.py", "config-3.11-x/d.py"]
    skipped += ["encodings/cp437.py", "pydoc_data/topics.py", "html/entities.py", "stringprep.py"]
    for name in (*skipped, "_sysconfigdata_linux.py", "notes.txt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("skipped = True\n")
    (root / "empty.py").touch()
    (root / "latin.py").write_bytes("# naïve\n".encode("latin-1"))
    (root / "binary.py").write_bytes(b"x = '\0'\n")
    return root


def python_files(*roots: Path, **options: float) -> PythonSource:
    return PythonSource(name="python-packages", roots=roots, **options)


def test_generated_and_duplicate_python_files_are_skipped(tree: Path) -> None:
    texts = [document.text for document in python_files(tree).documents()]
    assert sorted(texts) == sorted(f"value = {number}\n" for number in range(200))


def test_order_and_split_follow_the_path_below_the_root(tree: Path, tmp_path: Path) -> None:
    documents = list(python_files(tree, validation_fraction=0.2).documents())
    tree.rename(tmp_path / "moved")
    moved = python_files(tmp_path / "moved", validation_fraction=0.2)
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
        d.text: d.split
        for d in python_files(tmp_path / "moved", validation_fraction=0.2).documents()
    }
    assert {d.text: d.split for d in documents}.items() <= by_text.items()


def test_a_folder_without_python_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="python-packages: no Python source files under"):
        list(python_files(tmp_path).documents())
