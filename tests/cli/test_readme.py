"""Every command and file that the README names exists."""

import re
import shlex
from pathlib import Path

import pytest

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
