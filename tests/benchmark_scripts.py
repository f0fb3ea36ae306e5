# SPDX-License-Identifier: Apache-2.0
"""Loads the scripts in benchmarks/ as modules, for tests of their parts."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[1] / "benchmarks"


def load_script(name: str) -> ModuleType:
    """Return the module of benchmarks/NAME.py without running its main program."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return importlib.import_module(name)
