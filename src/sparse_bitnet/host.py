# SPDX-License-Identifier: Apache-2.0
"""The machine a process runs on: what only some operating systems have, and where things are kept between
runs. Imports nothing heavy."""

import faulthandler
import os
import signal
import sys
from pathlib import Path

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

MOST_THREADS = 1024
"""That may be asked for. Where systems do not start as many, OpenMP ends the process."""


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


def most_open_files() -> int | None:
    """Files and connections that this process may have open; None where the system sets no number."""
    if resource is None:
        return None
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if most == resource.RLIM_INFINITY else most


def limit_memory(most_bytes: int) -> None:
    """Of this process, all addresses, and no core dump. Windows and macOS have no such limit."""
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
