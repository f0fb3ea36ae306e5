# SPDX-License-Identifier: Apache-2.0
"""`bench gpu --all`: steps that fail become rows, and the next call goes on with them."""

import json
import sys

import pytest

from sparse_bitnet.bench.gpu_all import PAGE, Step, all_steps, failure_of, run_all
from sparse_bitnet.cli.bench_gpu import main
from sparse_bitnet.errors import UserError

WRITES = "import sys; print('a table'); open(sys.argv[1], 'w').write('{\"seconds\": 1}\\n')"


def step(name: str, code: str, seconds: int = 60) -> Step:
    return Step(name, (sys.executable, "-c", code), seconds)


def test_every_failure_is_a_row_and_is_tried_again(tmp_path, capsys):
    steps = [
        step("good", WRITES),
        step("broken", "import sys; print('x'); sys.exit('an illegal access')"),
        step("silent", "pass"),
        step("slow", "import time; time.sleep(60)", seconds=1),
        Step("absent", (str(tmp_path / "no-program"),), 60),
    ]
    assert not run_all(tmp_path / "out", steps=steps)
    found = {each.name: failure_of(tmp_path / "out", each) for each in steps}
    assert found == {
        "good": "",
        "broken": "exit code 1: an illegal access",
        "silent": "it wrote no rows",
        "slow": "it took more than 1 s",
        "absent": "it cannot be started: No such file or directory",
    }
    row = json.loads((tmp_path / "out" / "broken.jsonl").read_text())
    assert {"commit", "hardware", "versions", "date"} <= row.keys()
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
    from sparse_bitnet.bench.gpu_options import GpuBenchOptions
    from sparse_bitnet.cli.arguments import parse

    steps = all_steps(rehearse)
    assert sum(each.seconds for each in steps) <= 40 * 60
    assert len({each.name for each in steps}) == len(steps) == 10
    for each in steps:
        if "bench" in each.command:
            _, *given, out = each.command[each.command.index("bench") + 1 :]
            assert out == "--out"
            options = parse(GpuBenchOptions, given, prog="bench")
            assert (options.device == "cpu") == rehearse


def test_what_cannot_be_done_is_refused(tmp_path):
    with pytest.raises(UserError, match="say --all"):
        main(["gpu"])
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        run_all(tmp_path / "file", steps=[])
