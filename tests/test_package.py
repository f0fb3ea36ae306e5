# SPDX-License-Identifier: Apache-2.0
"""Effects of importing the package, and effects that it must not have."""

import importlib
import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sparse_bitnet
from one_process import run_python
from sparse_bitnet import host
from test_layering import MODULES, module_name

ROOT = Path(__file__).resolve().parent.parent


def members(value: Any) -> Iterator[Any]:
    """A function or class, and what is public in the class itself."""
    yield value
    for name, member in vars(value).items() if inspect.isclass(value) else ():
        if not name.startswith("_") and inspect.isfunction(getattr(member, "__func__", member)):
            yield getattr(value, name)


def test_public_names_have_docstrings() -> None:
    bare = []
    for name in (module_name(path) for path in MODULES if path.stem != "__main__"):
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        for value in vars(module).values():
            is_ours = getattr(value, "__module__", "") == name and (
                inspect.isclass(value) or inspect.isfunction(value)
            )
            public = (each for each in members(value) if each.__name__[0] not in "_<")
            if is_ours and value.__name__[0] != "_":
                bare += [f"{name}: {each.__name__}" for each in public if not inspect.getdoc(each)]
    assert not bare, "no docstring: " + ", ".join(bare)


def test_without_posix_the_inference_modules_can_be_imported() -> None:
    """Simulate Windows; what fails then lacks only what `sparse-bitnet[train]` brings."""
    modules = [module_name(path) for path in MODULES if path.stem != "__main__"]
    script = f"""
import asyncio, importlib, os, signal, subprocess, sys
import filelock, llguidance, numpy, numpy.random, prometheus_client, rich.console
import rich.progress, rich.table, starlette.applications, tokenizers, uvicorn
from sparse_bitnet.cli.main import TRAIN_PACKAGES

for name in ("fcntl", "grp", "pwd", "resource", "termios", *TRAIN_PACKAGES):
    sys.modules[name] = None
for name in ("fork", "getuid", "killpg", "register_at_fork", "sched_getaffinity", "setsid", "sysconf"):
    delattr(os, name)
for name in ("setitimer", "SIGALRM", "SIGHUP", "SIGKILL", "SIGPROF", "SIGUSR1"):
    delattr(signal, name)
ran = []
for name in {modules}:
    try:
        importlib.import_module(name)
        ran.append(name)
    except ModuleNotFoundError as error:
        assert error.name.partition(".")[0] in (*TRAIN_PACKAGES, "lm_eval", "triton"), (name, error)
for name in ("cli.generate", "cli.serve", "cli.bench", "cli.export",
             "engine.engine", "engine.engine_options", "serve.http_server", "generation.conversation"):
    assert "sparse_bitnet." + name in ran, name
from sparse_bitnet import host
assert host.available_cores() > 0
host.limit_memory(1)
"""
    run_python(script)


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/", {"cpu.max": "max 100000"}, 64),
        ("0::/", {"cpu.max": "150000 100000"}, 2),
        ("0::/a/b", {"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000"}, 3),
    ],
)
def test_available_cores_keep_to_the_quota_of_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr(host, "_processors", lambda: 64)
    monkeypatch.setattr(host, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(host, "_CGROUPS", tmp_path)
    monkeypatch.setattr(os, "environ", {})
    (tmp_path / "cgroup").write_text(f"{groups}\n")
    for name, text in files.items():
        folder = (tmp_path / name).parent
        folder.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert host.available_cores() == cores
    host.limit_library_threads()
    assert os.environ.get("OMP_NUM_THREADS") == (str(cores) if cores < 64 else None)


def test_generating_imports_no_more_than_it_takes() -> None:
    """Half a second to the first token leaves no room for unused imports."""
    heavy = ["asyncio", "unittest", "typeguard", "llguidance", "filelock", "rich"]
    heavy += ["starlette", "jinja2"]
    script = f"""
import sys
from sparse_bitnet.cli import generate
try:
    generate.main(["--help"])
except SystemExit:
    pass
import sparse_bitnet.engine.engine
from sparse_bitnet.generation import open_model, scheduler
assert not [name for name in {heavy} if name in sys.modules]
"""
    run_python(script)


def test_importing_loads_neither_torch_nor_transformers_and_prints_nothing() -> None:
    heavy = ("torch", "transformers", "datasets", "pyarrow", "matplotlib")
    script = f"""
import sys, sparse_bitnet, sparse_bitnet.cli.main
dir(sparse_bitnet)
assert not {{"numpy", "rich"}} & {{*sys.modules}}
import sparse_bitnet.data.loader, sparse_bitnet.data.preparation, sparse_bitnet.data.sources
import sparse_bitnet.training.config, sparse_bitnet.training.recipes, sparse_bitnet.training.schedule
assert not [name for name in {heavy} if name in sys.modules]
"""
    assert run_python(script) == ""


@pytest.mark.train
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system does not fork")
def test_the_first_operator_of_a_process_runs_the_compiled_kernel() -> None:
    """Whichever public name is used first, without another module of the package before it; an unknown
    kernel is refused then."""
    script = """
import os, sys
import torch

def use(name):
    import sparse_bitnet
    if name == "nonsense":
        os.environ["SPARSE_BITNET_KERNEL"] = name
        try:
            sparse_bitnet.nm_mask
        except sparse_bitnet.UserError as error:
            assert "nonsense: choose one of auto" in str(error), error
            return
        raise AssertionError("accepted")
    getattr(sparse_bitnet, name)
    from sparse_bitnet.ops.backends import cpu_kernels
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(f"sparse_bitnet::{name}", "CPU")
    assert has_kernel == (cpu_kernels()[0] is not None)

for name in ("nm_mask", "absmean", "quantize_int8", "nonsense"):
    if (child := os.fork()) == 0:
        use(name)
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0, name
"""
    run_python(script)


def test_public_names_are_the_modules_own_and_documented() -> None:
    assert set(dir(sparse_bitnet)) == set(sparse_bitnet.__all__)
    for name in set(sparse_bitnet.__all__) - {"__version__"}:
        value = getattr(sparse_bitnet, name)
        module = importlib.import_module(value.__module__)
        assert getattr(module, name) is value
        assert value.__doc__


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'sparse_n'"):
        sparse_bitnet.sparse_n  # noqa: B018


def test_lock_file_has_the_pinned_versions() -> None:
    texts = ((ROOT / name).read_text("utf-8") for name in ("constraints.txt", "requirements.lock"))
    pins, locked = (dict(re.findall(r"(?m)^([\w.-]+)==([\w.]+)", text)) for text in texts)
    built_with = {"nanobind", "scikit-build-core", "mkdocs", "mkdocs-material", "mkdocstrings"}
    built_with |= {"mkdocstrings-python", "ziglang"}
    # Of an extra that development does without.
    built_with |= {"peft", "trl"}
    assert {name: locked.get(name) for name in pins.keys() - built_with - {"torch"}} == {
        name: version for name, version in pins.items() if name not in built_with | {"torch"}
    }
    assert not any(name.startswith(("torch", "nvidia", "triton")) for name in locked)
