# SPDX-License-Identifier: Apache-2.0
"""Where runs are broken on purpose: prepared text, an undisturbed run to compare with, and trials."""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from sparse_bitnet.checkpoint.saved_steps import list_checkpoints
from sparse_bitnet.training.metrics import read_rows

STEPS, CHECKPOINT_EVERY = 30, 5
LIMIT_SECONDS = 300
"""Longest wait for anything; a run takes a few seconds, its start some more."""
TOLERANCE = 1e-3
LOST = ("died or lost its network", "does not answer", "failed (exitcode: -9)")
"""What the processes say, or torchrun when it sees the end of a process first."""


class Lab:
    """A folder with prepared text and the losses that every run in it must reach."""

    def __init__(self, folder: Path, processes: int) -> None:
        self.folder, self.processes = folder, processes
        self.started: list[subprocess.Popen] = []
        self.data = folder / "data"
        prepare = [sys.executable, "-m", "sparse_bitnet", "prepare", "python-stdlib"]
        prepare += [str(self.data), "--vocab-size", "512", "--limit-bytes", "600000"]
        if not (self.data / "manifest.json").is_file():
            subprocess.run(prepare, check=True, capture_output=True, timeout=LIMIT_SECONDS)
        undisturbed = Trial(self, "undisturbed", random.Random(0))
        if not (undisturbed.folder / "result.json").is_file():
            undisturbed.end(undisturbed.start())
        self.expected = undisturbed.losses()
        if len(self.expected) != STEPS:
            raise RuntimeError(f"the undisturbed run failed:\n{undisturbed.log.read_text()}")

    def close(self) -> None:
        """End what is still running; torchrun ends its processes."""
        for process in self.started:
            if process.poll() is None:
                process.terminate()
        for process in self.started:
            try:
                process.wait(timeout=40)
            except subprocess.TimeoutExpired:
                process.kill()


@dataclass
class Trial:
    """One run that is broken, and what became of it."""

    lab: Lab
    run: str
    chance: random.Random
    commands: int = 0
    """Times that somebody had to start it."""
    lost_steps: int = 0
    said: str = ""
    """The line in which the run itself named the fault."""
    notice_seconds: float | None = None
    """From the fault to that line."""
    right: bool | None = None
    """The verdict, where the run's folder does not outlast the fault."""
    workers: dict[str, str] = field(default_factory=dict)
    """Environment of the next start, beside this process's own."""

    @property
    def folder(self) -> Path:
        return self.lab.folder / self.run

    @property
    def log(self) -> Path:
        return self.lab.folder / f"{self.run}.log"

    def start(
        self,
        *,
        restarts: int = 3,
        timeout: float = 60,
        launch: list[str] | None = None,
        around: Callable[[list[str]], list[str]] = lambda command: command,
    ) -> subprocess.Popen:
        """Begin or continue the run; its output is appended to `log`.

        Args:
            restarts: that torchrun makes by itself.
            timeout: after which its processes give up waiting for each other.
            launch: torchrun's options for where; default: `lab.processes` on this machine.
            around: what becomes of the command line before it is started.
        """
        options = {
            "model": "qwen2.5-0.3m",
            "data": self.lab.data,
            "out": self.folder,
            "steps": STEPS,
            "batch-size": 12,
            "sequence-length": 64,
            "checkpoint-every": CHECKPOINT_EVERY,
            "precision": "float32",
            "validation-tokens": 1024,
            "timeout-seconds": timeout,
        }
        command = [sys.executable, "-m", "torch.distributed.run"]
        command += launch or ["--standalone", "--nproc-per-node", str(self.lab.processes)]
        command += ["--max-restarts", str(restarts), "-m", "sparse_bitnet", "train"]
        command += [text for name, value in options.items() for text in (f"--{name}", str(value))]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **self.workers}
        with open(self.log, "a") as log:
            started = subprocess.Popen(around(command), stdout=log, stderr=log, env=environment)
        self.lab.started.append(started)
        self.commands += 1
        return started

    def end(self, process: subprocess.Popen) -> None:
        process.wait(timeout=LIMIT_SECONDS)

    def losses(self) -> list[float]:
        rows = read_rows(self.folder / "metrics.jsonl")
        return [row["loss"] for row in rows if "loss" in row]

    def step(self) -> int:
        return len(self.losses())

    def worlds(self) -> list[int]:
        """One for each stretch of steps of a single process, 2 for each of several."""
        rows = read_rows(self.folder / "timing.jsonl")
        sizes = [2 if "gathered_bytes" in row else 1 for row in rows]
        return [size for number, size in enumerate(sizes) if sizes[number - 1 : number] != [size]]

    def saved(self) -> int:
        found = list_checkpoints(self.folder)
        return found[-1].step if found else 0

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError("the run did not get so far")
            time.sleep(0.005)

    def rank_process(self, rank: int, near: int | None = None) -> int:
        """Process id of a rank of the run.

        Args:
            rank: of the run.
            near: only below this process (one of two machines).
        """
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                command = (entry / "cmdline").read_bytes().decode().split("\0")
                variables = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            mine = str(self.folder) in command and f"RANK={rank}" in variables
            if mine and near in (None, parent):
                return int(entry.name)
        raise ProcessLookupError(f"no process of rank {rank}")

    def break_rank(self, number: int) -> None:
        """Send a signal to a random rank and see how it is noticed."""
        rank = self.chance.randrange(self.lab.processes)
        os.kill(self.rank_process(rank), number)
        self.notice(*LOST, "is slow")

    def notice(self, *words: str, process: subprocess.Popen | None = None, lines: int = 1) -> None:
        """From now on wait for new lines with one of the words (or the process's end)."""
        began, before = time.monotonic(), self._lines(words)
        reached = self.step()
        while len(found := self._lines(words)) < len(before) + lines:
            ended = process is not None and process.poll() is not None
            if ended or time.monotonic() - began > LIMIT_SECONDS or self.step() == STEPS:
                break
            time.sleep(0.02)
        else:
            self.notice_seconds = time.monotonic() - began
            self.said = self._without_places(found[len(before)])
        self.lost_steps += max(0, reached - self.saved())

    def ended_right(self) -> bool:
        """Whether the run has ended with the losses of the undisturbed one."""
        if self.right is not None:
            return self.right
        found = self.losses()
        whole = len(found) == STEPS and (self.folder / "result.json").is_file()
        return whole and all(
            abs(one - other) <= TOLERANCE * abs(other)
            for one, other in zip(found, self.lab.expected, strict=True)
        )

    def end_in_its_middle(self) -> None:
        """Train until two checkpoints are there, then stop by SIGTERM to all processes."""
        training = self.start(restarts=0)
        self.wait_for(lambda: self.saved() >= 2 * CHECKPOINT_EVERY)
        training.send_signal(signal.SIGTERM)
        self.end(training)
        self.commands = 0  # the fault is still to come

    def _lines(self, words: tuple[str, ...]) -> list[str]:
        if not self.log.exists():
            return []
        lines = self.log.read_text(errors="replace").splitlines()
        return [line for line in lines if any(word in line for word in words)]

    def _without_places(self, line: str) -> str:
        line = re.sub(r"^[EW]\d{4} .*?\] ", "torchrun: ", line)
        for place, name in (
            (f"{self.lab.folder}/", ""),
            (socket.gethostname(), "HOST"),
            (sys.executable, "python"),
        ):
            line = line.replace(place, name)
        return line.removeprefix("sparse-bitnet: ").removeprefix("error: ").strip()
