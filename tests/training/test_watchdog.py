# SPDX-License-Identifier: Apache-2.0
"""What a process says of the others, from their heartbeats alone."""

import time
from typing import Any

import pytest
import torch.distributed as dist

from sparse_bitnet.training.watchdog import Watchdog


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    return server


def watched(rank: int, size: int, name: str = "n") -> Watchdog:
    """One that cannot end the process of the tests."""
    return Watchdog(rank, size, 2.0, name=name, give_up=lambda said: None)


def until(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_all_alive_and_in_step_is_nothing_to_say(store):
    with watched(0, 2) as watchdog, watched(1, 2):
        until(lambda: len(watchdog._read()) == 2)
        assert watchdog.diagnose() == ""


def test_the_dead_the_slow_and_the_absent_are_told_apart(store):
    with watched(0, 4) as watchdog, watched(1, 4) as slow:
        watchdog.progress(5)
        slow.progress(3)
        with watched(2, 4) as dead:
            dead.progress(4)
            until(lambda: watchdog._read().get(2, {}).get("step") == 4)
        until(lambda: watchdog._read()[1]["step"] == 3)
        said = watchdog.diagnose()
    assert "rank 3 never appeared" in said
    assert "died or lost its network, last heard of at step 4" in said
    assert "is slow: at step 3, others at 5" in said
    assert said.index("rank 2 (") < said.index("rank 1 (")


def test_beats_of_an_earlier_rendezvous_are_not_heard(store):
    with watched(1, 2, "before") as old:
        until(lambda: 1 in old._read())
    with watched(0, 2, "now") as watchdog:
        until(lambda: 0 in watchdog._read())
        assert watchdog.diagnose() == "rank 1 never appeared"


def test_progress_while_the_others_are_asked_counts(store):
    said: list[str] = []
    with Watchdog(0, 2, 1.0, name="n", give_up=said.append) as watchdog:
        really_ask = watchdog._asked

        def ask() -> Any:
            found = really_ask()
            watchdog.progress(1)
            asked.append(found)
            return found

        asked: list[Any] = []
        watchdog._asked = ask  # type: ignore[method-assign]
        until(lambda: bool(asked))
        assert not said


def test_without_progress_it_gives_up_within_the_limit(store):
    said: list[str] = []
    began = time.monotonic()
    with Watchdog(0, 2, 1.0, name="n", give_up=said.append):
        until(lambda: bool(said))
    assert time.monotonic() - began < 10
    assert said[0].startswith("rank 0: no step ended for 1 s: rank 1 never appeared")


def test_a_store_that_does_not_answer_ends_the_diagnosis(store, monkeypatch):
    with Watchdog(1, 2, 1.0, name="n", give_up=lambda said: None) as watchdog:
        monkeypatch.setattr(watchdog, "_read", lambda: time.sleep(5))
        began = time.monotonic()
        said = watchdog.diagnose()
        assert time.monotonic() - began < 5
    assert "key-value store at 127.0.0.1 does not answer" in said
    assert "rank 0" in said


def test_nobody_gives_up_while_another_is_busy_and_alive(store):
    said: list[str] = []
    with Watchdog(0, 2, 1.0, name="n", give_up=said.append) as waiting, watched(1, 2) as working:
        until(lambda: len(waiting._read()) == 2)
        with working.busy():
            until(lambda: waiting._read()[1]["busy"])
            began, asked = time.monotonic(), waiting._asked().busy
            until(lambda: time.monotonic() - began > 3)
            assert asked
            assert not said, "three times the limit"
        until(lambda: bool(said))
    assert "no step ended for 1 s" in said[0]


def test_a_busy_process_that_dies_is_lost(store):
    said: list[str] = []
    with Watchdog(0, 2, 1.0, name="n", give_up=said.append) as waiting:
        with watched(1, 2) as dead, dead.busy():
            until(lambda: waiting._read().get(1, {}).get("busy", False))
            dead._stop.set()
            until(lambda: bool(said))
    assert "rank 1 (" in said[0]
    assert "died or lost its network" in said[0]


def test_all_beats_are_read_at_once(store):
    class Counting:
        """A store that counts its round trips."""

        def __init__(self) -> None:
            self.calls: list[str] = []

        def __getattr__(self, name: str) -> Any:
            self.calls.append(name)
            return getattr(kept, name)

    with watched(0, 3) as watchdog, watched(1, 3), watched(2, 3):
        until(lambda: len(watchdog._read()) == 3)
        kept = watchdog._store
        counting = Counting()
        reader = watched(0, 3)
        reader._store = counting  # type: ignore[assignment]
        assert sorted(reader._read()) == [0, 1, 2]
    assert counting.calls == ["check", "multi_get"]


def test_collectives_outlast_the_diagnosis():
    watchdog = Watchdog(0, 2, 600.0, name="n", give_up=lambda said: None)
    assert watchdog.longest_silence > 600 + watchdog.interval + watchdog._diagnosis_seconds
