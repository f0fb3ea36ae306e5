# SPDX-License-Identifier: Apache-2.0
"""Every command, file, option and name in the README and the docs exists."""

import argparse
import ast
import importlib
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import sparse_bitnet
from one_process import run_commands
from sparse_bitnet.cli.main import COMMANDS, main

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "examples/launch/README.md",
]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
PROGRAMS = ("sparse-bitnet", "make", "python", "pip", "torchrun")
OF_OTHERS = ("vllm", "torchrun", "hf")
STANDS_FOR = {"P": "6:8", "C": "int8"}
"""Words for a value in the commands below tables."""


def lines_of(page: Path) -> Iterator[str]:
    """Commands in blocks of shell, and those in a text that name a program and what it is given."""
    text = page.read_text(encoding="utf-8")
    for language, block in BLOCK.findall(text):
        if language in ("", "sh"):
            joined = block.replace("\\\n", " ").splitlines()
            is_shell = language == "sh" or any(
                line.split()[:1] == ["sparse-bitnet"] for line in joined
            )
            yield from (line for line in joined if line.strip() and is_shell)
    for inline in re.findall(r"`([^`]+)`", BLOCK.sub("", text)):
        words = inline.split()
        if words[0] in PROGRAMS and len(words) > 1 and words != ["python", "-c"]:
            yield " ".join(words)


LINES = sorted({(page.name, " ".join(line.split())) for page in PAGES for line in lines_of(page)})


class Parsed(Exception):
    """The options of a command were accepted; it does not run."""


@pytest.fixture
def only_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = argparse.ArgumentParser.parse_known_args

    def parse(*arguments, **options):
        _, more = real(*arguments, **options)
        assert not [word for word in more if word.startswith("-")]  # the others are positions
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse)


@pytest.mark.parametrize(("page", "line"), LINES, ids=lambda value: value[:60])
def test_commands_exist_with_their_options(page, line, only_parsed, capsys):
    words = [word for word in shlex.split(line, comments=True) if word not in ("...", "…")]
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        assert words[0].startswith(("SPARSE_BITNET_", "DATA=", "OUT=", "PROCESSES="))
        words = words[1:]
    program, *rest = words
    if program == "make":
        assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif program == "sparse-bitnet":
        if rest[0] == "COMMAND":
            return
        assert rest[0] in COMMANDS
        if len(rest) == 1:
            return
        # `--help` ends a command too.
        with pytest.raises((Parsed, SystemExit)) as stop:
            main([STANDS_FOR.get(word, word) for word in rest])
        assert not getattr(stop.value, "code", 0), capsys.readouterr().err
    elif program == "python" and rest[0].startswith("benchmarks/"):
        script = (ROOT / rest[0]).read_text()
        for option in (word for word in rest if word.startswith("--")):
            assert f'"{option}"' in script
    elif program.startswith("examples/"):
        assert (ROOT / program).is_file()
    else:
        assert program in OF_OTHERS or words[0] == "pip" or words[:2] == ["python", "-c"]


