# SPDX-License-Identifier: Apache-2.0
"""Setup of every test: poisoned memory, one seed, one thread, reproducible hypothesis."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import importlib
import sys
from collections.abc import Callable, Generator, Iterator
from types import ModuleType
from typing import Any

import hypothesis
import numpy as np
import pytest

from sparse_bitnet.cli.main import TRAIN_PACKAGES

torch: ModuleType | None
try:
    import torch
except ImportError:
    torch = None


class SkipWithoutExtras:
    """Import finder that comes last: skips a module or a test that imports a missing package."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        package = name.partition(".")[0]
        if package == "llguidance" or (
            torch is None and package in (*TRAIN_PACKAGES, "accelerate", "lm_eval")
        ):
            pytest.skip(f"needs {name}, which is not installed", allow_module_level=True)


sys.meta_path.append(SkipWithoutExtras)
if torch is not None and not torch.cuda.is_available():
    # Triton kernels then run interpreted; triton looks when it is first imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure(config: pytest.Config) -> None:
    """Fail for a broken build, unless SPARSE_BITNET_PURE_PYTHON says to test without the extension."""
    if os.environ.get("SPARSE_BITNET_PURE_PYTHON") is None:
        try:
            importlib.import_module("sparse_bitnet._cpu")
        except ImportError as error:
            raise pytest.UsageError(
                f"the compiled kernels do not load ({error}): install the package again, or set "
                "SPARSE_BITNET_PURE_PYTHON=1 to test without them"
            ) from error


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """Without the extension, skip the modules that import it."""
    report = yield
    if report.failed and "cannot import name '_cpu'" in str(report.longrepr):
        report.outcome = "skipped"
        report.longrepr = str(collector.path), None, "Skipped: the extension is not built"
    return report


def pytest_runtest_setup(item: pytest.Item) -> None:
    if torch is None and item.get_closest_marker("train"):
        pytest.skip("runs, in another process, what needs sparse-bitnet[train]")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """List the instruction sets whose kernels the tests that passed have run."""
    passed = terminalreporter.stats.get("passed", [])
    if isas := {isa for test in passed for name, isa in test.user_properties if name == "isa"}:
        terminalreporter.write_line(f"instruction sets covered: {', '.join(sorted(isas))}")


hypothesis.settings.register_profile("project", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("project")


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fresh memory holds NaN, or the largest integer, so that reading it before writing shows."""
    if torch is None:
        yield
        return
    filled = torch.utils.deterministic.fill_uninitialized_memory
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = filled


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    if torch is not None:
        torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """The tensors here are small, and parallel test workers share the cores."""
    if torch is not None:
        torch.set_num_threads(1)


def codes_of(rows: int, columns: int, seed: int) -> "torch.Tensor":
    """Random ternary codes, int8 [rows, columns]."""
    values = np.random.default_rng(seed).integers(-1, 2, (rows, columns))
    return torch.from_numpy(values.astype(np.int8))


@pytest.fixture(scope="session")
def random_codes() -> Callable[[int, int, int], "torch.Tensor"]:
    return codes_of


@pytest.fixture
def client(served: Any) -> Iterator[Any]:
    """An OpenAI client of the server that the module's fixture `served` runs."""
    with served.client() as opened:
        yield opened
