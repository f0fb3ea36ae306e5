# SPDX-License-Identifier: Apache-2.0
"""Everything that docs/method.md links to exists under the name it gives."""

import ast
import re
from pathlib import Path

import pytest

from sparse_bitnet.nn.layer import SparseBitConfig

METHOD = Path(__file__).resolve().parents[1] / "docs" / "method.md"
TEXT = METHOD.read_text(encoding="utf-8")
LINKS = re.findall(r"\[`([\w.]+)`\]\(([^)]+)\)", TEXT)


def defined_names(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(ast.unparse(target) for target in targets)
    return names


@pytest.mark.parametrize(("name", "target"), LINKS, ids=[name for name, _ in LINKS])
def test_link_names_what_its_file_defines(name: str, target: str) -> None:
    path = (METHOD.parent / target).resolve()
    module, _, attribute = name.partition(".")
    assert path.stem == module
    assert not attribute or attribute in defined_names(path)


def test_every_equation_is_mapped() -> None:
    assert all(f"| eq. {number}" in TEXT for number in range(1, 7))


def test_text_forms_parse() -> None:
    forms = re.findall(r"`((?:ternary|full)-\d+:\d+[\w=,]*)`", TEXT)
    assert len(set(forms)) >= 7
    for form in forms:
        assert str(SparseBitConfig.parse(form)) == form


def test_named_tests_exist() -> None:
    for name in re.findall(r"`(?:tests/(?:\w+/)?)?(test_\w+\.py)`", TEXT):
        assert list((METHOD.parents[1] / "tests").rglob(name)), name
