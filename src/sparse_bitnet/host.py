# SPDX-License-Identifier: Apache-2.0
"""The machine a process runs on: what only some operating systems have, and where things are kept between
runs. Imports nothing heavy."""

import faulthandler
import math
import os
import signal
import sys
from pathlib import Path

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

MOST_THREADS = 1024
"""Upper limit on `--threads`. OpenMP aborts the process when the system cannot start that many."""

_CGROUP, _CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def available_cores() -> int:
    """Processors that this process may use: no more than a container's CPU quota, rounded up."""
    return math.ceil(min([_processors(), *_cpu_quotas()]))


def limit_library_threads() -> None:
    """Make OpenMP and BLAS libraries keep to a CPU quota, which they ignore. Call it before they load."""
    if available_cores() < _processors():
        os.environ.setdefault("OMP_NUM_THREADS", str(available_cores()))


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_quotas() -> list[float]:
    """CPU quotas of Linux's control groups, version 1 or 2, around this process, in processors."""
    quotas = []
    for line in _CGROUP.read_text().splitlines() if _CGROUP.is_file() else ():
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
        # In a container the group may have its outer name and be the root here: all parents are tried.
        folder = _CGROUPS / ("cpu" if controllers else "") / group.strip("/")
        for parent in (folder, *folder.parents):
            try:
                quota, period = " ".join((parent / name).read_text() for name in names).split()
            except OSError:
                continue
            if quota not in ("max", "-1"):
                quotas.append(int(quota) / int(period))
    return quotas


def cpu_info() -> dict[str, str]:
    """Return the fields of the last processor in /proc/cpuinfo, by name; empty where there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): " ".join(value.split()) for name, colon, value in pairs if colon}


def most_open_files() -> int | None:
    """Files and connections that this process may have open; None where the system sets no number."""
    if resource is None:
        return None
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if most == resource.RLIM_INFINITY else most


def limit_memory(most_bytes: int) -> None:
    """Limit this process's address space, and forbid core dumps. Windows and macOS have no such limit."""
    if resource is None:
        return
    for kind, most in ((resource.RLIMIT_AS, most_bytes), (resource.RLIMIT_CORE, 0)):
        try:
            resource.setrlimit(kind, (most, most))
        except (OSError, ValueError):
            if sys.platform == "linux":
                raise


def limit_time(seconds: float) -> None:
    """From now on this process has so much processor time left; 0: any. Windows counts five times as much
    of the clock's instead. `ran_out_of_time` tells its end from others."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)
    elif seconds:
        faulthandler.dump_traceback_later(5 * seconds, exit=True)
    else:
        faulthandler.cancel_dump_traceback_later()


def ran_out_of_time(exit_code: int) -> bool:
    """Whether `limit_time` ended the process that ended so."""
    return exit_code == (-signal.SIGPROF if hasattr(signal, "SIGPROF") else 1)


def cache_folder() -> Path:
    """SPARSE_BITNET_CACHE, or `sparse-bitnet` in XDG_CACHE_HOME or ~/.cache."""
    own, shared = os.environ.get("SPARSE_BITNET_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own)
    return Path(shared or os.path.expanduser("~/.cache")) / "sparse-bitnet"
