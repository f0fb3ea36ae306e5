# SPDX-License-Identifier: Apache-2.0
"""Whether others disturbed a measurement."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from sparse_bitnet.bench.contention import Contention, warning

pytestmark = pytest.mark.skipif(not Path("/proc/stat").is_file(), reason="Linux only")

BUSY = "import time\nend = time.monotonic() + 0.7\nwhile time.monotonic() < end: pass"


def test_a_process_of_ours_does_not_count_as_others() -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY]) as process:
        ours, everyone = Contention([process.pid]), Contention()
        time.sleep(0.5)
        mine, all_others = ours.others_share(), everyone.others_share()
    assert mine is not None
    assert all_others is not None
    assert 0 <= mine < all_others <= 1


def test_a_process_that_is_gone_makes_it_unknown() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    contention = Contention([process.pid])
    process.communicate(b"\n")
    assert contention.others_share() is None


def test_the_warning() -> None:
    assert warning(None) is None
    assert warning(0.01) is None
    assert "40%" in (warning(0.4) or "")
