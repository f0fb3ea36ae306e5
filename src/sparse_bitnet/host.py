# SPDX-License-Identifier: Apache-2.0
"""The machine a process runs on, and where it keeps things between runs. Imports nothing heavy."""

import os
from pathlib import Path


def available_cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_info() -> dict[str, str]:
    """What Linux says of its last processor, by field of /proc/cpuinfo; empty elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): " ".join(value.split()) for name, colon, value in pairs if colon}


def cache_folder() -> Path:
    """SPARSE_BITNET_CACHE, or `sparse-bitnet` in XDG_CACHE_HOME or ~/.cache."""
    own, shared = os.environ.get("SPARSE_BITNET_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own)
    return Path(shared or os.path.expanduser("~/.cache")) / "sparse-bitnet"
