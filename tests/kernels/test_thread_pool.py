# SPDX-License-Identifier: Apache-2.0
"""The engine's thread pool: every piece once, from tiny regions to sleeping threads."""

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import numpy as np
import pytest

from one_process import run_in_fork, run_python

_cpu = pytest.importorskip("sparse_bitnet._cpu", reason="the extension is not built")


def visit(pool, regions: int, count: int, size: int, least: int = 0) -> np.ndarray:
    """The thread of each item; every item must have been visited once in each region."""
    visits, threads = np.zeros(max(count, 1), np.int32), np.full(max(count, 1), -1, np.int32)
    pool.count_visits(regions, count, size, visits.ctypes.data, threads.ctypes.data, least=least)
    assert (visits[:count] == regions).all()
    return threads[:count]


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_every_item_is_visited_once(threads):
    pool = _cpu.ThreadPool(threads)
    assert pool.threads == threads
    for count, size in [(0, 1), (1, 1), (2, 1), (7, 3), (64, 1), (1000, 7), (5, 100), (10, 6)]:
        seen = np.append(visit(pool, 300, count, size), visit(pool, 300, count, size, min(size, 3)))
        assert ((seen >= 0) & (seen < threads)).all()


@pytest.mark.parametrize("threads", [2, 4])
def test_sleeping_threads_are_woken(threads):
    pool = _cpu.ThreadPool(threads)
    for _ in range(30):
        visit(pool, 3, 50, 1)
        time.sleep(0.001)


def test_other_threads_take_part():
    pool = _cpu.ThreadPool(2)
    seen: set[int] = set()
    deadline = time.monotonic() + 20
    while seen != {0, 1} and time.monotonic() < deadline:
        seen |= set(visit(pool, 1, 1_000_000, 100).tolist())
    assert seen == {0, 1}


def test_a_thread_computes_a_contiguous_stretch():
    """A thread computes all from its first to its last piece, but for what others took over."""
    pool = _cpu.ThreadPool(2)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        seen = visit(pool, 1, 1_000_000, 1000)
        if seen[0] == 0 and seen[-1] != seen[0] and np.count_nonzero(np.diff(seen)) == 1:
            return
    pytest.fail("no region was split into two stretches")


def assert_one_caller_at_a_time(busy: Callable, call: Callable, message: str) -> None:
    """Require that `call` is refused, within a minute, while another thread calls `busy` all the time."""
    started, stop = threading.Event(), threading.Event()

    def keep_busy() -> None:
        while not stop.is_set():
            with suppress(RuntimeError):  # the other thread was first
                started.set()
                busy()

    def call_for_a_minute() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            call()

    other = threading.Thread(target=keep_busy)
    other.start()
    try:
        assert started.wait(60)
        with pytest.raises(RuntimeError, match=message):
            call_for_a_minute()
    finally:
        stop.set()
        other.join()


def test_one_caller_at_a_time():
    pool = _cpu.ThreadPool(2)
    visit_all = partial(visit, pool, 100, 100_000, 1000)
    message = "another thread is using this thread pool"
    assert_one_caller_at_a_time(visit_all, visit_all, message)
    visit(pool, 3, 50, 1)


def test_the_child_of_a_fork_works_alone():
    pools = [_cpu.ThreadPool(2)]
    visit(pools[0], 1, 50, 1)

    def check() -> None:
        assert not visit(pools[0], 3, 50, 1).any()
        pools.clear()  # does not wait for threads that are not there
        visit(_cpu.ThreadPool(2), 3, 50, 1)

    run_in_fork(check)
    visit(pools[0], 1, 50, 1)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_exceptions_of_a_piece_reach_the_caller(threads):
    pool = _cpu.ThreadPool(threads)
    visits = np.zeros(500, np.int32)
    for failing in range(0, 500, 7):
        with pytest.raises(MemoryError):
            pool.count_visits(3, 500, 3, visits.ctypes.data, visits.ctypes.data, failing=failing)
        visit(pool, 1, 500, 3)


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
def test_the_pool_works_without_threads_that_cannot_start():
    script = """
import ctypes, resource
from sparse_bitnet import _cpu
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (100 << 20), -1))
pool = _cpu.ThreadPool(64)
memory = (ctypes.c_int32 * 2000)()
address = ctypes.addressof(memory)
pool.count_visits(3, 1000, 1, address, address + 4000)
print(pool.threads, set(memory[:1000]))
"""
    threads, visits = run_python(script).split(maxsplit=1)
    assert 1 <= int(threads) < 64
    assert visits == "{3}\n"
