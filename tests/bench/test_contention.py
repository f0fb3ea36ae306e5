# SPDX-License-Identifier: Apache-2.0
"""Whether others disturbed a measurement."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparse_bitnet.bench import contention
from sparse_bitnet.bench.contention import Contention, warning

pytestmark = pytest.mark.skipif(not Path("/proc/stat").is_file(), reason="Linux only")

BUSY = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True)\ninput()"


def test_the_processor_time_of_a_child_is_read() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        spent = contention._process_ticks(process.pid) / os.sysconf("SC_CLK_TCK")
        process.communicate(b"\n")
    assert spent >= 0.15


@pytest.mark.parametrize(
    ("total", "busy", "ours", "share"),
    [(10, 6, 4, 0.2), (10, 4, 4.01, 0.0), (10, 10, -1e-10, 1.0), (0, 0, 0, None)],
)
def test_what_is_not_ours_is_others(
    monkeypatch: pytest.MonkeyPatch, total: float, busy: float, ours: float, share: float | None
) -> None:
    """Also where clocks read one after another disagree, and where no time passed."""
    readings = iter([(100.0, 50.0, 5.0), (100.0 + total, 50.0 + busy, 5.0 + ours)])
    monkeypatch.setattr(Contention, "_seconds", lambda self: next(readings))
    assert Contention().others_share() == (share if share is None else pytest.approx(share))


def test_a_process_that_is_gone_makes_it_unknown() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    meanwhile = Contention([process.pid])
    process.communicate(b"\n")
    assert meanwhile.others_share() is None


def test_the_warning() -> None:
    assert warning(None) is None
    assert warning(0.01) is None
    assert "40%" in (warning(0.4) or "")
