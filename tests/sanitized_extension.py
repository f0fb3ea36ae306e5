# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin: the tests see the extension that SPARSE_BITNET_EXTENSION names, not the installed one.

An editable installation finds its own files before any search path, so the other build is loaded ahead
of it.
"""

import importlib.util
import os
import sys

NAME = "sparse_bitnet._cpu"

specification = importlib.util.spec_from_file_location(NAME, os.environ["SPARSE_BITNET_EXTENSION"])
assert specification is not None
assert specification.loader is not None
sys.modules[NAME] = importlib.util.module_from_spec(specification)
specification.loader.exec_module(sys.modules[NAME])
