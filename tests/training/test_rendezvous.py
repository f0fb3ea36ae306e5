# SPDX-License-Identifier: Apache-2.0
"""Processes find each other in a store that still holds what dead ones wrote."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from sparse_bitnet.training.rendezvous import rendezvous


def all_come(store: dist.Store, size: int, seconds: float = 20.0) -> list[str]:
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: rendezvous(store, rank, size, seconds), range(size)))


def test_all_get_one_name_and_a_new_one_every_time():
    store = dist.HashStore()
    names = [all_come(store, size) for size in (2, 3, 2)]
    assert [len(set(found)) for found in names] == [1, 1, 1]
    assert len({found[0] for found in names}) == 3


def test_the_numbers_of_the_dead_are_not_taken_for_the_living():
    store = dist.HashStore()
    all_come(store, 3)
    # Rank 2 of before is still in the store when the new rank 0 looks.
    with ThreadPoolExecutor(3) as pool:
        early = [pool.submit(rendezvous, store, rank, 3, 20.0) for rank in (0, 1)]
        time.sleep(0.3)
        assert not any(one.done() for one in early)
        late = pool.submit(rendezvous, store, 2, 3, 20.0)
        assert len({one.result() for one in (*early, late)}) == 1


def test_who_is_replaced_while_the_others_wait_is_answered_anew():
    store = dist.HashStore()
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(rendezvous, store, 0, 3, 20.0)
        replaced = pool.submit(rendezvous, store, 1, 3, 1.0)
        time.sleep(0.3)
        again = pool.submit(rendezvous, store, 1, 3, 20.0)
        time.sleep(0.3)
        last = pool.submit(rendezvous, store, 2, 3, 20.0)
        assert first.result() == again.result() == last.result()
        with pytest.raises(TimeoutError):
            replaced.result()


def test_who_does_not_come_is_named():
    store = dist.HashStore()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(rendezvous, store, 1, 4, 0.3)
        with pytest.raises(TimeoutError, match=r"no sign of rank 2, 3$"):
            rendezvous(store, 0, 4, 0.3)
        with pytest.raises(TimeoutError):
            waiting.result()
    with pytest.raises(TimeoutError, match="rank 0 did not answer"):
        rendezvous(dist.HashStore(), 1, 2, 0.2)
