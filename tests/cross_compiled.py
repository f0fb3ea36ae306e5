# SPDX-License-Identifier: Apache-2.0
"""csrc/ compiled without Python, once a session, for aarch64 and its emulator or for this machine."""

import importlib.util
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from filelock import FileLock

SOURCES = Path(__file__).resolve().parents[1] / "csrc"
FLAGS = ["-std=c++17", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-psabi", f"-I{SOURCES}"]


def run(command: list[str]) -> str:
    """Return the output of a command; fail with its errors."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def compiler() -> list[str]:
    """Return the compiler for aarch64; skip the test if there is none."""
    if gcc := shutil.which("aarch64-linux-gnu-g++"):
        return [gcc]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-musl"]
    pytest.skip("no compiler for aarch64: neither aarch64-linux-gnu-g++ nor ziglang")


def program(source: Path, temporary: pytest.TempPathFactory, name: str, command: list[str]) -> str:
    """Return the program of one source and csrc/, whose objects are compiled once for all processes."""
    own = temporary.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / name
    sources = [
        path for path in sorted(SOURCES.glob("*.cpp")) if not path.name.startswith("bindings")
    ]
    objects = [str(folder / f"{path.stem}.o") for path in sources]

    def compile_one(path: Path, out: str) -> None:
        run([*command, *FLAGS, "-c", str(path), "-o", out])

    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            folder.mkdir()
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(compile_one, sources, objects))
        out = str(folder / source.stem)
        run([*command, *FLAGS, "-pthread", "-o", out, str(source), *objects, "-ldl"])
    return out


def emulated(source: Path, temporary: pytest.TempPathFactory, *arguments: str) -> str:
    """Return the output of a source's program; skip the test if there is no emulator."""
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if emulator is None:
        pytest.skip("no emulator of aarch64: qemu-aarch64 is not installed")
    return run(
        [emulator, program(source, temporary, "aarch64", [*compiler(), "-static"]), *arguments]
    )


def native(source: Path, temporary: pytest.TempPathFactory) -> str:
    """Return the output of a source's program on this machine; skip the test if there is no compiler."""
    if gcc := shutil.which("g++"):
        return run([program(source, temporary, "native", [gcc])])
    pytest.skip("no compiler: g++ is not installed")
