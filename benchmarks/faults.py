# SPDX-License-Identifier: Apache-2.0
"""Break a training run of several processes on purpose and see what it costs.

    python benchmarks/faults.py [--processes 2] [--rounds 2] [--seed 0] [--only NAME ...] [--record]

Every fault meets a run under torchrun (a tiny model, gloo on the CPU). It is survived when the run ends
by itself, or by the same command once more, with the loss curve of an undisturbed run; steps computed
twice are counted as lost. A trial's random choices depend on seed, fault and round alone. `--record`
adds the trials to benchmarks/results/. Linux only: processes are found through /proc; a full disk and a
lost network are real where this is root, else a limit of file sizes and a frozen process.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults_lab import CHECKPOINT_EVERY, LOST, STEPS, Lab, Trial
from recorded import RESULTS
from two_machines import INTERFACE, TwoMachines

from sparse_bitnet.bench.record import append_records, result_file, where_measured
from sparse_bitnet.checkpoint.saved_steps import list_checkpoints

SHORT_SECONDS = 12.0
"""Limit of a wait where the wait itself is tried; the start of a process has to fit into it."""
QUICK_ELASTIC = "join_timeout=60,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"


def killed_at_a_random_moment(trial: Trial) -> None:
    training = trial.start()
    target = trial.chance.randrange(1, STEPS - 2)
    trial.wait_for(lambda: trial.step() >= target)
    time.sleep(trial.chance.random() * 0.1)
    trial.break_rank(signal.SIGKILL)
    trial.end(training)


def killed_while_saving(trial: Trial) -> None:
    training = trial.start()
    target = CHECKPOINT_EVERY * trial.chance.randrange(2, STEPS // CHECKPOINT_EVERY - 1)
    half_written = trial.folder / "checkpoints" / f".tmp-step-{target:08d}" / "sharded"
    trial.wait_for(half_written.is_dir)
    time.sleep(trial.chance.random() * 0.02)
    trial.break_rank(signal.SIGKILL)
    trial.end(training)


def frozen(trial: Trial) -> None:
    training = trial.start(timeout=SHORT_SECONDS)
    trial.wait_for(lambda: trial.step() >= STEPS // 3)
    trial.break_rank(signal.SIGSTOP)
    trial.end(training)


def slowed(trial: Trial) -> None:
    training = trial.start(timeout=20)
    trial.wait_for(lambda: trial.step() >= STEPS // 3)
    process = trial.rank_process(trial.lab.processes - 1)
    for _ in range(5):
        os.kill(process, signal.SIGSTOP)
        time.sleep(0.5)
        os.kill(process, signal.SIGCONT)
        time.sleep(0.05)
    trial.end(training)


def lost_network(trial: Trial) -> None:
    """Two machines, the cable pulled for good: both end; plugged in, the same commands go on."""
    try:
        with TwoMachines() as machines:
            _pull_the_cable(trial, machines)
    except OSError as error:
        print(f"no network namespaces here ({error}): a frozen process stands for the lost machine")
        frozen(trial)


def _pull_the_cable(trial: Trial, machines: TwoMachines) -> None:
    def start(port: int, timeout: float) -> list[subprocess.Popen]:
        started = []
        for number, address in enumerate(machines.addresses):
            launch = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
            launch += ["--rdzv-endpoint", f"{machines.addresses[0]}:{port}"]
            launch += ["--local-addr", address, "--rdzv-conf", f"is_host={1 - number}"]
            trial.workers = {"GLOO_SOCKET_IFNAME": INTERFACE}
            started.append(
                trial.start(
                    restarts=0,
                    timeout=timeout,
                    launch=launch,
                    around=lambda command, number=number: machines.command(number, command),
                )
            )
        trial.commands -= 1
        return started

    training = start(29500, timeout=SHORT_SECONDS)
    trial.wait_for(lambda: trial.step() >= STEPS // 3)
    machines.pull()
    trial.notice(*LOST, lines=2)
    for machine in training:
        # Without its machine's network torchrun itself waits for minutes, its processes are gone.
        machine.kill()
        trial.end(machine)
    machines.plug()
    for machine in start(29501, timeout=60):
        trial.end(machine)


def lost_and_new_machine(trial: Trial) -> None:
    """A machine of two dies; the other goes on alone; a new one joins it. All by themselves."""
    port = trial.chance.randrange(20_000, 30_000)

    def machine() -> subprocess.Popen:
        launch = ["--nnodes", "1:2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
        launch += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", QUICK_ELASTIC]
        launch += ["--local-addr", "127.0.0.1"]
        trial.workers = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # as the launch recipes do
        return trial.start(launch=launch)

    first = machine()
    time.sleep(1)
    second = machine()
    trial.wait_for(lambda: trial.step() >= STEPS // 4)
    lost = trial.rank_process(1, near=second.pid)
    second.kill()
    os.kill(lost, signal.SIGKILL)
    trial.notice(*LOST)
    trial.wait_for(lambda: trial.worlds()[-1:] == [1])
    alone = trial.rank_process(0, near=first.pid)
    os.kill(alone, signal.SIGSTOP)  # the run is short: it has to wait for the new machine
    third = machine()
    trial.commands = 1
    time.sleep(12)
    os.kill(alone, signal.SIGCONT)
    for process in (first, third):
        trial.end(process)
    trial.right = trial.ended_right() and trial.worlds() == [2, 1, 2]


def _damaged(trial: Trial, damage: Callable[[bytes], bytes]) -> None:
    trial.end_in_its_middle()
    newest, older = list_checkpoints(trial.folder)[-1], list_checkpoints(trial.folder)[-2]
    shard = trial.chance.choice(sorted((newest.path / "sharded").glob("*.distcp")))
    shard.write_bytes(damage(shard.read_bytes()))
    training = trial.start()
    trial.notice("quarantined", process=training)
    trial.lost_steps = newest.step - older.step
    trial.end(training)


def truncated_checkpoint(trial: Trial) -> None:
    _damaged(trial, lambda content: content[: trial.chance.randrange(len(content))])


def flipped_bit(trial: Trial) -> None:
    def flip(content: bytes) -> bytes:
        changed = bytearray(content)
        changed[trial.chance.randrange(len(changed))] ^= 1 << trial.chance.randrange(8)
        return bytes(changed)

    _damaged(trial, flip)


def full_disk(trial: Trial) -> None:
    """The run's own small file system; where none may be mounted, files may not grow."""
    trial.folder.mkdir()
    size = trial.chance.randrange(1_000, 6_000)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(trial.folder)],
        capture_output=True,
        check=False,
    )
    try:
        if mounted.returncode:
            limit = ["bash", "-c", 'ulimit -f 256; exec "$@"', "limited"]
            training = trial.start(restarts=0, around=lambda command: [*limit, *command])
        else:
            training = trial.start(restarts=0)
        trial.notice("cannot write", process=training)
        trial.end(training)
        if not mounted.returncode:
            grown = ["mount", "-o", "remount,size=100m", str(trial.folder)]
            subprocess.run(grown, check=True, capture_output=True)
        trial.end(trial.start())
        trial.right = trial.ended_right()
    finally:
        if not mounted.returncode:
            subprocess.run(["umount", "--lazy", str(trial.folder)], check=False)


