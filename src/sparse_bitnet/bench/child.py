# SPDX-License-Identifier: Apache-2.0
"""Child processes that hold what is measured: one JSON object a line in, one out.

Each engine lives in a process of its own, so that its memory can be told from the others', its
environment be its own, and its threads end up idle while another one is measured. A child works only
while it is asked something.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, Self

from sparse_bitnet.errors import UserError


class Child:
    """The parent's side.

    Use as a context manager, or call `close`.
    """

    def __init__(self, arguments: Sequence[str], environment: dict[str, str] | None = None) -> None:
        """Start this Python with `arguments` and with `environment` on top of the present one."""
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **(environment or {})},
        )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """The answer. Raises `UserError` with what the child says went wrong, or its last words."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            raise UserError(f"a measuring process ended early: {self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise UserError(answer["error"])
        return answer

    def close(self) -> None:
        """End the child; a second call does nothing."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _last_words(self) -> str:
        self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self._process.returncode}"


def serve(handle: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """The child's side: answer every line of standard input with `handle` until it ends.

    A `UserError` of `handle` is an answer; anything else ends the child with its traceback.
    """
    # What libraries print must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = sys.stderr  # one buffer: what is printed last stands last
    for line in sys.stdin:
        try:
            answer = handle(json.loads(line))
        except UserError as error:
            answer = {"error": str(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def resident_bytes(process: int | str = "self") -> int | None:
    """Memory of a process that is in RAM; None where the system does not tell."""
    try:
        with open(f"/proc/{process}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
