# SPDX-License-Identifier: Apache-2.0
"""The aarch64 code on any machine: cross-compiled, and run under an emulator."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "csrc"
FLAGS = ["-std=c++17", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-psabi", f"-I{SOURCES}"]
DRIVER_NEEDS = [
    "attention.cpp",
    "isa.cpp",
    "isa_generic.cpp",
    "kv_cache.cpp",
    "matmul.cpp",
    "matmul_generic.cpp",
    "matmul_neon.cpp",
    "packed_rows.cpp",
    "platform.cpp",
    "roofline.cpp",
    "thread_pool.cpp",
]


def find_compiler() -> list[str]:
    if gcc := shutil.which("aarch64-linux-gnu-g++"):
        return [gcc]
    if zig := shutil.which("zig"):
        return [zig, "c++", "-target", "aarch64-linux-musl"]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-musl"]
    pytest.skip("no compiler for aarch64: neither aarch64-linux-gnu-g++ nor zig")


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_neon_kernels_return_the_bits_of_the_generic_ones(tmp_path):
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if emulator is None:
        pytest.skip("no emulator of aarch64: qemu-aarch64 is not installed")
    sources = [str(SOURCES / name) for name in DRIVER_NEEDS]
    program = str(tmp_path / "driver")
    options = ["-O2", "-static", "-pthread", "-o", program]
    run([*find_compiler(), *FLAGS, *options, str(HERE / "neon_driver.cpp"), *sources])
    assert run([emulator, program]) == "0 differences\n"


def test_the_other_sources_are_accepted_for_aarch64(tmp_path):
    others = [
        str(path)
        for path in sorted(SOURCES.glob("*.cpp"))
        if path.name not in DRIVER_NEEDS and not path.name.startswith("bindings")
    ]
    assert others
    for source in others:  # zig takes neither several at once nor -fsyntax-only
        run([*find_compiler(), *FLAGS, "-O0", "-c", source, "-o", str(tmp_path / "unused.o")])
