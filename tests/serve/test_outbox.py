# SPDX-License-Identifier: Apache-2.0
"""What a step brings wakes the event loop once."""

import asyncio

from sparse_bitnet.serve.outbox import Outbox


class Loop:
    def __init__(self):
        self.woken = []

    def call_soon_threadsafe(self, call, *arguments):
        self.woken.append((call, arguments))


def test_everything_goes_over_at_once_and_in_order():
    outbox, loop, taken = Outbox(), Loop(), []
    outbox.send()
    for number in range(3):
        outbox.add(loop, taken.append, number)
    outbox.send()
    outbox.send()
    [(call, arguments)] = loop.woken
    call(*arguments)
    assert taken == [0, 1, 2]


def test_a_loop_that_has_ended_is_passed_over():
    ended, loop, outbox = asyncio.new_event_loop(), Loop(), Outbox()
    ended.close()
    outbox.add(ended, print, 1)
    outbox.add(loop, print, 2)
    outbox.send()
    assert len(loop.woken) == 1
