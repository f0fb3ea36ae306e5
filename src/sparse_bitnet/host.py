# SPDX-License-Identifier: Apache-2.0
"""The machine a process runs on, and its folder for caches. Imports nothing heavy."""

import faulthandler
import math
import os
import signal
from contextlib import suppress
from pathlib import Path

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

MOST_THREADS = 1024
"""Upper limit on `--threads`. OpenMP aborts the process when the system cannot start that many."""

_CGROUP, _CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def available_cores() -> int:
    """Return the number of processors for this process, at most a container's CPU quota, rounded up."""
    return math.ceil(min([_processors(), *_cpu_quotas()]))


def limit_library_threads() -> None:
    """Limit OpenMP and BLAS libraries to the CPU quota, which they ignore. Call this before they load."""
    if available_cores() < _processors():
        os.environ.setdefault("OMP_NUM_THREADS", str(available_cores()))


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_quotas() -> list[float]:
    """CPU quotas of Linux's control groups (version 2) around this process, in processors."""
    text, quotas = _CGROUP.read_text() if _CGROUP.is_file() else "", []
    own = _CGROUPS / text.rpartition("0::/")[2].strip()
    # In a container the group may have its outer name and be the root here: all parents are tried.
    for folder in (own, *own.parents):
        with suppress(OSError):
            quota, period = (folder / "cpu.max").read_text().split()
            if quota != "max":
                quotas.append(int(quota) / int(period))
    return quotas


def cpu_info() -> dict[str, str]:
    """Return the fields of the last processor in /proc/cpuinfo, by name; empty where there is none."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8", errors="replace") if info.is_file() else ""
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): " ".join(value.split()) for name, colon, value in pairs if colon}


def limit_memory(most_bytes: int) -> None:
    """Limit this process's address space, and forbid core dumps. Windows and macOS have no such limit."""
    if resource is None:
        return
    for kind, most in ((resource.RLIMIT_AS, most_bytes), (resource.RLIMIT_CORE, 0)):
        with suppress(OSError, ValueError):  # a hard limit that is lower already, or macOS
            resource.setrlimit(kind, (most, most))


def limit_time(seconds: float) -> None:
    """Limit this process's remaining processor time (Windows: real time, five times); 0: no limit."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)
    elif seconds:
        faulthandler.dump_traceback_later(5 * seconds, exit=True)
    else:
        faulthandler.cancel_dump_traceback_later()


def ran_out_of_time(exit_code: int) -> bool:
    """Whether `limit_time` ended the process with this exit code."""
    return exit_code == (-signal.SIGPROF if hasattr(signal, "SIGPROF") else 1)


def cache_folder() -> Path:
    """Return SPARSE_BITNET_CACHE, or `sparse-bitnet` in XDG_CACHE_HOME or ~/.cache."""
    shared = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("SPARSE_BITNET_CACHE") or Path(shared) / "sparse-bitnet")
