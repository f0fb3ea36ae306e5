"""The engine's thread pool: every piece once, from tiny regions to sleeping threads."""

import time

import numpy as np
import pytest

_cpu = pytest.importorskip("sparse_bitnet._cpu", reason="the extension is not built")


def visit(pool, regions: int, count: int, size: int, in_ranges: bool = False) -> np.ndarray:
    """The thread of each item; every item must have been visited once in each region."""
    visits, threads = np.zeros(max(count, 1), np.int32), np.full(max(count, 1), -1, np.int32)
    pool.count_visits(
        regions, count, size, visits.ctypes.data, threads.ctypes.data, in_ranges=in_ranges
    )
    assert (visits[:count] == regions).all()
    return threads[:count]


@pytest.mark.parametrize("in_ranges", [False, True])
@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_every_item_is_visited_once(threads, in_ranges):
    pool = _cpu.ThreadPool(threads)
    assert pool.threads == threads
    for count, size in [(0, 1), (1, 1), (2, 1), (7, 3), (64, 1), (1000, 7), (5, 100), (10, 6)]:
        seen = visit(pool, 300, count, size, in_ranges)
        assert ((seen >= 0) & (seen < threads)).all()


@pytest.mark.parametrize("threads", [2, 4])
def test_threads_that_sleep_are_woken(threads):
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


def test_a_thread_has_a_stretch_of_its_own():
    """What its first piece and its last have between them is its own, but for what others took over."""
    pool = _cpu.ThreadPool(2)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        seen = visit(pool, 1, 1_000_000, 1000, in_ranges=True)
        if seen[0] == 0 and seen[-1] != seen[0] and np.count_nonzero(np.diff(seen)) == 1:
            return
    pytest.fail("no region was split into two stretches")


def test_a_pool_ends_at_any_time():
    for pause in (0.0, 0.0, 0.0005, 0.001):
        pool = _cpu.ThreadPool(3)
        visit(pool, 2, 10, 1)
        time.sleep(pause)
        del pool
    for _ in range(20):
        _cpu.ThreadPool(4)
