# SPDX-License-Identifier: Apache-2.0
"""The programs in benchmarks/ as modules, for the tests of their parts."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[1] / "benchmarks"


def load_script(name: str) -> ModuleType:
    """The module of benchmarks/NAME.py, whose main program does not run."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for their types
    spec.loader.exec_module(module)
    return module
