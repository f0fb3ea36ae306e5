# SPDX-License-Identifier: Apache-2.0
"""Another process: a fresh one for a script, or for several commands, which imports what they need once;
or a fork of this one."""

import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

_SCRIPT = """
import contextlib, io, json, sys, traceback
told = []
Output = io.StringIO
{prelude}
from sparse_bitnet.cli.main import main

for program, *arguments in json.loads(sys.argv[1]):
    output, errors, code = Output(), io.StringIO(), 0
    sys.stdin = io.StringIO({stdin!r})
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            if program == "python":
                exec(arguments[1], {{}})
            else:
                main(arguments)
        except SystemExit as stop:
            code = stop.code or 0
        except BaseException:
            traceback.print_exc()
            code = 1
    told.append([code, output.getvalue(), errors.getvalue()])
print(json.dumps(told))
"""


def run_python(script: str, *arguments: str) -> str:
    """Return what a script prints in a fresh process; fail with its errors."""
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_in_fork(check: Callable[[], None]) -> None:
    """Require that a check passes in a fork of this process, within a minute; skip without forks."""
    if not hasattr(os, "fork"):
        pytest.skip("the system does not fork")
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            check()
            os._exit(0)
        finally:
            traceback.print_exc()
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class Done(NamedTuple):
    """How a command ended."""

    code: int
    output: str
    errors: str


def run_commands(
    commands: Sequence[Sequence[str]],
    *,
    cwd: Path,
    env: dict[str, str],
    prelude: str = "",
    stdin: str = "",
    python: str | Path = sys.executable,
) -> list[Done]:
    """Run `sparse-bitnet ...` and `python -c CODE` one after the other.

    Args:
        commands: words of each.
        cwd, env: of the process.
        prelude: Python that it runs first; may replace `Output`, which takes what a command prints.
        stdin: what every command reads.
        python: the interpreter.
    """
    script = _SCRIPT.format(prelude=prelude, stdin=stdin)
    done = subprocess.run(
        [str(python), "-c", script, json.dumps(commands)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=env,
    )
    assert done.returncode == 0, done.stderr
    return [Done(*one) for one in json.loads(done.stdout.splitlines()[-1])]
