# SPDX-License-Identifier: Apache-2.0
"""Everything there is to measure on a GPU, step by step, in a folder that can be taken up again.

Each step is a process of its own, because an error on a GPU leaves its process unusable. It writes
STEP.jsonl (the rows) and STEP.txt (what it printed); where it fails, the first row says why, before those
measured until then, and the next call tries again.
"""

import html
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparse_bitnet.bench.record import append_records
from sparse_bitnet.errors import UserError, os_errors_as
from sparse_bitnet.files import write_atomic
from sparse_bitnet.provenance import provenance

PAGE = "index.html"
TESTS = tuple(f"tests/ops/test_{name}.py" for name in ("cuda", "rope_cache", "fused_inputs"))
"""On a GPU they run compiled what they elsewhere interpret."""
PATTERNS = ("6:8", "2:4")
REHEARSAL = ("--model", "qwen2.5-0.3m", "--layers", "1", "--device", "cpu", "--rounds", "1")
SMALL = {
    "prefill": "--tokens 32",
    "decode": "--batch 1 --context 16",
    "train": "--tokens 16 --batch 1",
}


@dataclass(frozen=True)
class Step:
    """A process that appends its rows to the file it is given last; or is a row by its last line."""

    name: str
    command: tuple[str, ...]
    seconds: int
    """When it is given up."""
    writes_rows: bool = True


def all_steps(folder: Path, rehearse: bool = False) -> list[Step]:
    """In the order of what they settle; all limits together are 40 minutes. What is trained lies in
    `folder`. Raises `UserError` outside a checkout of the repository."""
    if not Path(TESTS[0]).is_file():
        raise UserError(f"no {TESTS[0]} here: call it in the root of a checkout of the repository")
    bench = (sys.executable, "-m", "sparse_bitnet", "bench")
    files = TESTS[:1] if rehearse else TESTS
    tests = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files)
    found = [Step("tests", tests, 240, writes_rows=False)]
    for kind, seconds in (("kernels", 210), ("decode", 240), ("prefill", 240)):
        for pattern in PATTERNS:
            given = ["--pattern", pattern]
            if kind == "decode":
                given += ["--batch", *map(str, (1, 8, 64, 128, 256, 512))]
            if rehearse:
                given = ["--pattern", pattern, *REHEARSAL, *SMALL.get(kind, "--tokens 2").split()]
            name = f"{kind}-{pattern.replace(':', 'of')}"
            found.append(Step(name, (*bench, kind, *given, "--out"), seconds))
    small = (*REHEARSAL, *SMALL["train"].split()) if rehearse else ()
    found.append(Step("train", (*bench, "train", *small, "--out"), 300))
    small = (*REHEARSAL, "--tokens", "2") if rehearse else ()
    found.append(Step("profile", (*bench, "profile", *small, "--out"), 180))
    forwards = ["benchmarks/forwards.py", str(folder / "forwards"), "--seeds", "2"]
    if rehearse:
        forwards += [*REHEARSAL[:2], "--steps", "20", "--batch-size", "1", "--device", "cpu"]
    found.append(Step("forwards", (sys.executable, *forwards, "--out"), 300))
    return found


def run_all(folder: Path, *, rehearse: bool = False, steps: Sequence[Step] | None = None) -> bool:
    """Run what is missing or failed; returns whether all steps have their rows now.

    Raises `UserError` where the folder cannot be written, and as `all_steps`. Ctrl-C ends it between
    steps' files.
    """
    with os_errors_as(f"cannot write {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    steps = all_steps(folder, rehearse) if steps is None else steps
    for step in steps:
        if failure_of(folder, step) == "":
            print(f"{step.name}: done before", flush=True)
            continue
        began = time.monotonic()
        failure = _run(folder, step)
        print(f"{step.name}: {failure or 'done'} ({time.monotonic() - began:.0f} s)", flush=True)
        _write_page(folder, steps)
    print(f"{folder / PAGE}")
    return all(failure_of(folder, step) == "" for step in steps)


def run_command(command: list[Any], seconds: float, **options: Any) -> None:
    """`subprocess.run` with `check`, but whatever the command has started ends with it."""
    with subprocess.Popen(command, start_new_session=True, **options) as process:
        try:
            process.wait(seconds)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def failure_of(folder: Path, step: Step) -> str | None:
    """Why a step has no rows; "" where it has, None where it has not been tried."""
    try:
        lines = (folder / f"{step.name}.jsonl").read_text().splitlines()
        return json.loads(lines[0]).get("step_failed", "") if lines else "it wrote no rows"
    except OSError:
        return None
    except (AttributeError, ValueError) as error:
        return f"its rows cannot be read: {error}"


def _run(folder: Path, step: Step) -> str:
    """Replaces the step's files; returns why it failed, "" where it did not."""
    rows, part, text = (folder / f"{step.name}.{end}" for end in ("jsonl", "part", "txt"))
    part.unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "140"}
    try:
        with open(text, "w") as output:
            run_command(
                [*step.command, *([part] if step.writes_rows else [])],
                step.seconds,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
            )
        if not step.writes_rows:
            append_records(part, [{"step": step.name, "result": _last_line(text)}], provenance())
        if part.is_file():
            part.replace(rows)
            return ""
        failure = "it wrote no rows"
    except subprocess.TimeoutExpired:
        failure = f"it took more than {step.seconds} s"
    except subprocess.CalledProcessError as error:
        failure = f"exit code {error.returncode}: {_last_line(text)}"
    except OSError as error:
        failure = f"it cannot be started: {error.strerror}"
    before = part.read_text(errors="replace") if part.is_file() else ""
    rows.unlink(missing_ok=True)
    append_records(rows, [{"step": step.name, "step_failed": failure}], provenance())
    with open(rows, "a") as file:
        file.write(before)
    return failure


def _last_line(text: Path) -> str:
    return next(reversed(text.read_text(errors="replace").splitlines()), "")[:300]


def _write_page(folder: Path, steps: Sequence[Step]) -> None:
    where = provenance()
    parts = [f"<h1>{html.escape(where['hardware'])}</h1><p>{where['date']}, {where['commit']}</p>"]
    for step in steps:
        failure = failure_of(folder, step)
        state = {"": "", None: ": not yet measured"}.get(failure, f": {failure}")
        parts.append(f"<h2>{html.escape(step.name + state)}</h2>")
        if (text := folder / f"{step.name}.txt").is_file():
            parts.append(f"<pre>{html.escape(text.read_text(errors='replace'))}</pre>")
    write_atomic(folder / PAGE, "<!doctype html><meta charset=utf-8>" + "\n".join(parts) + "\n")
