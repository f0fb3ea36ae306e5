# SPDX-License-Identifier: Apache-2.0
"""`bench gpu --all`: steps that fail become rows, and the next call goes on with them."""

import contextlib
import dataclasses
import json
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from sparse_bitnet.bench import gpu_all
from sparse_bitnet.bench.gpu_all import PAGE, Step, all_steps, failure_of, run_all
from sparse_bitnet.cli.bench import main
from sparse_bitnet.errors import UserError

OUTSIDE = gpu_all.run_command
WRITES = "import sys; print('a table'); open(sys.argv[1], 'w').write('{\"seconds\": 1}\\n')"


SLOW = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], stdin=subprocess.PIPE)
print(child.pid, flush=True)
child.wait()
"""


def step(name: str, code: str, seconds: int = 60) -> Step:
    return Step(name, (sys.executable, "-c", code), seconds)


def is_running(process: str) -> bool:
    try:
        return ") Z" not in Path("/proc", process, "stat").read_text()
    except OSError:
        return False


def test_every_failure_is_a_row_and_is_tried_again(tmp_path, capsys):
    steps = [
        step("good", WRITES),
        step("broken", "import sys; print('x'); sys.exit('an illegal access')"),
        step("silent", "pass"),
        step("halfway", f"{WRITES}; sys.stdout.flush(); sys.exit('no memory')"),
        step("slow", SLOW, seconds=1),
        Step("absent", (str(tmp_path / "no-program"),), 60),
        Step("counted", (sys.executable, "-c", "print('3 passed')"), 60, writes_rows=False),
    ]
    assert not run_all(tmp_path / "out", steps=steps)
    found = {each.name: failure_of(tmp_path / "out", each) for each in steps}
    assert found == {
        "good": "",
        "broken": "exit code 1: an illegal access",
        "silent": "it wrote no rows",
        "halfway": "exit code 1: no memory",
        "slow": "it took more than 1 s",
        "absent": "it cannot be started: No such file or directory",
        "counted": "",
    }
    child, deadline = (tmp_path / "out" / "slow.txt").read_text().strip(), time.monotonic() + 50
    while is_running(child):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert (tmp_path / "out" / "halfway.jsonl").read_text().endswith('}\n{"seconds": 1}\n')
    row = json.loads((tmp_path / "out" / "broken.jsonl").read_text())
    assert {"commit", "hardware", "versions", "date"} <= row.keys()
    row = json.loads((tmp_path / "out" / "counted.jsonl").read_text())
    assert (row["step"], row["result"]) == ("counted", "3 passed")
    page = (tmp_path / "out" / PAGE).read_text()
    assert "a table" in page
    assert "broken: exit code 1" in page
    capsys.readouterr()
    assert run_all(tmp_path / "out", steps=[steps[0], step("broken", WRITES)])
    assert capsys.readouterr().out.splitlines()[0] == "good: done before"
    (tmp_path / "out" / "good.jsonl").write_text("")
    assert failure_of(tmp_path / "out", steps[0]) == "it wrote no rows"


@pytest.mark.parametrize("rehearse", [False, True])
def test_the_steps_are_commands_that_exist_and_end_in_time(rehearse):
    from sparse_bitnet.bench.options import GpuBenchOptions
    from sparse_bitnet.cli.arguments import parse

    steps = all_steps(Path("out"), rehearse)
    assert sum(each.seconds for each in steps) <= 40 * 60
    assert len({each.name for each in steps}) == len(steps) == 10
    for each in steps:
        if "bench" in each.command:
            _, *given, out = each.command[each.command.index("bench") + 1 :]
            assert out == "--out"
            options = parse(GpuBenchOptions, given, prog="bench")
            assert (options.device == "cpu") == rehearse


def in_this_process(command, seconds, **options):
    """Stands for `run_command`: Python imports nothing anew."""
    if command[0] != sys.executable:
        return OUTSIDE(command, seconds, **options)
    sys.argv, stdout = [str(word) for word in command[1:]], options["stdout"]
    run = runpy.run_path
    if sys.argv[0] == "-m":
        sys.argv, run = sys.argv[1:], runpy.run_module
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stdout):
            run(sys.argv[0], run_name="__main__")
    except SystemExit as stop:
        if stop.code:
            raise subprocess.CalledProcessError(1, command) from stop
    return None


@pytest.mark.slow
def test_the_rehearsal_comes_to_its_end(tmp_path, monkeypatch):
    """On a CPU, from the tests to the runs of training, each with its rows."""
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.syspath_prepend("benchmarks")  # as a script of this folder finds it
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(gpu_all, "run_command", in_this_process)
    for page in Path("docs").glob("[a-e]*.md"):
        (tmp_path / f"{page.stem}.txt").write_bytes(page.read_bytes())
    out = tmp_path / "out"
    *steps, last = all_steps(out, rehearse=True)
    text = ("--source", f"{tmp_path}/*.txt", "--out")
    steps.append(dataclasses.replace(last, command=(*last.command[:-1], *text)))
    assert run_all(out, steps=steps), (out / PAGE).read_text()
    rows = {each.stem: each.read_text().splitlines() for each in out.glob("*.jsonl")}
    assert rows.keys() == {each.name for each in all_steps(out)}
    assert len(rows["forwards"]) == 5


def test_what_cannot_be_done_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="say --all"):
        main(["gpu"])
    with pytest.raises(UserError, match="no CUDA device; --rehearse"):
        main(["gpu", "--all"])
    assert not any(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="in the root of a checkout"):
        main(["gpu", "--all", "--rehearse"])
    with pytest.raises(UserError, match="cannot write"):
        run_all(tmp_path / "file", steps=[])


def test_a_step_that_failed_is_the_exit_code_and_a_rehearsal_lies_apart(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    broken = [step("broken", "raise SystemExit(3)")]
    monkeypatch.setattr(gpu_all, "all_steps", lambda *_: broken)
    with pytest.raises(SystemExit, match="1"):
        main(["gpu", "--all", "--rehearse"])
    assert [each.name for each in tmp_path.iterdir()] == ["gpu-rehearsal"]
