# SPDX-License-Identifier: Apache-2.0
"""Turns, the machine's roofline, and whether others disturbed a measurement."""

import math
import subprocess
import sys
from pathlib import Path

import pytest

from sparse_bitnet.bench.machine import Contention, RooflineMeter, turns, warning


def test_every_job_comes_once_a_round_within_its_group() -> None:
    order = [job for _, job in turns([["a", "b", "c"], ["d"]], 8)]
    rounds = [order[first : first + 4] for first in range(0, 32, 4)]
    assert all(set(jobs[:3]) == {"a", "b", "c"} and jobs[3] == "d" for jobs in rounds)
    assert len({tuple(jobs) for jobs in rounds}) > 1


@pytest.mark.parametrize("threads", [1, 2])
def test_the_roofline_is_measured(threads: int) -> None:
    _cpu = pytest.importorskip("sparse_bitnet._cpu")
    meter = RooflineMeter(threads, ["generic"], read_bytes=8 << 20)
    for _ in range(2):
        meter.visit()
    best = meter.result("generic")
    assert (best["threads"], best["isa"]) == (threads, "generic")
    for name in ("read_bytes_per_second", "int8_ops_per_second"):
        assert 1e8 < best[name] < math.inf
    assert 1e8 < _cpu.Roofline(threads, 1).clock_rate(0.01) < 1e11


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("read_rate", (-1,)),
        ("read_rate", (1 << 20,)),
        ("int8_rate", ("sse", 0.01)),
        ("int8_rate", ("generic", 0.0)),
        ("int8_rate", ("generic", math.nan)),
        ("int8_rate", ("generic", 1e9)),
    ],
)
def test_what_cannot_be_measured_is_refused(method: str, arguments: tuple) -> None:
    _cpu = pytest.importorskip("sparse_bitnet._cpu")
    with pytest.raises(ValueError, match=r"out of range|this machine has"):
        getattr(_cpu.Roofline(1, 1 << 20), method)(*arguments)
    for sizes in ((0, 1), (1, 0), (1 << 20, 1), (1, -5), (1, 2**47), (1, 2**63 - 1)):
        with pytest.raises(ValueError, match="out of range"):
            _cpu.Roofline(*sizes)


@pytest.mark.skipif(not Path("/proc/stat").is_file(), reason="Linux only")
def test_the_share_of_others_is_unknown_once_a_process_of_ours_is_gone() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    meanwhile = Contention([process.pid])
    share = meanwhile.others_share()
    assert share is None or 0 <= share <= 1
    process.communicate(b"\n")
    assert meanwhile.others_share() is None


def test_a_disturbed_measurement_is_warned_of() -> None:
    assert warning(None) is None
    assert warning(0.01) is None
    assert "40%" in (warning(0.4) or "")
