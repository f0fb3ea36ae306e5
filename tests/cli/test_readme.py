# SPDX-License-Identifier: Apache-2.0
"""Every command and file that the README names exists."""

import os
import re
import shlex
from pathlib import Path

import pytest

from one_process import run_commands
from sparse_bitnet.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
LINES = [line for block in BLOCKS for line in block.splitlines() if line]


@pytest.mark.parametrize("line", LINES)
def test_commands_of_the_readme_exist(line):
    words = shlex.split(line)
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif words[0] == "sparse-bitnet":
        assert words[1] in COMMANDS
    else:
        assert words[:2] in (["pip", "install"], ["python", "-c"])


def test_the_table_of_commands_is_the_command_table():
    table = re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE)
    assert table == list(COMMANDS)


def test_every_file_of_the_tree_exists():
    tree = README.split("## The tree")[1].split("```")[1]
    folder = ROOT
    for line in filter(None, tree.splitlines()):
        name = line.split()[0]
        if not line.startswith(" "):
            folder = ROOT / name
            assert folder.exists(), name
        else:
            assert (folder / name).exists(), name


def test_links_of_the_readme_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if "://" not in target:
            assert (ROOT / target).exists(), target


@pytest.mark.slow
def test_own_text_becomes_a_model_that_runs_away_from_the_checkout(tmp_path):
    """The README's commands in their order, in a folder and a shell that know nothing of the project."""
    (tmp_path / "book.txt").write_text((ROOT / "docs/scale.md").read_text() * 3, encoding="utf-8")
    environment = {
        "HOME": str(tmp_path),
        "PATH": os.environ["PATH"],
        "LANG": "C.UTF-8",
        "HF_HUB_OFFLINE": "1",
        # Other tests have the other core.
        "OMP_NUM_THREADS": "1",
    }
    wanted = {}
    for line in LINES:
        program, *arguments = shlex.split(line.replace("--steps 500", "--steps 3"))
        skipped = ("serve", "bench", "reproduce", "report")
        if program not in ("make", "pip") and arguments[0] not in skipped:
            wanted[line] = [program, *arguments]
    told = run_commands(list(wanted.values()), cwd=tmp_path, env=environment)
    printed = {}
    for line, done in zip(wanted, told, strict=True):
        assert done.code == 0, (line, done.errors)
        assert "Warning" not in done.errors, (line, done.errors)
        printed[line] = done.output
    assert len(printed) == 8
    texts = [text for line, text in printed.items() if " generate " in line]
    assert all(text.startswith("Once upon a time") for text in texts)
