# SPDX-License-Identifier: Apache-2.0
"""The programs in benchmarks/ as modules, for the tests of their parts."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[1] / "benchmarks"


def load_script(name: str) -> ModuleType:
    """The module of benchmarks/NAME.py, whose main program does not run."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return importlib.import_module(name)
