# SPDX-License-Identifier: Apache-2.0
"""The hardware and software of a measurement, stored with every published result."""

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import sparse_bitnet
from sparse_bitnet.errors import os_errors_as
from sparse_bitnet.host import available_cores, cpu_info

PACKAGES = ("torch", "transformers", "tokenizers", "numpy")


def where_measured() -> dict[str, Any]:
    """Return commit, hardware, versions and date (UTC), ready for JSON. Imports no torch."""
    return {
        "commit": commit(),
        "hardware": cpu_hardware(),
        "versions": versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def provenance() -> dict[str, Any]:
    """Return `where_measured` with the GPU that torch uses and the number of threads of this process."""
    import torch

    return where_measured() | {"hardware": hardware(), "threads": torch.get_num_threads()}


def append_records(
    path: Path | str, rows: Iterable[Mapping[str, Any]], where: Mapping[str, Any]
) -> None:
    """Append each row with `where` as one line of JSON. Raises `UserError` if that fails."""
    text = "".join(json.dumps({**row, **where}) + "\n" for row in rows)
    with os_errors_as(f"cannot write {path}"), open(path, "ab+") as file:
        file.seek(max(0, file.tell() - 1))
        after_crash = file.read() not in (b"", b"\n")  # within a line
        file.write(b"\n" * after_crash + text.encode())


def versions(names: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Return the versions of this package, Python and the packages of these names, where installed."""
    installed = {"sparse-bitnet": sparse_bitnet.__version__, "python": platform.python_version()}
    for name in names:
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed


def hardware() -> str:
    """Return processor, cores, memory and the GPU that torch uses (if any) in one line."""
    import torch

    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return cpu_hardware() + gpu


def cpu_hardware() -> str:
    """Return processor, cores and memory in one line. Imports no torch."""
    info = cpu_info()
    processor = info.get("model name") or platform.processor() or platform.machine()
    flags = info.get("flags", "").split()
    # A virtual machine may hide AMX without changing the processor's name.
    if processor.startswith("Intel") and "avx512_bf16" in flags and "amx_bf16" not in flags:
        processor += " without AMX"
    # EPYCs of several generations have one name in a virtual machine.
    if processor.startswith("AMD EPYC") and "avx2" in flags and "avx512f" not in flags:
        processor += " without AVX-512"
    parts = [f"{processor}, {available_cores()} cores"]
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        parts.append(f"{memory / 2**30:.0f} GiB")
    return ", ".join(parts)


def commit(package: Path = Path(sparse_bitnet.__file__).parent) -> str | None:
    """Return the commit of the checkout that contains the package, with "+changes" if files differ; None
    outside a checkout.

    Untracked files do not count: results written into the checkout are no change. A virtual environment
    may lie in another project's repository, so the repository must be ours.
    """
    top = _git(package, "rev-parse", "--show-toplevel")
    if top is None or not (Path(top) / "src" / "sparse_bitnet" / "__init__.py").is_file():
        return None
    return _git(package, "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+changes")


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
