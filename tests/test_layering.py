# SPDX-License-Identifier: Apache-2.0
"""A file imports only from rows above it in the tree in CONTRIBUTING.md."""

import ast
import graphlib
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src"

# The leaf `_cpu` is the compiled extension. `__init__`, `__main__` and `cli` may reach everything.
PAPER = "sparse_bitnet_paper"
ROWS: dict[str, int] = {
    "_cpu": 0,
    "errors": 0,
    "files": 0,
    "host": 0,
    "progress": 0,
    "provenance": 1,
    "pattern": 1,
    "presets": 1,
    "variants": 1,
    "layer_config": 2,
    "packing": 3,
    "ops": 4,
    "nn": 5,
    "checkpoint": 6,
    "data": 7,
    "training": 8,
    "evaluation": 9,
    "export": 10,
    "engine": 11,
    "generation": 12,
    "serve": 13,
    "bench": 14,
    PAPER: 15,
    "cli": 16,
    "__main__": 17,
}
REACH_EVERYTHING = ("cli", "__main__")
OF_THE_PACKAGE = {"__version__", "__file__"}
SAME_ROW_ALLOWED = {("files", "errors")}
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}

MODULES = sorted(SOURCE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


KNOWN = {module_name(path) for path in MODULES} | {"sparse_bitnet._cpu"}


def imported_modules(tree: ast.AST, module: str, is_package: bool) -> set[str]:
    """Every module of ours that the code names in an import, at any depth of nesting."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names if alias.name != "sparse_bitnet")
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "sparse_bitnet":
            if node.attr not in OF_THE_PACKAGE:
                found.add("sparse_bitnet")
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                package = package[: len(package) - node.level + 1]
                base = ".".join([*package, *([node.module] if node.module else [])])
            for alias in node.names:
                if base == "sparse_bitnet" and alias.name in OF_THE_PACKAGE:
                    continue
                submodule = f"{base}.{alias.name}"
                found.add(submodule if submodule in KNOWN else base)
        elif isinstance(node, ast.Call) and node.args:
            name = ast.unparse(node.func)
            target = node.args[0]
            if name.endswith(("import_module", "__import__")) and isinstance(target, ast.Constant):
                found.add(str(target.value))
    return {name for name in found if name.split(".")[0] in ("sparse_bitnet", PAPER)}


def imports_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return imported_modules(tree, module_name(path), path.name == "__init__.py")


def row_name(module: str) -> str:
    """The name in the tree: "sparse_bitnet.data.loader" -> "data", the package itself -> ""; the paper's
    package is one row."""
    if module.split(".")[0] == PAPER:
        return PAPER
    return module.partition(".")[2].partition(".")[0]


def violations(module: str, imported: set[str]) -> list[str]:
    own = row_name(module)
    if own in ("", *REACH_EVERYTHING):
        return []
    found = []
    for name in sorted(imported):
        other = row_name(name)
        if other == "":
            found.append(f"{module} imports the package itself: name the module instead")
        elif other not in ROWS:
            found.append(f"{module} imports {name}, which has no row")
        elif other != own and (own, other) not in SAME_ROW_ALLOWED and ROWS[other] >= ROWS[own]:
            found.append(f"{module} (row {ROWS[own]}) imports {name} (row {ROWS[other]})")
    return found


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_come_from_rows_above(path: Path) -> None:
    assert violations(module_name(path), imports_of(path)) == []


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_every_module_has_a_row_and_a_telling_name(path: Path) -> None:
    name = row_name(module_name(path))
    assert name == "" or name in ROWS
    assert not FORBIDDEN_NAMES & set(path.relative_to(SOURCE).with_suffix("").parts)
    assert "24" not in path.stem


def test_no_import_cycle() -> None:
    graph = {
        module_name(path): imports_of(path) - {module_name(path)}
        for path in MODULES
        if row_name(module_name(path)) not in ("", *REACH_EVERYTHING)
    }
    graphlib.TopologicalSorter(graph).prepare()


def test_package_and_command_table_import_nothing_heavy() -> None:
    for path in (SOURCE / "sparse_bitnet/__init__.py", SOURCE / "sparse_bitnet/cli/main.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        for node in top:
            names = (
                [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
            )
            roots = {str(name).split(".")[0] for name in names}
            assert not roots & {"torch", "transformers", "numpy", "datasets"}, path


@pytest.mark.parametrize(
    ("module", "code", "refused"),
    [
        ("sparse_bitnet.nn.layer", "from sparse_bitnet.ops.nm_mask import nm_mask", False),
        ("sparse_bitnet.ops.mask_words", "from sparse_bitnet.nn.layer import select", True),
        ("sparse_bitnet.ops.mask_words", "def f():\n    import sparse_bitnet.nn.layer", True),
        ("sparse_bitnet.ops.mask_words", "from sparse_bitnet import nn", True),
        ("sparse_bitnet.pattern", "from . import nn", True),
        ("sparse_bitnet.ops.mask_words", "importlib.import_module('sparse_bitnet.nn.layer')", True),
        ("sparse_bitnet.ops.mask_words", "import sparse_bitnet\nsparse_bitnet.nm_mask", True),
        ("sparse_bitnet.ops.mask_words", "import sparse_bitnet\nsparse_bitnet.__version__", False),
        ("sparse_bitnet.ops.mask_words", "from sparse_bitnet import nm_mask", True),
        ("sparse_bitnet.ops.mask_words", "from sparse_bitnet import __version__", False),
        ("sparse_bitnet.data.loader", "from sparse_bitnet.data.shards import TokenDataset", False),
        (
            "sparse_bitnet.data.loader",
            "from sparse_bitnet.training.config import TrainConfig",
            True,
        ),
        ("sparse_bitnet.errors", "from sparse_bitnet.files import write_atomic", True),
        ("sparse_bitnet.files", "from sparse_bitnet.errors import UserError", False),
        ("sparse_bitnet.ops.cpu", "from sparse_bitnet import _cpu", False),
        ("sparse_bitnet.cli.train", "from sparse_bitnet.training.train_run import train", False),
        ("sparse_bitnet.nn.layer", "import numpy", False),
        ("sparse_bitnet_paper.runs", "from sparse_bitnet.nn.layer import select", False),
        ("sparse_bitnet_paper.runs", "from sparse_bitnet_paper.scales import Scale", False),
        ("sparse_bitnet_paper.runs", "from sparse_bitnet.cli.train import main", True),
        ("sparse_bitnet.bench.record", "from sparse_bitnet_paper.scales import Scale", True),
        ("sparse_bitnet.cli.report", "from sparse_bitnet_paper.scales import Scale", False),
    ],
)
def test_the_rule_itself(module: str, code: str, refused: bool) -> None:
    assert bool(violations(module, imported_modules(ast.parse(code), module, False))) == refused
