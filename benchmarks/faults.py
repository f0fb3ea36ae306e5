"""Break a training run of several processes on purpose and see what it costs.

    python benchmarks/faults.py [--processes 2] [--rounds 2] [--only NAME ...] [--folder LAB] [--out FILE]

Every fault meets a run under torchrun with restarts (a tiny model, gloo on the CPU). It is survived
when the run ends by itself, or by the same command once more, with the loss curve of an undisturbed
run; steps computed twice are counted as lost. Linux only: processes are found through /proc.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from sparse_bitnet.training.checkpoint_files import list_checkpoints
from sparse_bitnet.training.metrics import read_rows

STEPS, CHECKPOINT_EVERY = 30, 5
LIMIT_SECONDS = 240
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Outcome:
    """One fault and what became of the run."""

    fault: str
    survived: bool
    lost_steps: int
    seconds: float
    said: str
    """The line in which the run itself named the fault, if it did."""


class Lab:
    """One folder with prepared text, an undisturbed run, and the runs that are broken."""

    def __init__(self, folder: Path, processes: int, seed: int) -> None:
        self.folder, self.processes = folder, processes
        self.chance = random.Random(seed)
        self.started: list[subprocess.Popen] = []
        self.data = folder / "data"
        command = [
            sys.executable,
            "-m",
            "sparse_bitnet",
            "prepare",
            "python-stdlib",
            str(self.data),
        ]
        subprocess.run(
            [*command, "--vocab-size", "512", "--limit-bytes", "600000"],
            check=True,
            capture_output=True,
        )
        self.start("undisturbed").wait(timeout=LIMIT_SECONDS)
        self.expected = self.losses("undisturbed")
        assert len(self.expected) == STEPS, (folder / "undisturbed.log").read_text()

    def start(
        self, run: str, *, restarts: int = 3, timeout: float = 60, file_limit_kb: int | None = None
    ) -> subprocess.Popen:
        """Begin or continue a run; its output goes to RUN.log."""
        options = {
            "model": "qwen2.5-0.3m",
            "data": self.data,
            "out": self.folder / run,
            "steps": STEPS,
            "batch-size": 12,
            "sequence-length": 64,
            "checkpoint-every": CHECKPOINT_EVERY,
            "precision": "float32",
            "validation-tokens": 1024,
            "timeout-seconds": timeout,
        }
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(self.processes), "--max-restarts", str(restarts)]
        command += ["-m", "sparse_bitnet", "train"]
        command += [text for name, value in options.items() for text in (f"--{name}", str(value))]
        if file_limit_kb is not None:
            command = ["bash", "-c", f'ulimit -f {file_limit_kb}; exec "$@"', "limited", *command]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with open(self.folder / f"{run}.log", "a") as log:
            started = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        self.started.append(started)
        return started

    def close(self) -> None:
        """End what is still running; torchrun ends its processes."""
        for process in self.started:
            if process.poll() is None:
                process.terminate()
                process.wait(timeout=60)

    def losses(self, run: str) -> list[float]:
        rows = read_rows(self.folder / run / "metrics.jsonl")
        return [row["loss"] for row in rows if "loss" in row]

    def step(self, run: str) -> int:
        return len(self.losses(run))

    def saved(self, run: str) -> int:
        found = list_checkpoints(self.folder / run)
        return found[-1].step if found else 0

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError("the run did not get so far")
            time.sleep(0.005)

    def rank_process(self, run: str, rank: int) -> int:
        """Process id of a rank of a running run."""
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                command = (entry / "cmdline").read_bytes().decode().split("\0")
                variables = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if str(self.folder / run) in command and f"RANK={rank}" in variables:
                return int(entry.name)
        raise ProcessLookupError(f"no process of rank {rank}")

    def signal_rank(self, run: str, number: int) -> int:
        """Send a signal to a random rank; returns the steps that a restart will repeat."""
        lost = self.step(run) - self.saved(run)
        rank = self.chance.randrange(self.processes)
        os.kill(self.rank_process(run, rank), number)
        return max(0, lost)

    def is_right(self, run: str) -> bool:
        found = self.losses(run)
        return len(found) == STEPS and all(
            abs(one - other) <= TOLERANCE * abs(other)
            for one, other in zip(found, self.expected, strict=True)
        )

    def said(self, run: str, *words: str) -> str:
        lines = (self.folder / f"{run}.log").read_text().splitlines()
        return next((line for line in lines if any(word in line for word in words)), "")


def killed_at_a_random_moment(lab: Lab, run: str) -> tuple[int, str]:
    training = lab.start(run)
    target = lab.chance.randrange(3, STEPS - 3)
    lab.wait_for(lambda: lab.step(run) >= target)
    time.sleep(lab.chance.random() * 0.1)
    lost = lab.signal_rank(run, signal.SIGKILL)
    training.wait(timeout=LIMIT_SECONDS)
    return lost, lab.said(run, "died or lost its network")


def killed_while_saving(lab: Lab, run: str) -> tuple[int, str]:
    training = lab.start(run)
    lab.wait_for(lambda: lab.step(run) > CHECKPOINT_EVERY)
    half_written = lab.folder / run / "checkpoints"
    lab.wait_for(lambda: any(half_written.glob(".tmp-*/sharded/*")))
    lost = lab.signal_rank(run, signal.SIGKILL)
    training.wait(timeout=LIMIT_SECONDS)
    return lost, lab.said(run, "died or lost its network")


def frozen(lab: Lab, run: str) -> tuple[int, str]:
    training = lab.start(run, timeout=6)
    lab.wait_for(lambda: lab.step(run) >= STEPS // 3)
    lost = lab.signal_rank(run, signal.SIGSTOP)
    training.wait(timeout=LIMIT_SECONDS)
    return lost, lab.said(run, "died or lost its network", "is slow")


def slowed(lab: Lab, run: str) -> tuple[int, str]:
    training = lab.start(run, timeout=20)
    lab.wait_for(lambda: lab.step(run) >= STEPS // 3)
    process = lab.rank_process(run, lab.processes - 1)
    for _ in range(5):
        os.kill(process, signal.SIGSTOP)
        time.sleep(0.5)
        os.kill(process, signal.SIGCONT)
        time.sleep(0.2)
    training.wait(timeout=LIMIT_SECONDS)
    return 0, ""


def _stopped(lab: Lab, run: str) -> None:
    """A run that was ended in its middle, by SIGTERM to all its processes."""
    training = lab.start(run, restarts=0)
    lab.wait_for(lambda: lab.saved(run) >= 2 * CHECKPOINT_EVERY)
    training.terminate()
    training.wait(timeout=LIMIT_SECONDS)


def _damaged(lab: Lab, run: str, damage: Callable[[bytes], bytes]) -> tuple[int, str]:
    _stopped(lab, run)
    newest, older = list_checkpoints(lab.folder / run)[-1], list_checkpoints(lab.folder / run)[-2]
    shard = lab.chance.choice(sorted((newest.path / "sharded").glob("*.distcp")))
    shard.write_bytes(damage(shard.read_bytes()))
    lab.start(run).wait(timeout=LIMIT_SECONDS)
    return newest.step - older.step, lab.said(run, "put aside")


def truncated_checkpoint(lab: Lab, run: str) -> tuple[int, str]:
    return _damaged(lab, run, lambda content: content[: len(content) // 2])


def flipped_bit(lab: Lab, run: str) -> tuple[int, str]:
    def flip(content: bytes) -> bytes:
        changed = bytearray(content)
        changed[lab.chance.randrange(len(changed))] ^= 1 << lab.chance.randrange(8)
        return bytes(changed)

    return _damaged(lab, run, flip)


def full_disk(lab: Lab, run: str) -> tuple[int, str]:
    """Files may not grow beyond a limit, which a write meets as it would meet a full disk."""
    _stopped(lab, run)
    saved = lab.saved(run)
    lab.start(run, restarts=0, file_limit_kb=256).wait(timeout=LIMIT_SECONDS)
    lost = max(0, lab.step(run) - saved)
    lab.start(run).wait(timeout=LIMIT_SECONDS)
    return lost, lab.said(run, "cannot write")


def missing_data(lab: Lab, run: str) -> tuple[int, str]:
    _stopped(lab, run)
    shard = lab.data / "train-00000.bin"
    aside = lab.folder / "aside.bin"
    shard.rename(aside)
    lab.start(run, restarts=0).wait(timeout=LIMIT_SECONDS)
    aside.rename(shard)
    lab.start(run).wait(timeout=LIMIT_SECONDS)
    return 0, lab.said(run, "shard is missing")


def two_runs_in_one_folder(lab: Lab, run: str) -> tuple[int, str]:
    training = lab.start(run)
    lab.wait_for(lambda: lab.step(run) >= 2)
    lab.start(run, restarts=0).wait(timeout=LIMIT_SECONDS)
    training.wait(timeout=LIMIT_SECONDS)
    return 0, lab.said(run, "in use by another")


FAULTS: list[Callable[[Lab, str], tuple[int, str]]] = [
    killed_at_a_random_moment,
    killed_while_saving,
    frozen,
    slowed,
    truncated_checkpoint,
    flipped_bit,
    full_disk,
    missing_data,
    two_runs_in_one_folder,
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1, help="times each fault is tried")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", help="names of faults")
    parser.add_argument(
        "--folder", type=Path, help="keep data and runs here, and use what is there"
    )
    parser.add_argument("--out", type=Path, help="also write the report as JSON")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="faults-"))
    folder.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    lab: Lab | None = None
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        lab = Lab(folder, options.processes, options.seed)
        for round_number in range(options.rounds):
            for fault in FAULTS:
                if options.only and fault.__name__ not in options.only:
                    continue
                run, began = f"{fault.__name__}-{round_number}", time.monotonic()
                try:
                    lost, said = fault(lab, run)
                    survived = lab.is_right(run)
                except (TimeoutError, ProcessLookupError, subprocess.TimeoutExpired) as error:
                    lost, said, survived = 0, f"not tried: {error}", False
                outcome = Outcome(
                    fault.__name__.replace("_", " "), survived, lost, time.monotonic() - began, said
                )
                outcomes.append(outcome)
                word = "survived" if survived else "NOT survived"
                print(
                    f"{outcome.fault:28} {word}, {lost} steps lost, {outcome.seconds:.0f} s  {said}"
                )
    finally:
        if lab is not None:
            lab.close()
        if options.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    survived = sum(outcome.survived for outcome in outcomes)
    lost = sum(outcome.lost_steps for outcome in outcomes)
    print(
        f"{len(outcomes)} faults, {survived} survived, {lost} steps lost "
        f"(a checkpoint every {CHECKPOINT_EVERY} of {STEPS}); {options.processes} processes"
    )
    if options.out:
        options.out.write_text(json.dumps([asdict(one) for one in outcomes], indent=2) + "\n")
    sys.exit(survived != len(outcomes))


if __name__ == "__main__":
    main()
