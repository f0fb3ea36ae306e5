# SPDX-License-Identifier: Apache-2.0
"""What strangers send, worked on in a process that does nothing else: the system bounds its memory and
processor time, and what ends it ends one request. Requests and replies are JSON, one a line."""

import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from sparse_bitnet.host import limit_memory, limit_time, ran_out_of_time

_MOST_BYTES = 512 << 20
"""Of address space; Python and what it loads take a tenth of it."""


class BoundedProcess:
    """Runs a module whose `main` calls `answer_requests`: from the first request on, and anew after one
    that ended it. Any thread may ask."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._finish: Callable[[], Any] = lambda: None

    def ask(self, request: str) -> dict[str, Any]:
        """The reply to a request in JSON: {"answer": ...}, or {"error": ...} in one line."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = self._start()
            return _ask(self._process, request)

    def _start(self) -> "subprocess.Popen[str]":
        self._finish()
        # Without the current folder on its path, whose files are as strange as the requests; and in a
        # group of its own: Ctrl-C ends an answer, not this.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            process_group=0,
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
        )
        self._finish = weakref.finalize(self, _end, process)
        return process


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate()


def _ask(process: "subprocess.Popen[str]", request: str) -> dict[str, Any]:
    """One line to the process, and its reply; without one it has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(request + "\n")
        process.stdin.flush()
        reply = process.stdout.readline()
    except BrokenPipeError:
        reply = ""
    if reply.endswith("\n"):
        return json.loads(reply)
    late = ran_out_of_time(process.wait())
    return {"error": f"it takes too {'long' if late else 'much memory, or is nested too deeply'}"}


def answer_requests(
    answer: Callable[[Any], Any], seconds: float, complaint: Callable[[Exception], str]
) -> None:
    """Until the input ends, in the process itself, with so much processor time for each request."""
    limit_memory(_MOST_BYTES)
    for line in sys.stdin:
        # Processor time, not the clock's: a busy machine is no reason. The system ends the process.
        limit_time(seconds)
        try:
            reply = {"answer": answer(json.loads(line))}
        except Exception as error:
            reply = {"error": " ".join(complaint(error).split())[:500]}
        limit_time(0)
        print(json.dumps(reply), flush=True)
