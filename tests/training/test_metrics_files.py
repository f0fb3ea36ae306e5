# SPDX-License-Identifier: Apache-2.0
"""Metrics files: whole lines up to the step that a run resumes from, and a full disk."""

import json
import os
from pathlib import Path

import pytest

from sparse_bitnet.errors import UserError
from sparse_bitnet.training.metrics import JsonLines, read_rows


@pytest.mark.parametrize(("after_step", "kept"), [(3, [0, 1, 2, 3]), (1, [0, 1]), (0, [])])
def test_rows_after_the_step_and_half_lines_are_dropped(
    tmp_path: Path, after_step: int, kept: list[int]
) -> None:
    """A run that begins again keeps no row, not even that of before its first step."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(6)) + '{"st')
    sink = JsonLines(path, after_step)
    sink.write({"step": 9})
    sink.close()
    assert [row["step"] for row in read_rows(path)] == [*kept, 9]
    assert os.listdir(tmp_path) == ["rows.jsonl"]


@pytest.mark.parametrize("line", ["\0\0", "{", "[1]", '{"loss": 1}', '{"step": "1"}'])
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    for read in (read_rows, lambda path: JsonLines(path, 2)):
        with pytest.raises(UserError, match=r"rows\.jsonl:2 is damaged: remove that line"):
            read(path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "rows.jsonl", 0)
    sink.close()
    sink._file = open("/dev/full", "a")
    with pytest.raises(UserError, match="cannot write /dev/full: No space left on device"):
        sink.write({"step": 1})
    sink.close()
