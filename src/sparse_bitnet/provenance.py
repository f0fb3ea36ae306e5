# SPDX-License-Identifier: Apache-2.0
"""The hardware and software of a measurement, stored with every published result."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import sparse_bitnet
from sparse_bitnet.host import available_cores, cpu_info

PACKAGES = ("torch", "transformers", "tokenizers", "numpy")


def provenance() -> dict[str, Any]:
    """JSON-able: commit, hardware, threads, versions and date (UTC) of this process."""
    import torch

    return {
        "commit": commit(),
        "hardware": hardware(),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python, this package and the packages it computes with."""
    found = {"sparse-bitnet": sparse_bitnet.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def hardware() -> str:
    """Processor, its cores and memory, and the GPU if torch sees one, in one line."""
    import torch

    parts = [cpu_hardware()]
    if torch.cuda.is_available():
        parts.append(torch.cuda.get_device_name())
    return ", ".join(parts)


def cpu_hardware() -> str:
    """Processor, its cores and memory in one line. Imports no torch."""
    info = cpu_info()
    processor = info.get("model name") or platform.processor() or platform.machine()
    flags = info.get("flags", "").split()
    # A virtual machine may hide the matrix tiles, and the processor keeps its name.
    if processor.startswith("Intel") and "avx512_bf16" in flags and "amx_bf16" not in flags:
        processor += " without AMX"
    # So do those of several generations.
    if processor.startswith("AMD EPYC") and "avx2" in flags and "avx512f" not in flags:
        processor += " without AVX-512"
    parts = [f"{processor}, {available_cores()} cores"]
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        parts.append(f"{memory / 2**30:.0f} GiB")
    return ", ".join(parts)


def commit(package: Path = Path(sparse_bitnet.__file__).parent) -> str | None:
    """Return the commit of the checkout that the package lies in, "+changes" if it differs; None outside
    one.

    Files that are not under version control do not count: results written into the checkout are no
    change. A virtual environment may lie in another project's repository, so the repository must be ours.
    """
    top = _git(package, "rev-parse", "--show-toplevel")
    if top is None or not (Path(top) / "src" / "sparse_bitnet" / "__init__.py").is_file():
        return None
    return _git(package, "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+changes")


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
