# SPDX-License-Identifier: Apache-2.0
"""A file imports only from rows above it in the tree in CONTRIBUTING.md."""

import ast
import graphlib
from pathlib import Path

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
    "export": 9,
    "engine": 10,
    "generation": 11,
    "evaluation": 12,
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
    imported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names if alias.name != "sparse_bitnet")
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "sparse_bitnet":
            if node.attr not in OF_THE_PACKAGE:
                imported.add("sparse_bitnet")
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
                imported.add(submodule if submodule in KNOWN else base)
        elif isinstance(node, ast.Call) and node.args:
            name = ast.unparse(node.func)
            target = node.args[0]
            if name.endswith(("import_module", "__import__")) and isinstance(target, ast.Constant):
                imported.add(str(target.value))
    return {name for name in imported if name.split(".")[0] in ("sparse_bitnet", PAPER)}


def imports_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return imported_modules(tree, module_name(path), path.name == "__init__.py")


def row_name(module: str) -> str:
    """The name in the tree, as "data" of sparse_bitnet.data.loader; the paper's package is one row."""
    if module.split(".")[0] == PAPER:
        return PAPER
    return module.partition(".")[2].partition(".")[0]


def violations(module: str, imported: set[str]) -> list[str]:
    own = row_name(module)
    if own in ("", *REACH_EVERYTHING):
        return []
    messages = []
    for name in sorted(imported):
        other = row_name(name)
        if other == "":
            messages.append(f"{module} imports the package itself: name the module instead")
        elif other not in ROWS:
            messages.append(f"{module} imports {name}, which has no row")
        elif other != own and (own, other) not in SAME_ROW_ALLOWED and ROWS[other] >= ROWS[own]:
            messages.append(f"{module} (row {ROWS[own]}) imports {name} (row {ROWS[other]})")
    return messages


def test_imports_come_from_rows_above() -> None:
    wrong = [line for path in MODULES for line in violations(module_name(path), imports_of(path))]
    assert not wrong, "\n".join(wrong)


def test_every_module_has_a_row_and_a_telling_name() -> None:
    names = {row_name(module_name(path)) for path in MODULES} - {""}
    assert not names - ROWS.keys(), "give it a row in ROWS and in CONTRIBUTING.md"
    assert not FORBIDDEN_NAMES & {path.stem for path in MODULES}


def test_no_import_cycle() -> None:
    graph = {
        module_name(path): imports_of(path) - {module_name(path)}
        for path in MODULES
        if row_name(module_name(path)) not in ("", *REACH_EVERYTHING)
    }
    graphlib.TopologicalSorter(graph).prepare()


def test_an_upward_import_breaks_the_rule() -> None:
    for module, code, refused in (
        ("nn.layer", "from sparse_bitnet.ops.nm_mask import nm_mask\nimport numpy", False),
        ("ops.nm_mask", "def f():\n    import sparse_bitnet.nn.layer", True),
        ("ops.nm_mask", "importlib.import_module('sparse_bitnet.nn.layer')", True),
        ("ops.nm_mask", "import sparse_bitnet\nsparse_bitnet.nm_mask", True),
        ("ops.nm_mask", "from sparse_bitnet import __version__, _cpu", False),
        ("pattern", "from . import nn", True),
        ("files", "from sparse_bitnet.errors import UserError", False),
        ("errors", "from sparse_bitnet.files import write_atomic", True),
        ("bench.record", "from sparse_bitnet_paper.scales import Scale", True),
        ("cli.report", "from sparse_bitnet_paper.scales import Scale", False),
    ):
        name = f"sparse_bitnet.{module}"
        messages = violations(name, imported_modules(ast.parse(code), name, False))
        assert bool(messages) == refused, (module, code)
