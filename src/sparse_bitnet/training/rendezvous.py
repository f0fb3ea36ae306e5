# SPDX-License-Identifier: Apache-2.0
"""The rendezvous of a run's processes in a key-value store that remembers earlier ones.

torchrun's store outlives the processes that it starts. After a restart, and when a machine has left or
come, the store still holds the addresses of the dead, and the machines disagree about how often they
were restarted; so neither can tell the living from the dead. Here every process shows a number of its
own, the first one answers to all of them, and only when all have heard it do they share a name.
"""

import time
import uuid

import torch.distributed as dist

POLL_SECONDS = 0.05


def rendezvous(store: dist.Store, rank: int, size: int, timeout_seconds: float) -> str:
    """A name that exactly the `size` processes alive now have in common; all of them call it.

    A process that is replaced meanwhile is waited for; one that calls again later needs the others to
    call again too.

    Raises `TimeoutError` when somebody does not come within the time; in the first process it says who.
    """
    own = uuid.uuid4().hex
    store.set(_here(size, rank), own)
    deadline = time.monotonic() + timeout_seconds
    if rank == 0:
        return _host(store, size, deadline)
    heard = ""
    while time.monotonic() < deadline:
        if store.check([f"answer/{own}"]):
            name = store.get(f"answer/{own}").decode()
            if name != heard:
                store.set(_heard(name, rank), "")
                heard = name
            if store.check([f"complete/{name}"]):
                return name
        time.sleep(POLL_SECONDS)
    raise TimeoutError("some rank did not come" if heard else "rank 0 did not answer")


def _host(store: dist.Store, size: int, deadline: float) -> str:
    places = [_here(size, rank) for rank in range(size)]
    answered: list[bytes] = []
    name = ""
    while time.monotonic() < deadline:
        if store.check(places):
            present = store.multi_get(places)
            if present != answered:
                # Some of these may be dead; who is replaced shows another number and is answered anew.
                name, answered = uuid.uuid4().hex, present
                for number in present:
                    store.set(f"answer/{number.decode()}", name)
            if store.check([_heard(name, rank) for rank in range(1, size)]):
                store.set(f"complete/{name}", "")
                return name
        time.sleep(POLL_SECONDS)
    wanted = [_heard(name, rank) if name else place for rank, place in enumerate(places)]
    missing = [rank for rank in range(1, size) if not store.check([wanted[rank]])]
    named = ", ".join(str(rank) for rank in missing[:8]) + (" ..." if len(missing) > 8 else "")
    raise TimeoutError(f"no sign of rank {named}")


def _here(size: int, rank: int) -> str:
    return f"here/{size}/{rank}"


def _heard(name: str, rank: int) -> str:
    return f"heard/{name}/{rank}"