@pytest.mark.skipif(shutil.which("make") is None, reason="make")
def test_make_uses_the_installed_python(tmp_path):
    (tmp_path / "python3.12").symlink_to("/bin/true")
    done = subprocess.run(
        [str(shutil.which("make")), "-n", f"VENV={tmp_path}/new", "quickstart"],
        **{"cwd": ROOT, "env": {"PATH": str(tmp_path)}, "capture_output": True, "text": True},
    )
    assert f"{tmp_path}/python3.12 -m venv" in done.stdout, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_in_the_pages_parses_and_its_imports_exist(page):
    for language, block in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language == "python":
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and node.module.startswith("sparse_bitnet"):
                    module = importlib.import_module(node.module)
                    assert all(hasattr(module, name.name) for name in node.names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_have_targets(page):
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_documented_commands_are_the_command_table():
    page = (ROOT / "docs/commands.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(COMMANDS)


def test_api_page_has_every_public_name():
    named = re.findall(
        r"^::: sparse_bitnet\.([\w.]+)\.(\w+)$", (ROOT / "docs/api.md").read_text(), re.M
    )
    assert {name: module for module, name in named} == sparse_bitnet._PUBLIC


def test_every_page_has_its_place_in_the_site():
    site = (ROOT / "mkdocs.yml").read_text()
    pages = set(re.findall(r"[\w/-]+\.md", str(yaml.safe_load(site)["nav"])))
    of_root = {"index.md", "changelog.md", "contributing.md", "security.md"}
    docs = ROOT / "docs"
    listed = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    assert pages == {name for name in listed if not name.startswith("results/")} | of_root


def test_every_file_of_the_tree_exists():
    tree = (ROOT / "CONTRIBUTING.md").read_text().split("```")[1]
    folder = ROOT
    for line in filter(None, tree.splitlines()):
        name = line.split()[0]
        if not line.startswith(" "):
            folder = ROOT / name
            assert folder.exists(), name
        else:
            assert (folder / name).exists(), name


ELSEWHERE = {
    "a GPU": r"cuda|--forward int8|bench (decode|kernels|prefill|profile|train)",
    "minutes; tests/paper runs it small": r"quickstart|reproduce|report|distill Qwen|steps (240|1836)",
    "the machine for itself; tests/bench runs it small": r" bench",
    "data sets of others": r"--tasks paper|train-00000",
    "a port, a terminal or a chat model; other tests have them": r" serve| chat |--chat|--from-model",
    "more words to be a command": r"(COMMAND --help|distill|pack|max-restarts)$",
}  # fmt: skip
"""Reasons why commands in the pages are not run as they stand, and patterns of these commands."""
GIVEN = {"RUN": "run", "CHECKPOINT": "run", "CHECKPOINT...": "run", "PACKED": "packed", "2000": "2"}
GIVEN |= {"TEACHER": "run/final", "MODEL": "run/final", "DATA": "data"}
GIVEN |= {"TEXT": "book.txt", "held-out.txt": "book.txt"}
"""Names in the commands -> the files that replace them here."""
MAKE = """
sparse-bitnet export run folder --to compressed-tensors-w8a8
sparse-bitnet export run gguf --to gguf-tq2_0
python -c "from pathlib import Path; [one.rename('model.gguf') for one in Path('gguf').glob('*.gguf')]"
"""


def other_commands(done: list[str]) -> list[str]:
    """Those of all pages that run on a small model in a moment, once each."""
    commands = []
    for _, line in LINES:
        is_elsewhere = any(re.search(pattern, line) for pattern in ELSEWHERE.values())
        if line.startswith("sparse-bitnet ") and not is_elsewhere and line not in done:
            words = [GIVEN.get(word, word) for word in shlex.split(line, comments=True)]
            if words[1] in ("prepare", "distill", "pack", "export", "import"):
                words[3] = "MADE"
            commands.append(shlex.join(words))
    return [each.replace("MADE", f"made-{n}") for n, each in enumerate(dict.fromkeys(commands))]


@pytest.mark.slow
@pytest.mark.train
def test_documented_commands_train_and_run_a_model_outside_the_checkout(tmp_path):
    """The page's commands in their order, in a folder and a shell that know nothing of the project; then
    those of the other pages."""
    (tmp_path / "book.txt").write_text((ROOT / "docs/engine.md").read_text() * 3, encoding="utf-8")
    environment = {
        "HOME": str(tmp_path),
        "PATH": os.environ["PATH"],
        "LANG": "C.UTF-8",
        "HF_HUB_OFFLINE": "1",
        # Other tests have the other core.
        "OMP_NUM_THREADS": "1",
    }
    block = BLOCK.findall((ROOT / "docs/train.md").read_text())[0][1]
    lines = block.replace("--steps 500", "--steps 3").splitlines()
    own, others = len(lines), [*MAKE.split("\n")[1:-1], *other_commands(block.splitlines())]
    lines += others
    commands = [shlex.split(line) for line in lines]
    told = run_commands(commands, cwd=tmp_path, env=environment, stdin="Once")
    for line, done in zip(lines, told, strict=True):
        assert done.code == 0, (line, done.errors)
        assert "Warning" not in done.errors, (line, done.errors)
    assert own == 5
    assert len(others) > 15
    texts = [done.output for line, done in zip(lines, told, strict=True) if "Once" in line]
    assert all(text.startswith("Once upon a time") for text in texts)