def missing_data(trial: Trial) -> None:
    trial.end_in_its_middle()
    shard = trial.lab.data / "train-00000.bin"
    aside = trial.lab.folder / "aside.bin"
    shard.rename(aside)
    try:
        training = trial.start(restarts=0)
        trial.notice("shard is missing", process=training)
        trial.end(training)
    finally:
        aside.rename(shard)
    trial.lost_steps = 0
    trial.end(trial.start())


def two_runs_in_one_folder(trial: Trial) -> None:
    training = trial.start()
    trial.wait_for(lambda: trial.step() >= 2)
    trial.commands -= 1
    process = trial.rank_process(0)
    os.kill(process, signal.SIGSTOP)  # the run is short: it has to be there when the second comes
    second = trial.start(restarts=0)
    trial.notice("in use by another", process=second)
    trial.lost_steps = 0
    os.kill(process, signal.SIGCONT)
    for started in (second, training):
        trial.end(started)


FAULTS: list[Callable[[Trial], None]] = [
    killed_at_a_random_moment,
    killed_while_saving,
    frozen,
    slowed,
    lost_network,
    lost_and_new_machine,
    truncated_checkpoint,
    flipped_bit,
    full_disk,
    missing_data,
    two_runs_in_one_folder,
]


def attempt(lab: Lab, fault: Callable[[Trial], None], seed: int, number: int) -> dict[str, Any]:
    """Try a fault once; a row of the report."""
    chance = random.Random(f"{seed} {fault.__name__} {number}")
    trial = Trial(lab, f"{fault.__name__}-{seed}-{number}", chance)
    began, reason = time.monotonic(), ""
    try:
        fault(trial)
    except (OSError, RuntimeError, subprocess.SubprocessError, IndexError) as error:
        reason = f"the trial itself failed: {type(error).__name__}: {error}"
    return {
        "fault": fault.__name__.replace("_", " "),
        "seed": seed,
        "round": number,
        "processes": lab.processes,
        "survived": not reason and trial.ended_right(),
        "commands": trial.commands,
        "lost_steps": trial.lost_steps,
        "notice_seconds": trial.notice_seconds,
        "seconds": round(time.monotonic() - began, 1),
        "said": reason or trial.said,
        "steps": STEPS,
        "checkpoint_every": CHECKPOINT_EVERY,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1, help="times each fault is tried")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", help="names of faults")
    parser.add_argument("--folder", type=Path, help="keep data and runs here, use its data")
    parser.add_argument("--record", action="store_true", help="add rows to benchmarks/results")
    options = parser.parse_args()
    chosen = [one for one in FAULTS if not options.only or one.__name__ in options.only]
    if unknown := set(options.only or ()) - {one.__name__ for one in FAULTS}:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    folder = options.folder or Path(tempfile.mkdtemp(prefix="faults-"))
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    lab: Lab | None = None
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        lab = Lab(folder.resolve(), options.processes)
        for number in range(options.rounds):
            for fault in chosen:
                row = attempt(lab, fault, options.seed, number)
                rows.append(row)
                word = "survived" if row["survived"] else "NOT survived"
                noticed = row["notice_seconds"]
                after = "" if noticed is None else f", noticed after {noticed:.1f} s"
                print(
                    f"{row['fault']:28} {word}, {row['lost_steps']} steps lost{after}, "
                    f"{row['commands']} commands, {row['seconds']:.0f} s  {row['said']}",
                    flush=True,
                )
                if options.record:
                    where = where_measured()
                    append_records(result_file(RESULTS, "faults", where), [row], where)
    finally:
        if lab is not None:
            lab.close()
        if options.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    survived = sum(row["survived"] for row in rows)
    lost = sum(row["lost_steps"] for row in rows)
    print(
        f"{len(rows)} faults, {survived} survived, {lost} steps lost "
        f"(a checkpoint every {CHECKPOINT_EVERY} of {STEPS}); {options.processes} processes"
    )
    sys.exit(survived != len(rows))


if __name__ == "__main__":
    main()
